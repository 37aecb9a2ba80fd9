"""Ranks that make no progress: what a controller does about those that answer, those that do not, and those that die meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.control.controller import Controller
from phalanx.control.state import Generation
from phalanx.control.watchdog import HangDetector
from phalanx.recovery.state import WorkerDied
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan

HANG = 5.0


class Silent:
    """A controller of ranks that have taken one quick step and are not heard of since. `meanwhile` happens while they are asked."""

    def __init__(self, ranks: int, silent: float, meanwhile: Callable[[Silent], None] = lambda controller: None):
        plan = Plan(
            layout=Layout(data=ranks),
            device="cpu",
            threads=1,
            micro_batch=1,
            accumulation=1,
            compute="fp32",
            parameters=1,
            flops_per_token=1.0,
            peak_flops=None,
        )
        self.generation = Generation(0, plan, (0,) * ranks)
        self.settings = SimpleNamespace(timeout=600.0, hang=HANG, straggler=2.0)
        self.run = SimpleNamespace(memory=SimpleNamespace(compile=False))
        self.agent = SimpleNamespace(emit=lambda event: None)
        self.stands_still, self.awake = False, 0.0
        self.troubles: list[WorkerDied] = []
        self.orders: list[dict[str, Any]] = []
        self._meanwhile = meanwhile
        self.hangs = HangDetector(cast(Controller, self))
        for taken, age in ((0, silent + 1), (1, silent)):
            for rank in range(ranks):
                self.generation.beats[rank] = (time.monotonic(), [0, taken, "computing", age, 0.1, 0.1, taken, 0])
            if not taken:
                asyncio.run(self.hangs.look(self.generation))

    def look(self) -> list[str]:
        """What is ordered."""
        asyncio.run(self.hangs.look(self.generation))
        return [order["order"] for order in self.orders]

    def order(self, message: dict[str, Any]) -> None:
        self.orders.append(message)

    async def until(self, met: Callable[[], bool], seconds: float) -> bool:
        self._meanwhile(self)
        return met()

    def die(self, *ranks: int) -> None:
        for rank in ranks:
            died = WorkerDied(rank, 1, "died", "it was killed")
            self.generation.dead[rank] = died
            self.troubles.append(died)


def test_nobody_is_asked_before_the_time() -> None:
    assert Silent(2, HANG - 2).look() == []


def test_one_that_does_not_answer_is_ended_as_hung() -> None:
    controller = Silent(1, HANG + 1)
    assert controller.look() == ["where", "inspect", "kill"]
    assert controller.orders[-1]["ranks"] == [0] and controller.orders[-1]["failure"]["cause"] == "hung"


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_may_die_while_they_are_asked(ranks: int) -> None:
    controller = Silent(ranks, HANG + 1, lambda controller: controller.die(*controller.generation.living))
    assert "kill" not in controller.look()
    assert sorted(died.rank for died in controller.troubles) == list(range(ranks))
