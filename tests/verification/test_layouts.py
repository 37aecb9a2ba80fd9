"""Generated layouts: legal, different, of every kind, and the same each time. The proof of forty of them takes minutes."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from ranks import tiny_run

from phalanx.spec.check import check
from phalanx.spec.layout import Schedule
from phalanx.verification.cases import MODELS, generate_layouts
from phalanx.verification.parity import Report, sweep
from phalanx.verification.rank_pool import RankPool


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_they_are_legal_different_and_for_exactly_these_ranks(ranks: int) -> None:
    runs = generate_layouts(tiny_run(), ranks, count=30)
    assert len(runs) == 30
    assert len({(run.model, run.layout) for run in runs}) == 30
    assert {run.layout.ranks for run in runs} == {ranks}
    assert generate_layouts(tiny_run(), ranks, count=30) == runs != generate_layouts(tiny_run(), ranks, count=30, seed=1)


def test_forty_on_eight_ranks_leave_nothing_out() -> None:
    runs = generate_layouts(tiny_run(), 8, count=40)
    layouts = [run.layout for run in runs]
    assert Counter(run.model for run in runs).keys() == set(MODELS.values())
    assert {layout.schedule for layout in layouts if layout.pipeline > 1} == set(get_args(Schedule))
    assert {layout.zero for layout in layouts if layout.shard > 1} == {1, 2, 3}
    assert {layout.context_method for layout in layouts if layout.context > 1} == {"ring", "gather", "ulysses"}
    assert {layout.sequence for layout in layouts if layout.tensor > 1} == {False, True}
    assert any(layout.expert > 1 and layout.expert_tensor > 1 for layout in layouts)
    for axis in ("pipeline", "data", "shard", "context", "tensor", "expert", "expert_tensor"):
        assert sum((getattr(layout, axis) or 1) > 1 for layout in layouts) >= 5, axis
    assert {run.memory.recompute for run in runs} == {"none", "full", "selective"}


def test_the_models_are_odd_and_right() -> None:
    for model in MODELS.values():
        assert (model.layers, model.heads, model.vocab) == (5, 6, 257)
        assert check(generate_layouts(tiny_run(), 2, count=5)[0]) == []
    assert MODELS["dense"].kv == 2


def test_a_sweep_reports_each_layout_in_turn() -> None:
    reports = list(sweep(tiny_run(), ranks=2, steps=1, count=3, pool=RankPool))
    assert [report.passed for report in reports] == [True] * 3, [told(report) for report in reports]
    assert len({(report.case.run.model, report.case.layout) for report in reports}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_forty_layouts_equal_one_device(ranks: int) -> None:
    reports = list(sweep(tiny_run(), ranks=ranks, steps=8, count=40, pool=RankPool))
    assert len(reports) == 40
    assert [told(report) for report in reports if not report.passed] == []


def told(report: Report) -> str:
    return f"{report.case.layout}: {report.failure or report.first}"
