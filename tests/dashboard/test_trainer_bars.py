"""The picture of a comparison of trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.dashboard.trainer_bars import TrainerBar, draw_trainers

BARS = [
    TrainerBar(name="phalanx", tokens_per_second=66_136, quartiles=(65_000, 67_000), memory=64 << 30, is_ours=True),
    TrainerBar(name="hand $1_2$", tokens_per_second=61_700, quartiles=(61_000, 62_000), memory=63 << 30, is_ours=False),
]


def test_a_picture_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        draw_trainers(BARS, "2048 × 16 layers", "8 × 4,096 tokens", path)
    assert one.read_text() == two.read_text() and one.read_text().count("<path") > 10
    draw_trainers(BARS[:1], "2048 × 16 layers", "8 × 4,096 tokens", two)
    assert one.read_text() != two.read_text()


@pytest.mark.parametrize("memory", [64 << 30, 200 << 20])
def test_a_picture_as_png(tmp_path: Path, memory: int) -> None:
    path = tmp_path / "steps.png"
    bars = [TrainerBar(name="phalanx", tokens_per_second=10.0, quartiles=(10.0, 10.0), memory=memory, is_ours=True)]
    draw_trainers(bars, "tiny", "", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
