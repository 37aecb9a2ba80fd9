"""A controller without nodes: orders are kept instead of sent, and waiting takes no time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from phalanx.control.controller_state import Control, Generation
from phalanx.control.election import NodeServices
from phalanx.control.protocol import Order
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Memory, Resilience


def plan_on(layout: Layout) -> Plan:
    return Plan(
        layout=layout,
        device="cpu",
        threads=1,
        micro_batch=1,
        accumulation=1,
        compute="fp32",
        parameters=1,
        flops_per_token=1.0,
        peak_flops=None,
    )


class OrdersKept(Control):
    """Leads one generation. `agent` has what the tested part needs of its node, besides the run."""

    def __init__(self, generation: Generation, resilience: Resilience | None = None, **agent: Any):
        run = SimpleNamespace(resilience=resilience or Resilience(), memory=Memory(), resumable=True)
        super().__init__(cast(NodeServices, SimpleNamespace(run=run, plan=generation.plan, **agent)), term=1)
        self.state.generation = generation
        self.orders: list[Order] = []

    def order(self, order: Order) -> None:
        self.orders.append(order)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        return condition()
