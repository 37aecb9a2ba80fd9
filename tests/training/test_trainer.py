from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ALONE, TINY, copied, differing, tiny_run, tiny_trainer
from torch import Tensor

import phalanx
from phalanx.checkpointing import directory
from phalanx.events.records import Evaluated, Event, Finished, Restored, Saved, Step, StepSkipped, Stopped
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunFailed
from phalanx.spec.load import loads
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step_totals import StopSignal
from phalanx.training.trainer import Trainer
from phalanx.watch.sinks.curves import curves


def losses(events: list[Any]) -> list[tuple[int, float, float, str]]:
    """Of each step what must not depend on how it came about."""
    return [(e.step, e.loss, e.grad_norm, e.batch_digest) for e in events if isinstance(e, Step)]


def uninterrupted(run: Run, directory: Path) -> tuple[list[Event], dict[str, Tensor]]:
    trainer = tiny_trainer(ALONE, run, directory)
    events = list(trainer.events())
    return events, copied(trainer.tensors())


def on_forward(trainer: Trainer, number: int, what: Callable[[Tensor], Tensor | None]) -> None:
    """Have `what` see the logits of one forward, counted from now, and perhaps replace them."""
    count = 0

    def hook(module: torch.nn.Module, inputs: Any, logits: Tensor) -> Tensor | None:
        nonlocal count
        count += 1
        return what(logits) if count == number else None

    trainer.model.register_forward_hook(hook)


def test_the_loss_falls(tmp_path: Path) -> None:
    events, _ = uninterrupted(tiny_run("train.steps=30"), tmp_path)
    steps = [event for event in events if isinstance(event, Step)]
    assert steps[0].loss == pytest.approx(math.log(257), rel=0.02)  # as good as guessing
    assert sum(step.loss for step in steps[-5:]) / 5 < 0.6 * steps[0].loss
    evaluated = next(event for event in events if isinstance(event, Evaluated))
    assert evaluated.loss < 0.7 * steps[0].loss


@pytest.mark.parametrize("behind", ["true", "false"])
def test_events_tell_what_happens_in_order(behind: str, tmp_path: Path) -> None:
    saves = ("checkpoint.every=2", "checkpoint.keep_last=10", f"checkpoint.async_save={behind}")
    events, _ = uninterrupted(tiny_run("train.steps=5", "train.eval_every=2", *saves), tmp_path)
    told = [(event.kind, event.step) for event in events]  # type: ignore[attr-defined]
    expected = [
        ("step", 1),
        ("step", 2), ("evaluated", 2), ("saved", 2),
        ("step", 3),
        ("step", 4), ("evaluated", 4), ("saved", 4),
        ("step", 5), ("evaluated", 5), ("saved", 5), ("finished", 5),
    ]  # fmt: skip
    if behind == "true":  # one that goes on behind the next steps is told of when it has ended, but before the next begins
        assert told.index(("saved", 2)) < told.index(("saved", 4)) < told.index(("saved", 5)) == len(told) - 2
        assert all(told.index(("saved", step)) >= expected.index(("saved", step)) for step in (2, 4, 5))
        told, expected = ([one for one in both if one[0] != "saved"] for both in (told, expected))
    assert told == expected
    for event in events:
        if isinstance(event, Saved):
            assert event.path == str(directory.step_dir(tmp_path, event.step))
            assert event.bytes == sum(file.stat().st_size for file in Path(event.path).glob("*.safetensors"))


def test_evaluation_and_save_due_at_the_last_step_happen_once(tmp_path: Path) -> None:
    events, _ = uninterrupted(tiny_run("train.steps=4", "train.eval_every=2", "checkpoint.every=2"), tmp_path)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [2, 4]
    assert [event.step for event in events if isinstance(event, Saved)] == [2, 4]


def test_every_source_of_a_mixture_is_evaluated_by_itself(tmp_path: Path) -> None:
    easy, hard = json.dumps(["ab" * 400]), json.dumps([str(n * n * 7919) for n in range(300)])
    mix = [f"data.mix.{name}.{key}={value}" for name in ("easy", "hard") for key, value in (("source", "memory"),)]
    mix += [f"data.mix.easy.documents={easy}", f"data.mix.hard.documents={hard}"]
    text = TINY.replace('source = "memory"', "").replace("documents =", "# documents =")
    run = loads(text, overrides=[*mix, "train.steps=25", "train.eval_sequences=4"])
    trainer = tiny_trainer(ALONE, run, tmp_path)
    evaluated = next(event for event in trainer.events() if isinstance(event, Evaluated))
    assert list(evaluated.sources) == ["easy", "hard"]
    assert evaluated.sources["easy"]["loss"] < 0.7 * evaluated.sources["hard"]["loss"]
    total = sum(of["loss"] * of["tokens"] for of in evaluated.sources.values())
    assert evaluated.tokens == sum(of["tokens"] for of in evaluated.sources.values())
    assert evaluated.loss == pytest.approx(total / evaluated.tokens)
    assert curves(evaluated)[1]["eval/easy/loss"] == evaluated.sources["easy"]["loss"]


def test_a_run_without_held_out_data_is_not_evaluated(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("data.eval_fraction=0", "train.steps=1"), tmp_path)
    assert trainer.evaluate() is None
    assert [type(event) for event in trainer.events()] == [Step, Saved, Finished]


def test_a_step_record_describes_the_step(tmp_path: Path) -> None:
    run = tiny_run()
    trainer = tiny_trainer(ALONE, run, tmp_path)
    for number in (1, 2, 3):
        step = trainer.step()
        assert isinstance(step, Step)
        assert step.step == number
        assert step.samples == 8 * number == trainer.progress.samples
        assert step.learning_rate == pytest.approx([0.005, 0.01, 0.01][number - 1])
        assert 8 * 24 * 0.8 < step.tokens < 8 * 24  # all but the masked
        assert step.tokens_per_second == pytest.approx(8 * 24 / step.seconds)
        assert step.flops_per_second == pytest.approx(step.tokens_per_second * run.model.flops_per_token(24))
        assert step.mfu is None
        assert 10 << 20 < step.memory < 1 << 35
    trainer.close()


def test_evaluation_is_the_mean_over_the_first_held_out_sequences(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    trainer.step()
    before = copied(trainer.tensors())
    got = trainer.evaluate()
    assert got is not None
    assert trainer.evaluate() == replace(got, seconds=pytest.approx(0, abs=60))
    assert differing(before, trainer.tensors()) == []
    (held_out,) = trainer.data.eval.values()
    total, count = 0.0, 0
    with torch.no_grad():
        for index in range(5):  # one by one, without micro-batches
            tokens, targets, positions, documents, _ = map(torch.from_numpy, held_out.batch(np.array([index])))
            logs = trainer.model(tokens, positions, documents)[0].double().log_softmax(-1)
            for place, target in enumerate(targets[0].tolist()):
                if target >= 0:
                    total, count = total - logs[place, target].item(), count + 1
    assert got.tokens == count
    assert got.loss == pytest.approx(total / count, rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(got.loss))
    assert got.sources == {"memory": {"loss": got.loss, "perplexity": got.perplexity, "tokens": count}}
    trainer.close()


@pytest.mark.parametrize("overrides", [(), ("optimizer.name=muon",), ("precision.compute=bf16",)], ids=str)
def test_a_resumed_run_equals_one_that_never_stopped(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = tiny_run("train.steps=7", *overrides)
    events, final = uninterrupted(run, tmp_path / "whole")
    first = tiny_trainer(ALONE, run, tmp_path / "parts")
    taken = [first.step() for _ in range(3)]
    saved = first.save()
    first.close()
    second = tiny_trainer(ALONE, run, tmp_path / "parts")
    (restored,) = second.restore()
    assert isinstance(restored, Restored)
    assert (restored.step, restored.path) == (3, saved.path)
    assert differing(first.tensors(), second.tensors()) == []
    assert second.progress == first.progress
    taken += list(second.events())  # type: ignore[arg-type]
    assert losses(taken) == losses(events)
    assert differing(second.tensors(), final) == []
    assert taken[-2].kind == "saved"  # type: ignore[union-attr]


def test_restore_within_a_run_goes_back(tmp_path: Path) -> None:
    # The same trainer, in the same process: the loader's position is part of what is restored.
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    trainer.step()
    path = Path(trainer.save().path)
    state = copied(trainer.tensors())
    ahead = [trainer.step() for _ in range(3)]
    assert differing(state, trainer.tensors()) != []
    assert [event.kind for event in trainer.restore(path)] == ["restored"]
    assert differing(state, trainer.tensors()) == []
    assert losses([trainer.step() for _ in range(3)]) == losses(ahead)
    trainer.close()


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path / "none")
    before = copied(trainer.tensors())
    assert trainer.restore() == []
    assert differing(before, trainer.tensors()) == []
    assert trainer.progress.step == 0


def test_a_run_begins_with_given_weights_and_goes_on_with_its_own(tmp_path: Path) -> None:
    """model.from: the weights of another run, whose optimizer and position in the data are not taken over."""
    first = tiny_trainer(ALONE, tiny_run("train.steps=3"), tmp_path / "first" / "checkpoints")
    list(first.events())
    (tmp_path / "first" / "run.toml").write_text(dump(first.run))
    run = tiny_run("train.steps=2")
    run = replace(run, model=replace(run.model, from_=str(tmp_path / "first")))
    second = tiny_trainer(ALONE, run, tmp_path / "second")
    assert differing(weights(first), weights(second)) != []
    (loaded,) = second.restore()
    assert (loaded.kind, loaded.path) == ("weights_loaded", str(tmp_path / "first"))  # type: ignore[attr-defined]
    assert differing(weights(first), weights(second)) == []
    assert second.progress.step == second.progress.samples == 0
    assert not any(state.any() for state in second.optimizer.state().values())
    assert second.restore() == []  # once is enough, and would undo what is learned from now on
    second.step()
    second.save()
    third = tiny_trainer(ALONE, run, tmp_path / "second")
    assert [event.kind for event in third.restore()] == ["restored"]
    assert differing(third.tensors(), second.tensors()) == []
    second.close()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in copied(trainer.tensors()).items() if name.startswith("model/")}


def test_a_program_may_drive_the_loop_itself(tmp_path: Path) -> None:
    # Through the package's own door, on whatever plan it makes for this machine.
    run = tiny_run("layout.data=1")
    events, final = uninterrupted(run, tmp_path / "events")
    trainer = phalanx.trainer(run, checkpoints=tmp_path / "own")
    taken = []
    while not trainer.finished:
        taken.append(trainer.step())
    assert losses(taken) == losses(events)
    assert differing(trainer.tensors(), final) == []
    trainer.close()


def in_step(trainer: Trainer, *numbers: int) -> Callable[[], bool]:
    """Whether one of these steps is being taken, the next where none is named: also when it is traced, and taken once more."""
    named = numbers or (trainer.progress.step + 1,)
    return lambda: trainer.stepper.number in named


def poison_logits(trainer: Trainer, *numbers: int) -> None:
    now = in_step(trainer, *numbers)
    trainer.model.register_forward_hook(lambda module, given, logits: logits * math.nan if now() else None)


def poison_one_gradient(trainer: Trainer) -> None:
    """The loss is finite; one element of one gradient is not."""
    now = in_step(trainer)

    def spoil(gradient: Tensor) -> Tensor:
        if not now():
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[3] = math.inf
        return gradient

    trainer.model.blocks["1"].mlp.up.weight.register_hook(spoil)


def poison_loss(trainer: Trainer) -> None:
    """Every gradient is finite; the loss is not."""
    whole, now = trainer.stepper.losses, in_step(trainer)

    def spoil(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        loss, backward_from = whole(output, batch)
        return (loss + math.inf, backward_from) if now() else (loss, backward_from)

    trainer.stepper.losses = spoil  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("poison", [poison_logits, poison_one_gradient, poison_loss])
def test_a_batch_with_nonfinite_loss_is_skipped(poison: Callable[[Trainer], None], optimizer: str, tmp_path: Path) -> None:
    run = tiny_run(f"optimizer.name={optimizer}")
    clean, _ = uninterrupted(run, tmp_path / "clean")
    trainer = tiny_trainer(ALONE, run, tmp_path / "poisoned")
    taken = [trainer.step(), trainer.step()]
    before = copied(trainer.tensors())
    poison(trainer)
    skipped = trainer.step()
    assert isinstance(skipped, StepSkipped)
    assert (skipped.step, skipped.samples, skipped.in_a_row) == (3, 24, 1)
    assert math.isfinite(skipped.loss) == (poison is poison_one_gradient)
    assert math.isfinite(skipped.grad_norm) == (poison is poison_loss)
    assert differing(before, trainer.tensors()) == []
    assert (trainer.progress.step, trainer.progress.samples, trainer.progress.skipped_in_a_row) == (3, 24, 1)
    # The next step works, on the batch that comes next, and differs from the clean run's only in what step 3 changed.
    following = trainer.step()
    assert isinstance(following, Step)
    expected = losses(clean)
    assert losses(taken) == expected[:2]
    assert following.batch_digest == expected[3][3]
    assert following.loss != expected[3][1]
    assert trainer.progress.skipped_in_a_row == 0
    assert differing(before, trainer.tensors()) != []
    trainer.close()


def test_a_skipped_step_survives_a_resumption(tmp_path: Path) -> None:
    run = tiny_run()
    one = tiny_trainer(ALONE, run, tmp_path)
    poison_logits(one)
    assert isinstance(one.step(), StepSkipped)
    one.save()
    two = tiny_trainer(ALONE, run, tmp_path)
    two.restore()
    assert two.progress == one.progress
    assert two.progress.skipped_in_a_row == 1
    assert losses([two.step(), two.step()]) == losses([one.step(), one.step()])
    one.close()
    two.close()


def test_too_many_skipped_in_a_row_end_the_run_with_everything_saved(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("resilience.max_skipped=2", "train.steps=20"), tmp_path)
    told: list[Any] = [trainer.step()]
    before = copied(trainer.tensors())
    trainer.model.register_forward_hook(lambda module, inputs, logits: logits * math.nan)
    with pytest.raises(RunFailed, match=r"3 steps in a row .*max_skipped = 2; nothing was applied since step 1\.") as failed:
        for event in trainer.events():
            told.append(event)
    assert "`phalanx data preview " in str(failed.value) and "run.toml --step 2`" in str(failed.value)
    assert [(event.kind, event.step) for event in told] == [
        ("step", 1), ("step_skipped", 2), ("not_finite", 2), ("step_skipped", 3), ("step_skipped", 4), ("saved", 4),
    ]  # fmt: skip
    again = tiny_trainer(ALONE, tiny_run(), tmp_path)
    again.restore()
    assert differing(before, again.tensors()) == []
    assert again.progress.samples == 32
    trainer.close()


def test_skipped_steps_apart_from_each_other_do_not_add_up(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("resilience.max_skipped=1"), tmp_path)
    poison_logits(trainer, 1, 3, 5)
    kinds = [event.kind for event in trainer.events() if isinstance(event, Step | StepSkipped)]
    assert kinds == ["step_skipped", "step", "step_skipped", "step", "step_skipped", "step"]


@pytest.mark.parametrize("forward", [1, 2, 3])
def test_a_stop_within_a_step_changes_nothing_and_the_step_is_taken_again(forward: int, tmp_path: Path) -> None:
    run = tiny_run()
    events, final = uninterrupted(run, tmp_path / "whole")
    one = tiny_trainer(ALONE, run, tmp_path / "stopped")
    taken: list[Any] = [one.step(), one.step()]
    before, progress = copied(one.tensors()), (one.progress.step, one.progress.samples)
    on_forward(one, forward, lambda logits: one.stop("by hand"))
    told = list(one.events())
    assert [(event.kind, event.step) for event in told] == [("saved", 2), ("stopped", 2)]  # type: ignore[attr-defined]
    assert isinstance(told[-1], Stopped)
    assert told[-1].reason == "by hand"
    assert differing(before, one.tensors()) == []
    assert (one.progress.step, one.progress.samples) == progress
    two = tiny_trainer(ALONE, run, tmp_path / "stopped")
    two.restore()
    taken += two.events()
    assert losses(taken) == losses(events)
    assert differing(two.tensors(), final) == []


def test_after_a_stop_the_same_trainer_can_take_the_step_again(tmp_path: Path) -> None:
    run = tiny_run()
    events, _ = uninterrupted(run, tmp_path / "whole")
    trainer = tiny_trainer(ALONE, run, tmp_path / "stopped")
    taken = [trainer.step()]
    on_forward(trainer, 2, lambda logits: trainer.stop("by hand"))
    assert trainer.step() is None
    assert trainer.step() is None  # until the stop is taken back
    trainer.stop_signal = StopSignal()
    taken += [trainer.step(), trainer.step()]
    trainer.close()
    assert losses(taken) == losses(events)[:3]


def test_a_stop_after_the_last_micro_batch_has_begun_lets_the_step_finish(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    on_forward(trainer, 4, lambda logits: trainer.stop("late"))
    assert [(event.kind, event.step) for event in trainer.events()] == [("step", 1), ("saved", 1), ("stopped", 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("behind", ["true", "false"])
def test_a_stopped_run_whose_state_is_on_disk_is_not_saved_twice(behind: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("checkpoint.every=1", f"checkpoint.async_save={behind}"), tmp_path)
    kinds = []
    for event in trainer.events():
        kinds.append(event.kind)
        if isinstance(event, Step):  # the save of it has not begun yet, and goes on while the run stops
            trainer.stop("SIGTERM")
    assert kinds == ["step", "saved", "stopped"]


def test_older_checkpoints_are_removed_as_newer_ones_are_made(tmp_path: Path) -> None:
    uninterrupted(tiny_run("checkpoint.every=1", "checkpoint.keep_last=3"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005", "step-00000006"]


def test_keep_every_keeps_checkpoints_for_good(tmp_path: Path) -> None:
    uninterrupted(tiny_run("checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_every=3"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]


UNSAVED = ("checkpoint.save=false", "checkpoint.every=2", "checkpoint.url=s3://no-such-bucket/run")
"""The keys that say when and where to save have no effect: nothing is asked of the store."""


def test_a_run_without_checkpoints_saves_nothing(tmp_path: Path) -> None:
    expected, _ = uninterrupted(tiny_run("train.steps=6", "checkpoint.every=2"), tmp_path / "saved")
    events, _ = uninterrupted(tiny_run("train.steps=6", *UNSAVED), tmp_path / "unsaved")
    assert losses(events) == losses(expected) and isinstance(events[-1], Finished)
    assert any(isinstance(event, Saved) for event in expected) and not any(isinstance(event, Saved) for event in events)
    assert not (tmp_path / "unsaved").exists()


def test_a_stopped_run_without_checkpoints_says_that_it_is_not_saved(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("train.steps=6", *UNSAVED), tmp_path / "checkpoints")
    events = []
    for event in trainer.events():
        events.append(event)
        if isinstance(event, Step) and event.step == 3:
            trainer.stop("SIGTERM")
    assert events[-1] == replace(Stopped(step=3, reason="SIGTERM", saved=False), time=events[-1].time)
    assert not any(isinstance(event, Saved) for event in events) and not (tmp_path / "checkpoints").exists()


def test_own_loops_cannot_save_a_run_without_checkpoints(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(*UNSAVED), tmp_path / "checkpoints")
    trainer.step()
    with pytest.raises(RunFailed, match=r"Step 1 is not saved: checkpoint.save = false. Remove the key"):
        trainer.save()
    trainer.close()


def test_a_callback_is_told_every_event_once(tmp_path: Path) -> None:
    run = tiny_run()
    run = replace(run, train=replace(run.train, steps=4, eval_every=2), checkpoint=replace(run.checkpoint, every=2))
    told: list[Event] = []
    with tiny_trainer(ALONE, run, tmp_path / "checkpoints") as trainer:
        trainer.load_initial_weights()
        trainer.on_event = told.append
        yielded = list(trainer.events())
    assert sorted(map(id, told)) == sorted(map(id, yielded)) and len(told) == len(yielded)
    told.clear()
    with tiny_trainer(ALONE, replace(run, train=replace(run.train, steps=6)), tmp_path / "checkpoints") as by_hand:
        by_hand.on_event = told.append
        returned: list[Event | None] = [*by_hand.restore(), by_hand.step(), by_hand.evaluate(), by_hand.save()]
    assert told == returned and [event.kind for event in told] == ["restored", "step", "evaluated", "saved"]
