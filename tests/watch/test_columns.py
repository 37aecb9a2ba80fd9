"""Columns of numbers, against plain lists, and the packed curves of the page."""

from __future__ import annotations

import base64
import math
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from watch_runs import serving, started, step, write_run

from phalanx.watch.columns import Columns, between, curve


@pytest.mark.parametrize("seed", range(5))
def test_columns_are_those_of_the_rows_whatever_was_cut(seed: int) -> None:
    dice, columns, rows = random.Random(seed), Columns({"step": "i8", "loss": "f8"}, first=2), list[tuple[int, float]]()
    for _ in range(500):
        chance = dice.random()
        if chance < 0.8:
            rows.append((dice.randrange(1000), dice.random()))
            columns.append(rows[-1])
        elif chance < 0.87:
            length = dice.randrange(len(rows) + 1)
            columns.cut(length)
            rows = rows[:length]
        elif chance < 0.9:
            drop = dice.randrange(len(rows) + 1)
            columns.drop_first(drop)
            rows = rows[drop:]
        else:  # only sometimes, so that what is read was changed in several ways since
            assert columns["step"].tolist() == [row[0] for row in rows]
            assert columns["loss"].tolist() == [row[1] for row in rows]
    assert columns.rows(0).tolist() == rows


def test_packed_curves_are_those_in_digits() -> None:
    dice = np.random.default_rng(0)
    loss = dice.random(5000) * 10
    loss[100:200] = math.nan
    columns = {"loss": loss, "memory": np.full(5000, 6e10), "norm": dice.random(5000)}
    plain, sent = (curve(np.arange(5000), columns, 300, 0, 4000, pack=pack) for pack in (False, True))
    assert sent["x"] == plain["x"] and sent["rows"] == plain["rows"] == 4002
    for name in columns:
        lines: dict[str, list[float | None]] = plain["y"][name]  # type: ignore[call-overload,index]
        for part, values in lines.items():
            packed = base64.b64decode(sent["y"][name][part])  # type: ignore[call-overload,index]
            read = [value if math.isfinite(value) else None for value in struct.unpack(f"<{len(packed) // 4}f", packed)]
            assert [value is None for value in read] == [value is None for value in values]
            known = [(one, other) for one, other in zip(read, values, strict=True) if one is not None and other is not None]
            # Half of the seventh digit, and half of the last bit of 24.
            assert all(abs(one - other) <= (5e-7 + 2**-24) * abs(other) for one, other in known) and len(known) > 200
    assert list(plain["y"]["memory"]) == ["mean"]  # type: ignore[call-overload,index,arg-type]


@pytest.mark.parametrize(
    ("low", "high"), [(10.5, 20.5), (10.0, 20.0), (None, 3.0), (90.2, None), (-1e300, 1e300), (200.0, 300.0)]
)
def test_a_window_of_whole_numbers_is_that_of_the_same_reals(low: float | None, high: float | None) -> None:
    steps = np.arange(0, 100, 3)
    assert between(steps, low, high) == between(steps.astype(np.float64), low, high)


def test_only_who_asks_for_packed_curves_gets_them(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [started(), *(step(number) for number in range(1, 50))])
    with serving(tmp_path) as client:
        assert client.view("run", "overview")["curve"]["y"]["loss"]["mean"][0] == 4.9
        packed = client.view("run", "overview", pack=1)["curve"]["y"]["loss"]["mean"]
        assert struct.unpack("<49f", base64.b64decode(packed))[0] == pytest.approx(4.9)
