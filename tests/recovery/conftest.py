"""A realistic answer to whether a layout can be run, as a live run gives it: the run file's own checks, and the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from phalanx.schedules.makers import schedule_for
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Optimizer, Run, Train

TINY = ModelSpec(dim=32, layers=4, heads=4, kv_heads=2, ffn=64, vocab=257)


@pytest.fixture
def legal_for() -> Callable[..., Callable[[Layout], bool]]:
    def make(batch: int, model: ModelSpec = TINY, **tables: Any) -> Callable[[Layout], bool]:
        train = Train(batch=batch, sequence_length=32, steps=100, micro_batch=1)
        run = Run(model=model, train=train, optimizer=Optimizer(**tables))

        def legal(layout: Layout) -> bool:
            if batch % layout.replicas or any(layout_findings(replace(run, layout=layout))):
                return False
            try:
                order = schedule_for(layout, batch // layout.replicas)
            except RunError:
                return False
            return order is None or not order.problems()

        return legal

    return make
