"""A plan's picture: its bars have the lengths of the numbers, and the file says in words what it shows."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import plans
import pytest

from phalanx.dashboard.plan_picture import MEMORY, STEP, compared, draw_plan, long_unit, memory_unit, step_unit
from phalanx.planning.report import PlanReport, report_of
from phalanx.planning.search.candidate import Alternative

GAP = 2
"""White pixels between two parts of a bar: at 120 dots an inch, a line of 0.7 points and what is blurred beside it."""


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return report_of(plans.run(), plans.hardware(), plans.found())


@pytest.fixture(scope="module")
def picture(report: PlanReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "plan.png"
    draw_plan(report, path)
    return path


def length(path: Path, colour: str, half: slice) -> int:
    """Pixels of that colour in the three bars together, with the white gap that parts each from its neighbours."""
    from matplotlib.image import imread

    pixels = imread(path)
    upper = pixels[: int(0.36 * pixels.shape[0]), half, :3]  # the bars, without their legends
    wanted = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    lengths = (np.abs(upper - wanted).max(axis=-1) < 0.02).sum(axis=1)
    bars = [lengths[first] for first in np.flatnonzero(np.diff(lengths > 0, prepend=False))[::2] + 3]
    assert len(bars) in (0, 3)
    return sum(int(bar) + GAP for bar in bars)


def test_picture_bars_have_the_lengths_of_the_numbers(picture: Path) -> None:
    left, right = slice(0, 900), slice(900, 1800)
    activations, gradients, logits = (length(picture, MEMORY[name], left) for name in ("activations", "gradients", "logits"))
    assert activations / gradients == pytest.approx(92 / 36, rel=0.03)  # GiB of the three layouts together
    assert logits / gradients == pytest.approx(6 / 36, rel=0.06)
    computing, exchange, gradients_too = (length(picture, STEP[name], right) for name in ("compute", "tensor", "data"))
    assert computing / exchange == pytest.approx(11.1 / 3.1, rel=0.03)
    assert gradients_too / exchange == pytest.approx(1.05 / 3.1, rel=0.06)
    assert length(picture, STEP["expert"], right) == 0  # nobody has experts


def test_picture_metadata_describes_the_plan(picture: Path) -> None:
    blob = picture.read_bytes()
    assert blob.startswith(b"\x89PNG")
    said = blob[:2000].decode("latin-1")
    assert "llama3-405b on 16,384 × H100 SXM: PP16v8 ZeRO1×128 TP8+SP, MFU 42.0%" in said
    for number in (
        "step 5.00 s (P10 4.00 s, P90 6.00 s)",
        "memory 61.0 of 79.6 GiB",
        "60 days",
        "23.6M device-hours",
        "USD 47.2M",
    ):
        assert number in said


def test_picture_of_one_layout_without_price_and_of_other_sizes(tmp_path: Path, report: PlanReport) -> None:
    alone = plans.option(price=None, mfu=None, days=0.01)
    draw_plan(replace(report, best=alone, runners_up=(), curve=()), tmp_path / "alone.png")
    half = plans.option(layout=replace(plans.option().layout, shard=64), days=108.0, price=48e6)
    draw_plan(replace(report, scaling=(half, report.best)), tmp_path / "sizes.png")
    assert (tmp_path / "alone.png").stat().st_size > 20_000 < (tmp_path / "sizes.png").stat().st_size
    assert [long_unit(days)[1] for days in (54, 1.9, 0.05, 1e-3)] == ["days", "hours", "minutes", "seconds"]


def test_bars_are_drawn_of_runners_up_and_then_of_alternatives_that_fit(report: PlanReport) -> None:
    best, flat, wide = report.best, *report.runners_up
    assert compared(report) == [best, flat, wide]  # TP16, a runner-up too, is there once
    same = plans.option(memory={"fixed": 1.0})  # the winner, with other numbers
    large = plans.option(memory={"activations": 90 * plans.GIB}, micro_batch=2)
    others = tuple(Alternative(name="?", reason="?", candidate=other) for other in (None, same, large, wide))
    assert compared(replace(report, runners_up=(), alternatives=others)) == [best, wide]  # what does not fit has no bar


def test_picture_units_suit_the_size() -> None:
    assert [memory_unit(value)[0] for value in (61 * plans.GIB, plans.GIB, 0.9 * plans.GIB)] == ["GiB", "GiB", "MiB"]
    assert [step_unit(value)[0] for value in (75.0, 1.0, 0.2)] == ["s", "s", "ms"]


def test_the_legend_of_all_parts_is_inside_of_the_picture() -> None:
    from phalanx.dashboard.pictures import new_figure
    from phalanx.dashboard.plan_picture import _legend
    from phalanx.planning.report import MEMORY_LABELS, PART_LABELS

    figure = new_figure((15.0, 8.0), dpi=120, pad=0.12, space=(0.06, 0.04))
    (memory, step), _ = figure.subplots(2, 2)
    for axes, labels in ((memory, MEMORY_LABELS), (step, PART_LABELS)):
        for label in labels.values():
            axes.barh(0, 1, label=label)
        axes.set_yticks([0], ["PP16v2-zb ZeRO1×128 CP8-gather"])
        _legend(axes)
    figure.savefig(BytesIO())  # places everything
    left, right = (axes.get_legend().get_window_extent() for axes in (memory, step))
    assert 0 <= left.x0 < left.x1 <= right.x0 < right.x1 <= figure.bbox.width
