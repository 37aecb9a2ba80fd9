"""`phalanx train` on real layouts, from outside: runs that are stopped on one layout and go on with another, killed in the middle
of a step, started by torchrun; what they say was applied; and what can be done with the checkpoints they leave."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import FinishedRuns, StepLosses, Workshop
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from phalanx.evaluation.open_model import open_model
from phalanx.events.records import Evaluated, ModelPlaced, Restored, StepAccounted, Stopped, WorkerFailed

STEPS = 24
SHAPE = (
    "model.layers=4", "model.heads=4", "model.kv_heads=2",
    "optimizer.eps=1e-4",  # at 1e-8, Adam makes visible differences of gradients that differ in their last bits
    "train.eval_every=1000", "train.eval_sequences=5",  # two micro-batches and a short one: no layout's replicas divide it
    "checkpoint.every=1000", f"train.steps={STEPS}",
)  # fmt: skip
MIXTURE = (*SHAPE, "model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32", "model.moe.shared=1")
ONE = ("layout.data=1",)
SHARD_TENSOR = ("layout.data=1", "layout.shard=2", "layout.tensor=2", "layout.sequence=true")
ZBV_ZERO1 = ("layout.data=1", "layout.pipeline=2", "layout.schedule=zbv", "layout.shard=2", "layout.zero=1")
DATA_CONTEXT = ("layout.data=2", "layout.context=2")
EIGHT = (
    "layout.data=1",
    "layout.pipeline=2",
    "layout.shard=2",
    "layout.tensor=2",
    "layout.schedule=dualpipev",
    "layout.zero=2",
)
NVME = ("memory.offload=nvme", "memory.offload_buffer=1")


TOLD = [
    (
        {"tensor": "blocks.0.attention.query.weight: 16 of 32 rows", "data": "parameters, gradients and optimizer state"},
        {"shard", "tensor", "agreement"},
    ),
    (
        {"pipeline": "zbv, 4 stages on 2 ranks", "data": "gradients whole, parameters whole"},
        {"shard", "pipeline", "agreement"},
    ),
    ({"optimizer": "optimizer-0.states"}, set()),
    ({"context": "passed round a ring", "data": "summed over 4 ranks"}, {"context", "data", "agreement"}),
]
"""What ranks say of the four layouts that `moved` has: words of what was applied by technique, and which techniques send."""


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def legs(workshop: Workshop, run_dir: str, shape: Sequence[str], layouts: Sequence[Sequence[str]]) -> None:
    """One run, told to stop after some steps on each layout and finished on the last."""
    for number, layout in enumerate(layouts[:-1], start=1):
        aim = STEPS * number // len(layouts)
        command = workshop.start("train", "tiny.toml", *shape, *layout, "--run-dir", run_dir)
        command.until(workshop.reached(run_dir, aim), f"step {aim}")
        command.process.send_signal(signal.SIGTERM)
        ended = command.wait()
        assert (ended.code, ended.err) == (75, ""), ended
    workshop.train(*shape, *layouts[-1], "--run-dir", run_dir)
    events = workshop.events(run_dir)
    stops = [event.step for event in of(Stopped, events)]
    assert len(stops) == len(layouts) - 1 and all(0 < step < STEPS for step in stops)
    assert [event.step for event in of(Restored, events)] == stops


def agree(found: list[tuple[int, float, str]], expected: list[tuple[int, float, str]], rel: float = 1e-5) -> None:
    """Every step once, on the same tokens, with the same loss."""
    assert [step for step, _, _ in found] == list(range(1, STEPS + 1))
    assert [digest for _, _, digest in found] == [digest for _, _, digest in expected]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], rel=rel, abs=0)


def evaluated(events: list[Any]) -> Evaluated:
    (found,) = of(Evaluated, events)
    return found


def tensors(run: Path) -> dict[str, Tensor]:
    """Everything in the newest checkpoint of a run, read by torch's own reader."""
    newest = str(max((run / "checkpoints").iterdir()))
    known = HuggingFaceStorageReader(newest).read_metadata().state_dict_metadata
    found = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in known.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(found, storage_reader=HuggingFaceStorageReader(newest), no_dist=True)
    return found


def differing(one: Path, other: Path) -> list[str]:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys() and len(first) > 20
    return [name for name in first if not torch.equal(first[name], second[name])]


Straight = Callable[..., tuple[Workshop, str]]
"""The unbroken run on one rank for a shape of model: its folder and run directory."""


@pytest.fixture(scope="module")
def straight(finished: FinishedRuns) -> Straight:
    """The unbroken run on one rank, for a shape of model; trained once for all tests."""
    made: dict[tuple[str, ...], str] = {}

    def run(*shape: str) -> tuple[Workshop, str]:
        workshop = finished(1).workshop
        if shape not in made:
            made[shape] = f"straight-{len(made)}"
            workshop.train(*shape, *ONE, "--run-dir", made[shape])
        return workshop, made[shape]

    return run


# --- from layout to layout ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moved(straight: Straight) -> tuple[Workshop, str]:
    """A run that has seen four layouts; the last one finishes it."""
    workshop, _ = straight(*SHAPE)
    legs(workshop, "moved", SHAPE, [SHARD_TENSOR, ZBV_ZERO1, (*ONE, *NVME), DATA_CONTEXT])
    return workshop, "moved"


@pytest.mark.slow  # a minute; `training/test_any_layout` and `test_exact_resume` change layouts without a launcher
def test_run_on_changing_layouts_has_the_losses_of_one_rank(
    moved: tuple[Workshop, str], straight: Straight, losses: StepLosses
) -> None:
    workshop, run = moved
    agree(losses(workshop.events(run)), losses(workshop.events(straight(*SHAPE)[1])))


def test_evaluation_of_uneven_sequences_equals_one_rank(moved: tuple[Workshop, str], straight: Straight) -> None:
    workshop, run = moved
    here, there = evaluated(workshop.events(run)), evaluated(workshop.events(straight(*SHAPE)[1]))
    assert here.tokens == there.tokens > 4 * 31
    assert here.loss == pytest.approx(there.loss, rel=1e-5, abs=0)


def test_events_name_the_applied_layout_and_step_cost(moved: tuple[Workshop, str]) -> None:
    workshop, run = moved
    placed, accounts = of(ModelPlaced, workshop.events(run)), of(StepAccounted, workshop.events(run))
    launches = [4, 4, 1, 4]
    assert len(placed) == len(accounts) == sum(launches)
    for ranks, (words, senders) in zip(launches, TOLD, strict=True):
        mine, placed = placed[:ranks], placed[ranks:]
        assert sorted(event.rank for event in mine) == list(range(ranks))
        for event in mine:
            assert all(word in event.applied[key] for key, word in words.items()), event.applied
            assert event.parameters > 0 and (event.files > 0) == (ranks == 1)
        costs, accounts = accounts[:ranks], accounts[ranks:]
        assert sorted(event.rank for event in costs) == list(range(ranks))
        for event in costs:
            assert event.sent.keys() == senders and all(sum(sent.values()) > 0 for sent in event.sent.values())
            assert event.memory["activations"] > 0


@pytest.mark.slow
def test_moe_run_moves_between_expert_layouts(straight: Straight, losses: StepLosses) -> None:
    workshop, plain = straight(*MIXTURE)
    two = ("layout.data=2", "layout.expert=2")
    legs(workshop, "mixed", MIXTURE, [two, ONE, ("layout.data=2", "layout.tensor=2", "layout.expert=4")])
    agree(losses(workshop.events("mixed")), losses(workshop.events(plain)))
    assert evaluated(workshop.events("mixed")).loss == pytest.approx(evaluated(workshop.events(plain)).loss, rel=1e-5, abs=0)


# --- states in files ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nvme_offload_resumes_bit_for_bit(straight: Straight, losses: StepLosses) -> None:
    workshop, plain = straight(*SHAPE)
    legs(workshop, "filed", SHAPE, [(*ONE, *NVME), ONE, (*ONE, *NVME)])
    events = workshop.events("filed")
    assert losses(events) == losses(workshop.events(plain))
    assert evaluated(events).loss == evaluated(workshop.events(plain)).loss
    assert [event.files > 0 for event in of(ModelPlaced, events)] == [True, False, True]
    assert differing(workshop.path / "filed", workshop.path / plain) == []
    assert not list((workshop.path / "filed").glob("offload/*")), "files were left behind"


KILLED = """
import os, signal
import phalanx.optim.offload_stores as stores
import phalanx.training.trainer as trainer
step, write = trainer.Trainer.step, stores.FileStore._write
now = [None, 0]
def noted(self):
    now[0] = self.progress.step + 1, self.mesh.rank
    return step(self)
def half(self, number):
    write(self, number)
    if now[0] == (11, 1):
        os.kill(os.getpid(), signal.SIGKILL)
trainer.Trainer.step, stores.FileStore._write = noted, half
"""


@pytest.mark.slow
def test_kill_during_an_nvme_write_loses_nothing(workshop: Workshop, losses: StepLosses) -> None:
    given = (*SHAPE, "checkpoint.every=4", "train.steps=14", "layout.data=1", "layout.tensor=2", *NVME)
    workshop.train(*given, "--run-dir", "undisturbed")
    disturbed = (*given, "resilience.restarts=0", "--run-dir", "killed")
    command = workshop.run("train", "tiny.toml", *disturbed, env=workshop.sabotage(KILLED))
    assert command.code == 1, command
    (failed,) = of(WorkerFailed, workshop.events("killed"))
    assert failed.rank == 1 and "SIGKILL" in failed.reason
    portions = next(event.applied["optimizer"] for event in of(ModelPlaced, workshop.events("killed")))
    assert "in 1 portions" not in portions, "a step is written all at once: nothing is half written"
    workshop.train(*given, "--run-dir", "killed")
    events = workshop.events("killed")
    assert [event.step for event in of(Restored, events)] == [8]
    last = {step: (step, loss, digest) for step, loss, digest in losses(events)}
    assert list(last.values()) == losses(workshop.events("undisturbed"))
    assert differing(workshop.path / "killed", workshop.path / "undisturbed") == []


# --- other ways in and out ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_starts_a_layout(straight: Straight, losses: StepLosses) -> None:
    workshop, plain = straight(*SHAPE)
    program = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "4", "-m", "phalanx"]
    layout = ("layout.tensor=2", "layout.shard=2", "layout.data=1")
    ended = workshop.run(
        "train",
        "tiny.toml",
        *SHAPE,
        *layout,
        "--run-dir",
        "by-torchrun",
        "--json",
        program=program,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert ended.code == 0, ended
    events = workshop.events("by-torchrun")
    agree(losses(events), losses(workshop.events(plain)))
    assert sorted(event.rank for event in of(ModelPlaced, events)) == [0, 1, 2, 3]


@pytest.mark.slow
def test_local_sgd_resumes_between_two_syncs(workshop: Workshop, losses: StepLosses) -> None:
    given = (*SHAPE, "optimizer.sync_every=3", "layout.data=2")
    workshop.train(*given, "--run-dir", "straight")
    legs(workshop, "local", given, [(), (), ()])
    assert losses(workshop.events("local")) == losses(workshop.events("straight"))
    assert losses(workshop.events("local"))[-1][1] < 0.8 * losses(workshop.events("local"))[0][1]
    assert differing(workshop.path / "local", workshop.path / "straight") == []
    plan = (workshop.path / "local" / "plan.json").read_text()
    ended = workshop.run("train", "tiny.toml", *given, "train.steps=30", "layout.data=4", "--run-dir", "local")
    assert ended.code == 2, ended
    assert "holds 2 replicas" in ended.err and "set layout.data = 2" in ended.err
    assert (workshop.path / "local" / "plan.json").read_text() == plan


@pytest.mark.slow
def test_checkpoint_of_eight_ranks_generates_and_exports_like_one_rank(straight: Straight) -> None:
    workshop, plain = straight(*SHAPE)
    workshop.train(*SHAPE, *EIGHT, "--run-dir", "eight")
    texts, logits = [], []
    for run in ("eight", plain):
        used = re.compile(rf"using step \d+ \({run}/checkpoints/step-\d+\)\n")
        ended = workshop.run("generate", run, "the rank ", "--tokens", "20", "--temperature", "0")
        assert ended.code == 0 and used.fullmatch(ended.err), ended
        texts.append(ended.out)
        shutil.rmtree(workshop.path / f"hf-{run}", ignore_errors=True)
        ended = workshop.run("export", run, f"hf-{run}")
        assert ended.code == 0 and used.fullmatch(ended.err), ended
        for path in (run, f"hf-{run}"):
            opened = open_model(workshop.path / path, "cpu")
            words = torch.tensor([[int(token) for token in opened.tokenizer.encode("a shard sends the loss and waits")]])
            with torch.no_grad():
                logits.append(opened.model(words, torch.arange(words.shape[1])[None], None))
    assert texts[0] == texts[1]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[2], logits[3])
    torch.testing.assert_close(logits[0], logits[2], rtol=0, atol=1e-4)
