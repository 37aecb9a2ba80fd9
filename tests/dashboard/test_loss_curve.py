"""The curve as a file, and as pixels where that is the only truth."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.dashboard.pictures import draw_loss, smooth
from phalanx.events.records import Evaluated, Event, Restored, StepSkipped

Make = Callable[..., Any]


def pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return imread(path)


def share(path: Path, colour: str) -> float:
    """Part of the picture that is near a colour."""
    wanted = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return float((np.abs(pixels(path)[..., :3] - wanted).max(axis=-1) < 0.08).mean())


def test_nothing_to_draw_is_no_file(tmp_path: Path, started: Make) -> None:
    assert draw_loss([started()], tmp_path / "loss.png") is False
    assert not (tmp_path / "loss.png").exists()


def test_curve_of_a_resumed_run(tmp_path: Path, step: Make, started: Make) -> None:
    events: list[Event] = [started(), *(step(n) for n in range(1, 61))]
    events += [StepSkipped(step=40, samples=1, loss=math.nan, grad_norm=math.inf, in_a_row=1)]
    events += [started(), Restored(step=50, path="a", seconds=1.0), *(step(n) for n in range(51, 121))]
    events += [Evaluated(step=n, loss=10 - n / 90, tokens=1, seconds=1.0) for n in (60, 120)]
    path = tmp_path / "loss.png"
    assert draw_loss(events, path) is True
    blob = path.read_bytes()
    width, height = struct.unpack(">II", blob[16:24])
    assert blob.startswith(b"\x89PNG") and width > 1000 and height > 600 and len(blob) > 20_000
    for colour in ("#2563eb", "#ea580c", "#0f766e", "#9333ea"):  # loss, held-out, speed, learning rate
        assert share(path, colour) > 1e-4, colour


def test_undone_steps_leave_no_trace(tmp_path: Path, step: Make, started: Make) -> None:
    kept = [started(), *(step(n) for n in range(1, 41))]
    undone = [started(), *(step(n, loss=50.0) for n in range(1, 31))]
    for name, events in (("a", kept), ("b", undone + kept)):
        (tmp_path / name / "run").mkdir(parents=True)
        draw_loss(events, tmp_path / name / "run" / "loss.png")
    assert np.array_equal(pixels(tmp_path / "a/run/loss.png"), pixels(tmp_path / "b/run/loss.png"))


@pytest.mark.parametrize("name", ["quick", "cost $x^ and $", "训练", "%s {0} \\alpha"])
def test_any_name_can_be_a_title(tmp_path: Path, name: str, step: Make) -> None:
    (tmp_path / name).mkdir()
    assert draw_loss([step(1)], tmp_path / name / "loss.png")


@pytest.mark.parametrize("values", [[math.nan], [1.0], [1.0, 1.0], [math.inf, 2.0], [0.0] * 30, [math.nan] * 30])
def test_odd_losses(tmp_path: Path, values: list[float], step: Make) -> None:
    events: list[Event] = [step(n + 1, loss=v, tokens_per_second=v, learning_rate=0.0) for n, v in enumerate(values)]
    assert draw_loss([*events, Evaluated(step=1, loss=math.nan, tokens=1, seconds=1.0)], tmp_path / "loss.png")


def test_drawing_needs_no_global_state(tmp_path: Path, step: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails now
    assert draw_loss([step(1), step(2)], tmp_path / "loss.png")


def test_smoothing_is_centred_and_ignores_spikes() -> None:
    line = [float(n) for n in range(1200)]
    places, values = smooth(line)
    assert len(places) == 500 and places[0] == 0 and places[-1] == 1199
    inside = [(place, value) for place, value in zip(places, values, strict=True) if place < 1170]
    assert all(value == pytest.approx(place) for place, value in inside)  # a straight line is its own median
    spiked = [1.0] * 200
    spiked[100] = 1e6
    assert set(smooth(spiked)[1]) == {1.0}
    assert smooth([3.0, math.nan, 1.0, 2.0])[1] == [3.0, 2.0, 2.0, 1.5]  # of 3; 3 1; 3 1 2; 1 2
