"""Faults inside a rank: each strikes once, where and when it is told to, and does what it says."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor, nn

from phalanx.checkpointing.location import open_location
from phalanx.events.fault_log import DISK, FaultClaims, fill_disk
from phalanx.events.log import EventLog, read_events
from phalanx.events.records import FaultInjected, Warned
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import POINTS, parse
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.training.hooks import StepContext
from phalanx.training.hooks.rank_faults import InjectedFault, RankFaults


class Told(list[FaultInjected]):
    """What was reported."""

    @property
    def faults(self) -> list[str]:
        return [event.fault for event in self]


def faults_of(text: str, folder: Path, rank: int = 0) -> tuple[RankFaults, Told]:
    told = Told()
    return RankFaults(parse(text), rank=rank, done=FaultClaims(folder), report=told.append), told


def ended(act: Callable[[], object]) -> int:
    """The signal that a process of its own ended with, or 0."""
    if (pid := os.fork()) == 0:
        try:
            act()
        finally:
            sys.stderr.flush()
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


@dataclass
class Model:
    """As much of a sharded model as faults read."""

    owned: list[OwnedParam] = field(default_factory=list)
    parts: Sequence[nn.Module] = ()


@dataclass
class States:
    """As much of an optimizer."""

    states: Mapping[str, Tensor] = field(default_factory=dict)

    def state(self) -> Mapping[str, Tensor]:
        return self.states


def context(step: int, owned: Sequence[OwnedParam] = (), states: Any = None, parts: Sequence[nn.Module] = ()) -> StepContext:
    return StepContext(step, Model(list(owned), parts), states or States(), lambda: None)  # type: ignore[arg-type]


def reach(faults: RankFaults, point: str, step: int, parts: Sequence[nn.Module] = ()) -> None:
    """The rank comes to this point of a step."""
    match point:
        case "data":
            faults.before_batch(step)
        case "compute":
            faults.before_forward(context(step, parts=parts))
        case "collective":
            faults.before_reduce(step, 0.0)
        case "update":
            faults.on_update(step)
        case "evaluate":
            faults.before_evaluate(step)
        case "save":
            faults.before_save(step)
        case _:
            raise AssertionError(point)


def everywhere(faults: RankFaults, steps: int) -> Iterator[tuple[str, int]]:
    """All points of a run; those where something was raised."""
    for step in range(1, steps + 1):
        for point in POINTS:
            try:
                reach(faults, point, step)
            except InjectedFault:
                yield point, step


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_strikes_once_at_its_point_of_its_step(point: str, tmp_path: Path) -> None:
    faults, told = faults_of(f"raise rank=0 step=3 in={point}; raise rank=1 step=2", tmp_path)
    assert list(everywhere(faults, 5)) == [(point, 3)]
    assert [(event.fault, event.rank, event.step) for event in told] == [
        (str(parse(f"raise rank=0 step=3 in={point}")[0]), 0, 3)
    ]
    after_recovery, again = faults_of(f"raise rank=0 step=3 in={point}", tmp_path)
    assert not list(everywhere(after_recovery, 5)) and not again


def test_a_save_fault_strikes_at_the_first_later_save(tmp_path: Path) -> None:
    faults, told = faults_of("raise rank=0 step=3 in=save", tmp_path)
    reach(faults, "save", 2)
    with pytest.raises(InjectedFault, match="injected by --chaos: raise rank=0 step=3 in=save"):
        reach(faults, "save", 4)
    reach(faults, "save", 6)
    assert [event.step for event in told] == [4]


def test_a_kill_is_recorded_before_it_strikes(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    faults = RankFaults(parse("kill rank=2 step=4 during=update"), rank=2, done=FaultClaims(tmp_path), report=log.emit)
    assert ended(lambda: reach(faults, "compute", 4)) == 0
    assert ended(lambda: reach(faults, "update", 4)) == signal.SIGKILL
    assert ended(lambda: reach(faults, "update", 4)) == 0
    (event,) = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, FaultInjected) and (event.rank, event.step) == (2, 4)


def test_only_one_of_many_processes_claims_a_fault(tmp_path: Path) -> None:
    children = []
    for _ in range(8):
        if (pid := os.fork()) == 0:
            os._exit(int(FaultClaims(tmp_path).claim(5)))
        children.append(pid)
    assert sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children) == 1
    struck = FaultClaims(tmp_path)
    assert list(struck.times()) == [5] and not struck.claim(5)
    shutil.rmtree(RunDir(tmp_path).control)  # as a new launch does
    assert not struck.times() and struck.claim(5)


def test_an_injected_hang_ends_only_by_an_exception(tmp_path: Path) -> None:
    class Halted(Exception):
        pass

    def halt(*_: Any) -> None:
        raise Halted

    faults, _ = faults_of("hang rank=0 step=1 for=0.3s; hang rank=0 step=2", tmp_path)
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        reach(faults, "compute", 1)
        assert time.monotonic() - began >= 0.3, "the signal did not end it"
        signal.signal(signal.SIGALRM, halt)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Halted):
            reach(faults, "compute", 2)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_an_injected_slowdown_lasts_for_its_steps_and_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "slow rank=0 x3 from=2 to=4; slow rank=0 x2 from=4"
    faults, told = faults_of(text, tmp_path)
    assert [faults._slowness(step) for step in range(1, 7)] == [1, 3, 3, 6, 2, 2]
    assert told.faults == text.split("; ")
    after_recovery, again = faults_of(text, tmp_path)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    after_recovery.before_reduce(3, 0.05)
    assert slept == [pytest.approx(0.1)] and not again
    after_recovery.before_reduce(1, 1e9)
    assert len(slept) == 1


def held(values: Tensor, gradient: Tensor | None = None) -> OwnedParam:
    return OwnedParam("weight", nn.Parameter(values), ParamShard.full(values), gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_injected_corruption_doubles_or_halves_one_gradient(dtype: torch.dtype, tmp_path: Path) -> None:
    faults, told = faults_of("corrupt rank=0 step=2 what=gradients", tmp_path)
    right = torch.tensor([[0.1, -0.7], [0.3, 0.0]], dtype=dtype)
    one = held(torch.zeros(2, 2), right.clone())
    faults.after_backward(context(1, [one]))
    faults.before_forward(context(2, [one]))
    assert one.gradient is not None and torch.equal(one.gradient, right) and not told
    faults.after_backward(context(2, [held(torch.zeros(0), torch.zeros(0, dtype=dtype)), one]))
    changed = one.gradient != right
    assert changed.sum() == 1 and changed[0, 1] and told.faults == ["corrupt rank=0 step=2 what=gradients"]
    assert (one.gradient[0, 1] / right[0, 1]).item() in (0.5, 2.0)
    wrong = one.gradient.clone()
    faults.after_backward(context(2, [one]))
    assert torch.equal(one.gradient, wrong)


def test_an_injected_corruption_of_weights_and_optimizer_states(tmp_path: Path) -> None:
    faults, told = faults_of("corrupt rank=0 step=1; corrupt rank=0 step=1 what=optimizer", tmp_path)
    one = held(torch.zeros(3))
    states = {"weight/step": torch.tensor(4.0), "weight/exp_avg": torch.tensor([0.5, 0.25])}
    faults.before_forward(context(1, [one], States(states)))
    assert one.value.count_nonzero() == 1  # a bit flips also where all are zeros
    assert states["weight/step"] == 4 and states["weight/exp_avg"][0] in (0.25, 1.0) and states["weight/exp_avg"][1] == 0.25
    assert len(told) == 2
    faults.before_forward(context(2, [one], object()))  # which has no states to ask for


def steps_with_nan(mesh: Mesh, folder: Path, text: str) -> list[Any]:
    """The trainer's steps, its points told as it will tell them itself; what the first and what a repeated forward gave."""
    trainer = tiny_trainer(mesh, tiny_run("train.steps=4", "memory.recompute=full"), folder / str(mesh.rank) / "checkpoints")
    told = Told()
    faults = RankFaults(parse(text), rank=mesh.rank, done=FaultClaims(folder), report=told.append)
    found: list[Any] = []
    for step in (1, 2, 3):
        reach(faults, "data", step)
        reach(faults, "compute", step, trainer.sharded.parts)
        before = copied(trainer.tensors())
        taken = trainer.step()
        reach(faults, "update", step)
        assert taken is not None
        found.append((taken.kind, bool(differing(before, trainer.tensors()))))
    with faults.around_repeat():
        reach(faults, "compute", 2, trainer.sharded.parts)
        found.append(sum(len(module._forward_hooks) for part in trainer.sharded.parts for module in part.modules()))
    found.append(sum(len(module._forward_hooks) for part in trainer.sharded.parts for module in part.modules()))
    found.append(told.faults)
    trainer.close()
    return found


def test_an_injected_nan_lasts_one_step_and_returns_in_its_repetition(tmp_path: Path) -> None:
    text = "nan rank=1 step=2 layer=blocks.1.mlp"
    for rank, (*steps, hooks, left, told) in enumerate(run_ranks(steps_with_nan, 2, tmp_path, text)):
        assert [kind for kind, _ in steps] == ["step", "step_skipped", "step"]
        assert [changed for _, changed in steps] == [True, False, True]
        assert (hooks, left, told) == ((1, 0, [text]) if rank == 1 else (0, 0, []))


def test_an_injected_nan_is_one_number_and_the_backward_runs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.blocks[0](x).sigmoid(), x

    model, given = Two(), torch.ones(2, 3)
    faults, told = faults_of("nan rank=0 step=1; nan rank=0 step=1 layer=nowhere", tmp_path)
    reach(faults, "compute", 1, [model])
    output, _ = model(given)
    assert output.isnan().sum() == 1 and told.faults == ["nan rank=0 step=1"]
    output.nansum().backward()
    retaken, _ = faults_of("nan rank=0 step=1", tmp_path)
    reach(faults, "data", 1)
    reach(retaken, "compute", 1, [model])
    assert not model(given)[0].isnan().any()


@pytest.fixture
def disk() -> Iterator[None]:
    yield
    DISK.watch(None)


def test_an_injected_full_disk_affects_this_run_only_and_ends(
    tmp_path: Path, disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    fill_disk(tmp_path, 100)
    log.emit(Warned(message="nobody watches yet"))
    faults_of("fill-disk from=2 for=1s", tmp_path)
    with pytest.raises(OSError) as error:
        open_location(tmp_path / "file").write([b"data"])
    assert error.value.errno == errno.ENOSPC
    log.emit(Warned(message="waits"))
    assert len(read_events(tmp_path / "events.jsonl")) == 1
    (tmp_path / "of somebody else").write_text("is written")
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + 101)
    open_location(tmp_path / "file").write([b"data"])
    log.emit(Warned(message="after"))
    said = [event.message for event in read_events(tmp_path / "events.jsonl") if isinstance(event, Warned)]
    assert said == ["nobody watches yet", "waits", "after"]
    fill_disk(tmp_path, 100)
    shutil.rmtree(RunDir(tmp_path).control)  # as a new launch does
    open_location(tmp_path / "file").write([b"data"])


def test_faults_of_other_ranks_and_of_nodes_strike_nothing_here(tmp_path: Path) -> None:
    none, _ = faults_of("", tmp_path)
    assert not list(everywhere(none, 3)) and none._slowness(1) == 1
    others, told = faults_of("kill rank=1 step=1; fill-disk; kill node=0 step=1; freeze rank=0 step=1 for=1s", tmp_path)
    DISK.watch(None)
    assert not list(everywhere(others, 3)) and not told and not (tmp_path / "control").exists()


def test_no_fault_strikes_while_a_step_is_rolled_forward(tmp_path: Path) -> None:
    faults, told = faults_of("raise rank=0 step=1 in=update", tmp_path)
    faults.on_roll_forward()
    reach(faults, "update", 1)
    assert not told
