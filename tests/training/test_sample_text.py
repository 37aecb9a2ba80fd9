"""Samples while a run trains: they change nothing, and are the same on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.events.records import Event, Finished, Sampled, Saved, Step, Stopped
from phalanx.models.sampling import Sampling, generate
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.training.step_totals import PAUSE

PROMPTS = 'train.sample_prompts=["the ", ""]'
SAMPLES = ("train.sample_every=2", PROMPTS, "train.sample_tokens=9")
GREEDY = "train.sample_temperature=0"
SHAPE = ("model.layers=2", "model.heads=2", "model.kv_heads=2", "model.init_std=0.3")
LAYOUTS = {
    "data": Layout(data=2),
    "zero3": Layout(data=1, shard=2, zero=3),
    "tensor": Layout(data=1, tensor=2, sequence=True),
    "pipeline": Layout(data=1, pipeline=2),
    "context": Layout(data=1, context=2),
}


def trained(mesh: Mesh, directory: Path, *overrides: str) -> tuple[list[Event], dict[str, Tensor], list[float]]:
    """Events, the final state, and random numbers drawn at the end of every step."""
    trainer = tiny_trainer(mesh, tiny_run("train.steps=4", *SHAPE, *overrides), directory / f"{mesh.ranks}-{len(overrides)}")
    events, numbers = list[Event](), list[float]()
    for event in trainer.events():
        events.append(event)
        if isinstance(event, Step):
            state = torch.get_rng_state()
            numbers.append(float(torch.rand(())))
            torch.set_rng_state(state)
    return events, copied(trainer.tensors()), numbers


def steps(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(event.step, event.loss, event.grad_norm, event.batch_digest) for event in events if isinstance(event, Step)]


def test_samples_change_neither_losses_nor_state_nor_random_numbers(tmp_path: Path) -> None:
    plain, state, numbers = trained(ALONE, tmp_path, "train.eval_every=2")
    events, sampled_state, sampled_numbers = trained(ALONE, tmp_path, "train.eval_every=2", *SAMPLES)
    assert steps(events) == steps(plain) and len(steps(plain)) == 4, "bit for bit"
    assert differing(sampled_state, state) == [] and sampled_numbers == numbers
    samples = [event for event in events if isinstance(event, Sampled)]
    assert [(one.step, one.prompt) for one in samples] == [(2, "the "), (2, ""), (4, "the "), (4, "")]
    assert all(1 <= one.tokens <= 9 for one in samples) and not any(isinstance(event, Sampled) for event in plain)
    kinds = [event.kind for event in events]
    assert kinds == ["step", "step", "evaluated", "sampled", "sampled"] * 2 + ["saved", "finished"]


def test_samples_equal_generated_text(tmp_path: Path) -> None:
    """Greedy text without a cache, from the placed model, equals that of `generate`, which has one."""
    trainer = tiny_trainer(ALONE, tiny_run(*SHAPE, *SAMPLES, GREEDY), tmp_path)
    trainer.step()
    words = trainer.data.tokenizer
    for one in trainer.sample():
        start = words.encode(one.prompt).tolist() or [words.end]
        expected = list(generate(trainer.model, start, 9, words.end, Sampling(temperature=0)))
        assert one.text == words.decode(expected) and one.tokens == len(expected)
    trainer.close()


def samples_of(mesh: Mesh, directory: Path, *overrides: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Greedy samples of the initial weights, and the state that has changed thereby."""
    trainer = tiny_trainer(mesh, tiny_run(*SHAPE, *SAMPLES, GREEDY, *overrides), directory / str(mesh.ranks))
    before = copied(trainer.tensors())
    samples = [(one.text, one.tokens) for one in trainer.sample()]
    changed = differing(before, trainer.tensors())
    trainer.close()
    return samples, changed


@pytest.mark.parametrize("name", LAYOUTS)
def test_samples_are_the_same_on_any_layout(name: str, tmp_path: Path) -> None:
    expected, _ = samples_of(ALONE, tmp_path / "alone")
    assert len({text for text, _ in expected}) == 2
    for samples, changed in run_ranks(samples_of, 2, tmp_path, layout=LAYOUTS[name]):
        assert samples == expected and changed == []


def test_samples_of_experts_on_several_ranks(tmp_path: Path) -> None:
    mixture = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32")
    expected, _ = samples_of(ALONE, tmp_path / "alone", *mixture)
    for samples, changed in run_ranks(samples_of, 2, tmp_path, *mixture, layout=Layout(data=2, expert=2)):
        assert samples == expected and changed == []


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_sharded_losses_are_the_same_with_samples(name: str, tmp_path: Path) -> None:
    plain = run_ranks(trained, 2, tmp_path, layout=LAYOUTS[name])
    sampled = run_ranks(trained, 2, tmp_path, *SAMPLES, layout=LAYOUTS[name])
    for (events, state, _), (other, other_state, _) in zip(plain, sampled, strict=True):
        assert steps(events) == steps(other) and differing(state, other_state) == []
    one, two = ([(event.step, event.text) for event in events if isinstance(event, Sampled)] for events, _, _ in sampled)
    assert one == two and len(one) == 4, "ranks draw the same tokens"


def told_meanwhile(mesh: Mesh, directory: Path, pause: bool) -> tuple[list[Event], int]:
    """Rank 1 is told to end in the samples after step 2."""
    trainer = tiny_trainer(mesh, tiny_run("train.steps=3", *SHAPE, "train.sample_every=2", "train.sample_tokens=12"), directory)
    forward, forwards = trainer.stepper.forward, list[int]()

    def counted(*args: Any) -> None:
        forwards.append(trainer.progress.step)
        if mesh.rank == 1 and len(forwards) == 2:
            trainer.pause() if pause else trainer.stop("SIGTERM")
        forward(*args)

    trainer.stepper.forward = counted  # type: ignore[method-assign]
    return list(trainer.events()), trainer.stop_signal.agreed


def test_ranks_leave_samples_together_when_one_is_told_to_stop(tmp_path: Path) -> None:
    for told, _ in run_ranks(told_meanwhile, 2, tmp_path, False):
        assert [type(event) for event in told] == [Step, Step, Saved, Stopped]
    for told, heard in run_ranks(told_meanwhile, 2, tmp_path / "paused", True):
        assert [type(event) for event in told] == [Step, Step] and heard == PAUSE


def test_samples_stop_where_the_sequence_ends(tmp_path: Path) -> None:
    run = tiny_run(*SHAPE, "train.sample_every=1", "train.sample_tokens=1000", "train.sample_temperature=5")
    trainer = tiny_trainer(ALONE, run, tmp_path)
    (one,) = trainer.sample()
    assert one.tokens <= run.train.sequence_length - 1
    trainer.close()


def test_prompt_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(*SHAPE, "train.sample_every=1", f'train.sample_prompts=["{"x" * 300}"]'), tmp_path)
    with pytest.raises(RunError, match=r"train.sample_prompts: 'xxx.* has 300 tokens, which leaves no room"):
        list(trainer.sample())
    trainer.close()


def test_last_samples_come_before_the_end(tmp_path: Path) -> None:
    events, *_ = trained(ALONE, tmp_path, "train.sample_every=3", "train.sample_tokens=2")
    assert [event.step for event in events if isinstance(event, Sampled)] == [3, 4]
    assert isinstance(events[-1], Finished)
