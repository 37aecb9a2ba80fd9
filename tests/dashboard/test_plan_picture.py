"""A plan's picture: its bars have the lengths of the numbers, and the file says in words what it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plans
import pytest

from phalanx.dashboard.plan_picture import MEMORY, STEP, draw, long_unit
from phalanx.planning.explain import told, told_option


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return told(plans.run(), plans.hardware(), plans.found())


@pytest.fixture(scope="module")
def picture(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "plan.png"
    draw(values, path)
    return path


def share(path: Path, colour: str, half: slice) -> float:
    from matplotlib.image import imread

    pixels = imread(path)
    upper = pixels[: int(0.36 * pixels.shape[0]), half, :3]  # the bars, without their legends
    wanted = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return float((np.abs(upper - wanted).max(axis=-1) < 0.02).sum())


def test_bars_are_as_long_as_the_numbers(picture: Path) -> None:
    left, right = slice(0, 900), slice(900, 1800)
    activations, gradients, logits = (share(picture, MEMORY[name], left) for name in ("activations", "gradients", "logits"))
    assert activations / gradients == pytest.approx(92 / 36, rel=0.03)  # GiB of the three layouts together
    assert logits / gradients == pytest.approx(6 / 36, rel=0.06)
    computing, exchange, gradients_too = (share(picture, STEP[name], right) for name in ("compute", "tensor", "data"))
    assert computing / exchange == pytest.approx(11.1 / 3.1, rel=0.03)
    assert gradients_too / exchange == pytest.approx(1.05 / 3.1, rel=0.06)
    assert share(picture, STEP["expert"], right) == 0  # nobody has experts


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
    alone = told_option(plans.option(price=None, mfu=None, days=0.01))
    draw(values | {"best": alone, "others": [], "curve": []}, tmp_path / "alone.png")
    half = plans.option(layout=replace(plans.option().layout, shard=64), days=108.0, price=48e6)
    draw(values | {"scaling": [told_option(half), values["best"]]}, tmp_path / "sizes.png")
    assert (tmp_path / "alone.png").stat().st_size > 20_000 < (tmp_path / "sizes.png").stat().st_size
    assert [long_unit(days)[1] for days in (54, 1.9, 0.05, 1e-3)] == ["days", "hours", "minutes", "seconds"]
