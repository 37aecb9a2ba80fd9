"""A plan's picture: its bars have the lengths of the numbers, and the file says in words what it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plans
import pytest

from phalanx.dashboard.plan_picture import MEMORY, STEP, compared, draw, long_unit, memory_unit, step_unit
from phalanx.planning.explain import report_of
from phalanx.planning.report import candidate_json

GAP = 2
"""White pixels between two parts of a bar: at 120 dots an inch, a line of 0.7 points and what is blurred beside it."""


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return report_of(plans.run(), plans.hardware(), plans.found()).to_json()


@pytest.fixture(scope="module")
def picture(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "plan.png"
    draw(values, path)
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


def test_bars_are_as_long_as_the_numbers(picture: Path) -> None:
    left, right = slice(0, 900), slice(900, 1800)
    activations, gradients, logits = (length(picture, MEMORY[name], left) for name in ("activations", "gradients", "logits"))
    assert activations / gradients == pytest.approx(92 / 36, rel=0.03)  # GiB of the three layouts together
    assert logits / gradients == pytest.approx(6 / 36, rel=0.06)
    computing, exchange, gradients_too = (length(picture, STEP[name], right) for name in ("compute", "tensor", "data"))
    assert computing / exchange == pytest.approx(11.1 / 3.1, rel=0.03)
    assert gradients_too / exchange == pytest.approx(1.05 / 3.1, rel=0.06)
    assert length(picture, STEP["expert"], right) == 0  # nobody has experts


def test_the_file_says_what_it_shows(picture: Path) -> None:
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


def test_one_layout_without_price_and_other_sizes_are_drawn_too(tmp_path: Path, values: dict[str, Any]) -> None:
    alone = candidate_json(plans.option(price=None, mfu=None, days=0.01))
    draw(values | {"best": alone, "others": [], "curve": []}, tmp_path / "alone.png")
    half = plans.option(layout=replace(plans.option().layout, shard=64), days=108.0, price=48e6)
    draw(values | {"scaling": [candidate_json(half), values["best"]]}, tmp_path / "sizes.png")
    assert (tmp_path / "alone.png").stat().st_size > 20_000 < (tmp_path / "sizes.png").stat().st_size
    assert [long_unit(days)[1] for days in (54, 1.9, 0.05, 1e-3)] == ["days", "hours", "minutes", "seconds"]


def test_bars_beside_the_winners_are_runners_up_then_what_was_told_why_not(values: dict[str, Any]) -> None:
    best, flat, wide = values["best"], *values["others"]
    assert compared(values) == [best, flat, wide]  # TP16, a runner-up too, is there once
    same = candidate_json(plans.option(memory={"fixed": 1.0}))  # the winner, with other numbers
    large = candidate_json(plans.option(memory={"activations": 90 * plans.GIB}, micro_batch=2))
    reasons = [{"name": "?", "reason": "?", "option": option} for option in (None, same, large, wide)]
    assert compared(values | {"others": [], "why_not": reasons}) == [best, wide]  # what does not fit has no bar


def test_units_suit_the_size() -> None:
    assert [memory_unit(value)[0] for value in (61 * plans.GIB, plans.GIB, 0.9 * plans.GIB)] == ["GiB", "GiB", "MiB"]
    assert [step_unit(value)[0] for value in (75.0, 1.0, 0.2)] == ["s", "s", "ms"]
