"""The hang detector: what it orders about ranks that answer, that do not, and that die meanwhile. The end of a run that was asked to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest
from controllers import OrdersKept, plan_on
from happenings import worker_died

from phalanx.control.controller_state import Generation
from phalanx.control.protocol import NOT_SAVED, Inspect, Kill, LocateRanks
from phalanx.control.recover import Replanner
from phalanx.control.watchdog import HangDetector, Watchdog
from phalanx.events.heartbeat import Beat
from phalanx.events.records import Event, Stopped
from phalanx.recovery.state import Failure
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

HANG = 5.0


class Silent(OrdersKept):
    """A controller of ranks that took one quick step and made no progress since. `meanwhile` happens while they are asked."""

    def __init__(self, ranks: int, silent: float, meanwhile: Callable[[Silent], None] = lambda controller: None):
        self.generation = Generation(0, plan_on(Layout(data=ranks)), (0,) * ranks)
        super().__init__(self.generation, Resilience(timeout=600.0, hang=HANG, straggler=2.0), emit=lambda event: None)
        self.state.last_stall_end = 0.0
        self._meanwhile = meanwhile
        self.hangs = HangDetector(self)
        for taken, age in ((0, silent + 1), (1, silent)):
            for rank in range(ranks):
                beat = Beat(taken, "computing", time.monotonic() - age, 0.1, 0.1, taken, generation=0)
                self.generation.beats[rank] = beat
            if not taken:
                asyncio.run(self.hangs.check(self.generation))

    def check(self) -> list[type]:
        """The kinds of orders that a check sends."""
        asyncio.run(self.hangs.check(self.generation))
        return [type(order) for order in self.orders]

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        self._meanwhile(self)
        return await super().until(condition, seconds)

    def die(self, *ranks: int) -> None:
        for rank in ranks:
            died = worker_died(rank, 1, "died", "it was killed")
            self.generation.dead.add(rank)
            self.state.events.append(died)


def test_nobody_is_asked_before_the_timeout() -> None:
    assert Silent(2, HANG - 2).check() == []


def test_rank_that_does_not_answer_is_killed_as_hung() -> None:
    controller = Silent(1, HANG + 1)
    assert controller.check() == [LocateRanks, Inspect, Kill]
    kill = controller.orders[-1]
    assert isinstance(kill, Kill) and kill.ranks == [0] and kill.failure is not None and kill.failure.cause == "hung"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_die_while_they_are_asked_are_not_killed(ranks: int) -> None:
    controller = Silent(ranks, HANG + 1, lambda controller: controller.die(*controller.generation.living))
    assert Kill not in controller.check()
    assert sorted(died.rank for died in controller.state.events if isinstance(died, Failure)) == list(range(ranks))


def test_nobody_hangs_while_another_rank_compiles() -> None:
    """One rank finds its program compiled, and waits in the step for the other one, however short steps were before."""
    controller = Silent(2, HANG + 1)
    waiting = controller.generation.beats[0]
    controller.generation.beats[1] = waiting._replace(phase="compiling")
    assert controller.check() == []
    controller.generation.beats[1] = waiting._replace(since=time.monotonic())
    assert controller.check() == [], "it is watched from the end of the compilation"


class Ending(Silent):
    """A run that was asked to stop a while ago, whose rank does not react."""

    def __init__(self, *, resumable: bool):
        super().__init__(1, HANG)
        self.agent.run.resumable = resumable  # type: ignore[misc]
        self.agent.stopping, self.agent.emit = "SIGTERM", lambda event: self.happened.append(event)  # type: ignore[method-assign]
        self.state.stop_requested = time.monotonic() - 60.0
        self.happened: list[Event] = []
        self.code: int | None = None

    def end(self, code: int, reason: str | None = None, rank: int | None = None, traceback: str = "") -> None:
        self.code = code


def test_a_run_without_checkpoints_ends_at_once_if_its_ranks_do_not_stop() -> None:
    controller = Ending(resumable=False)
    controller.generation.beats[0] = controller.generation.beats[0]._replace(step=7)
    asyncio.run(Watchdog(controller, cast(Replanner, None)).check())
    (stopped,) = controller.happened
    assert isinstance(stopped, Stopped) and (stopped.step, stopped.reason, stopped.saved) == (7, "SIGTERM", False)
    assert controller.code == NOT_SAVED and controller.orders == [], "no generation that only saves"
