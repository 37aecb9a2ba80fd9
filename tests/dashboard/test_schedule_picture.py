"""A schedule's picture: as text by its letters, as a file by its colours."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from phalanx.dashboard.pictures import ACTION_COLORS, draw_schedule, schedule_legend, schedule_text
from phalanx.schedules.makers import make
from phalanx.schedules.timing import Durations, bubble, simulate


def test_text_has_a_column_per_unit_of_time() -> None:
    made = make("1f1b", 2, 2)
    assert schedule_text(simulate(made)) == [
        "rank 0  F0 F1 ·  ·  B0 -- ·  B1 --",
        "rank 1  ·  F0 B0 -- F1 B1 -- ·  ·".rstrip(),
    ]
    assert schedule_legend(made) == "F forward, B whole backward, · idle"


def test_later_stages_are_small_letters() -> None:
    made = make("zbv", 2, 3)
    lines = schedule_text(simulate(made))
    assert lines[0].startswith("rank 0  F0 F1 F2 f0 i0 w0 ")
    assert lines[1].startswith("rank 1  ·  F0 f0 F1 f1 i0 w0 ")
    assert schedule_legend(made).endswith("small letters: a rank's later stages, · idle")


@pytest.mark.parametrize("name", ["gpipe", "interleaved-zero-bubble", "dualpipev"])
def test_letters_and_dots_are_the_bubble(name: str) -> None:
    timeline = simulate(make(name, 4, 12), Durations(forward=2, input=3, weight=1))
    cells = [line[8:].split() for line in schedule_text(timeline)]
    length = round(timeline.stop)
    dots = sum(row.count("·") + length - len(row) for row in cells)
    assert dots / (4 * length) == pytest.approx(bubble(timeline))


def test_picture_shows_every_kind_of_action_and_idleness(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def share(name: str, colour: str) -> float:
        wanted = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
        return float((np.abs(imread(tmp_path / name)[..., :3] - wanted).max(axis=-1) < 0.02).mean())

    for name in ("dualpipev", "1f1b"):
        made = make(name, 4, 8)
        draw_schedule(made, simulate(made), tmp_path / name)
    blob = (tmp_path / "dualpipev").read_bytes()
    width, height = struct.unpack(">II", blob[16:24])
    assert blob.startswith(b"\x89PNG") and width > 1000 and height > 400
    for kind, colour in ACTION_COLORS.items():
        assert share("dualpipev", colour) > 5e-3, kind
        assert (share("1f1b", colour) > 5e-3) == (kind in ("F", "B", "idle")), kind
    assert share("1f1b", ACTION_COLORS["idle"]) > 3 * share("dualpipev", ACTION_COLORS["idle"])


def test_picture_of_very_much_stays_a_picture(tmp_path: Path) -> None:
    made = make("zbv", 16, 64)
    draw_schedule(made, simulate(made), tmp_path / "big.png")
    width, height = struct.unpack(">II", (tmp_path / "big.png").read_bytes()[16:24])
    assert width <= 6000 and height <= 5000


def test_a_wide_schedule_continues_below() -> None:
    timeline = simulate(make("1f1b", 4, 8, None))
    whole, folded = schedule_text(timeline), schedule_text(timeline, width=60)
    assert len(whole) == 4 and max(map(len, whole)) > 60
    assert max(map(len, folded)) <= 60
    rows = [[line for line in folded if line.startswith(f"rank {rank}")] for rank in range(4)]
    joined = [" ".join(cell for line in lines for cell in line[8:].split()) for lines in rows]
    assert joined == [" ".join(line[8:].split()) for line in whole]
