"""A step's time by what it went into: the parts add up, and what is slow on purpose shows where it belongs.

Slow means for at least so long, and the others' waiting is waited for, so that a busy machine changes nothing.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer

from phalanx.events.records import Step, StepAccounted, StepTimed
from phalanx.observe.comm_timer import COMM_TIMER, PARTS, Clock
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.training.hooks import measurements
from phalanx.training.trainer import Trainer

LONG = 0.3
"""Seconds of being slow."""
CASES: dict[str, tuple[Layout, str]] = {
    "one rank": (Layout(data=1), "compute"),
    "replicas": (Layout(data=2), "data"),
    "tensor": (Layout(tensor=2), "tensor"),
    "pipeline": (Layout(pipeline=2), "bubble"),
    "optimizer states": (Layout(shard=2, zero=1), "data"),
    "shards": (Layout(shard=2), "data"),
    "shards of replicas": (Layout(data=2, shard=2), "data"),
    "context": (Layout(context=2), "context"),
}
"""Layouts, and what the first rank waits for where the last one is late."""


class Flag:
    """Whether the first rank waits for the last, in memory that both share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def raise_at(self, part: str) -> None:
        """Called on the first rank: whenever it waits for that."""
        mark = Clock._mark

        def told(clock: Clock) -> None:
            self._memory[0] = 0
            mark(clock)
            self._memory[0] = clock._activities[-1] == part

        Clock._mark = told  # type: ignore[method-assign]  # of this process alone

    def be_late(self, alone: bool) -> None:
        """Until the first rank has waited for long, as it must sooner or later, however busy the machine is."""
        left = LONG
        while left > 0:
            began = time.perf_counter()
            if waited := (alone or self._memory[0]):
                time.sleep(0.01)
            else:
                time.sleep(0.001)
            left -= time.perf_counter() - began if waited else 0.0


def taken(trainer: Trainer, prepare: Callable[[int], Any] = lambda number: None) -> list[StepTimed]:
    """Of six steps, those that were timed."""
    found = []
    for number in range(1, 7):
        prepare(number)
        step = trainer.step()
        assert isinstance(step, Step)
        while (told := trainer.hooks.take_measurement()) is not None:
            assert isinstance(told, StepAccounted if number == 2 else StepTimed)
            if isinstance(told, StepTimed):
                assert (told.step, told.rank) == (number, trainer.mesh.rank)
                assert set(told.parts) <= set(PARTS) and all(seconds > 0 for seconds in told.parts.values())
                assert sum(told.parts.values()) == pytest.approx(told.seconds, rel=1e-6)
                found.append(told)
    assert [told.step for told in found] == [3, 4, 5]
    return found


def slowed(mesh: Mesh, run: Run, folder: Path, flag: Flag, waiting: str) -> list[dict[str, float]]:
    """Step 3 has a slow optimizer, step 4 waits for its data, and in step 5 the last rank computes slowly."""
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    if mesh.rank == 0:
        flag.raise_at(waiting)
    due: list[int] = []

    def late(owner: Any, name: str, when: int) -> None:
        method = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            if due == [when]:
                time.sleep(LONG)
            return method(*args, **kwargs)

        setattr(owner, name, slow)

    late(trainer.optimizer, "step", 3)
    late(trainer.feed, "next", 4)
    if mesh.rank == mesh.ranks - 1:

        def compute(*_: object) -> None:
            if due == [5]:
                due.clear()  # once
                flag.be_late(alone=mesh.rank == 0)

        trainer.model.register_forward_hook(compute)
    found = taken(trainer, lambda number: due.__setitem__(slice(None), [number]))
    assert COMM_TIMER.clock is None, "nothing is left behind"
    trainer.close()
    return [told.parts for told in found]


@pytest.mark.parametrize("case", CASES)
def test_step_timing_attributes_slow_parts_correctly(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, waiting = CASES[case]
    run, flag = tiny_run("train.micro_batch=1", "train.steps=20"), Flag()
    monkeypatch.setattr(Clock, "_mark", Clock._mark)  # undone afterwards, where the rank is this process
    if layout.ranks == 1:
        ranks = [slowed(ALONE, run, tmp_path, flag, waiting)]
    else:
        ranks = run_ranks(slowed, layout.ranks, run, tmp_path, flag, waiting, layout=layout)
    for optimizer, loading, _ in ranks:
        assert optimizer["optimizer"] >= LONG and loading["loading"] >= LONG
    assert ranks[-1][2]["compute"] >= LONG
    assert ranks[0][2][waiting] >= 0.8 * LONG, "but for an instant whenever it begins or ends to wait"


def test_a_timed_step_computes_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run("train.steps=20")
    timed = tiny_trainer(ALONE, run, tmp_path / "timed")
    for told in taken(timed):
        assert {"compute", "optimizer", "loading", "other"} == set(told.parts)
    monkeypatch.setattr(measurements, "_TIMED", ())
    plain = tiny_trainer(ALONE, run, tmp_path / "plain")
    for _ in range(6):
        plain.step()
    assert not differing(copied(timed.tensors()), copied(plain.tensors()))
    for trainer in (timed, plain):
        trainer.close()


def test_step_timing_parts_add_up_to_the_reported_step(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("train.steps=20"), tmp_path)
    for number in range(1, 6):
        started = time.perf_counter()
        step, told = trainer.step(), trainer.hooks.take_measurement()
        wall = time.perf_counter() - started
        if number > 2:
            assert isinstance(step, Step) and isinstance(told, StepTimed)
            assert step.seconds <= told.seconds <= wall
    trainer.close()


def test_a_failed_step_leaves_no_clock_running(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("train.steps=20"), tmp_path)
    for _ in range(2):
        trainer.step()
    hook = trainer.model.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.step()
    hook.remove()
    assert COMM_TIMER.clock is None
    assert isinstance(trainer.hooks.take_measurement(), StepAccounted) and trainer.hooks.take_measurement() is None
    trainer.close()


def test_step_timing_is_off_where_compiled_blocks_communicate(tmp_path: Path) -> None:
    """Compiled blocks say nothing of what they wait for between ranks; without ranks inside them there is nothing to say."""
    trainer = tiny_trainer(ALONE, tiny_run("memory.compile=true"), tmp_path / "one")
    run, plan, model = trainer.run, trainer.plan, trainer.sharded
    trainer.close()
    assert measurements.StepTiming(run, plan, model).enabled
    tensor = replace(plan, layout=replace(plan.layout, tensor=2))
    assert not measurements.StepTiming(run, tensor, model).enabled
    assert measurements.StepTiming(tiny_run(), tensor, model).enabled
