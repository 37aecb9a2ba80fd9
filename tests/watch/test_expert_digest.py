"""Loads of experts as the page shows them, against plain computations from the same records."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from watch_runs import Record, lines, serving, started, step, write_run

from phalanx.watch import expert_digest
from phalanx.watch.run_digest import Digest

LAYERS = {"blocks.1": 4, "blocks.2": 4, "mtp.0": 8}


def loads(number: int, dice: random.Random, **more: Any) -> Record:
    tokens = {name: [dice.randrange(0, 1000) for _ in range(size)] for name, size in LAYERS.items()}
    return {"event": "expert_loads", "time": 2.0 * number, "step": number, "steps": 20, "tokens": tokens} | more


def recorded(count: int, seed: int = 0) -> list[Record]:
    dice = random.Random(seed)
    return [started(), *(record for n in range(20, 20 * count + 1, 20) for record in (step(n), loads(n, dice)))]


def digest_of(records: list[Record]) -> Digest:
    digest = Digest()
    digest.feed(lines(records).split(b"\n"))
    return digest


def ratio(row: list[int]) -> float:
    return max(row) * len(row) / sum(row)


def rows_of(records: list[Record], name: str) -> list[list[int]]:
    return [record["tokens"][name] for record in records if record["event"] == "expert_loads"]


def test_every_layer_is_shown_as_it_is_recorded(tmp_path: Path) -> None:
    records = recorded(100)
    write_run(tmp_path / "run", records)
    with serving(tmp_path) as client:
        layers = client.view("run", "experts")["layers"]
        assert layers["names"] == [*LAYERS] and layers["edges"] == [*range(0, 2001, 20)]
        for name, drawn in zip(LAYERS, layers["load"], strict=True):
            assert drawn == pytest.approx([ratio(row) for row in rows_of(records, name)], abs=6e-4)
        last = rows_of(records, "mtp.0")[-1]
        assert layers["last"][2] == {
            "fullest": last.index(max(last)), "most": pytest.approx(ratio(last), abs=6e-4), "emptiest": last.index(min(last)),
            "least": pytest.approx(min(last) * 8 / sum(last), abs=6e-4), "unused": last.count(0), "experts": 8,
        }  # fmt: skip
        assert (layers["step"], layers["steps"]) == (2000, 20)
        one = client.view("run", "expert_layer", layer=2)
        assert one["name"] == "mtp.0" and one["edges"] == layers["edges"] and len(one["load"]) == 8
        for expert, drawn in enumerate(one["load"]):
            assert drawn == pytest.approx([row[expert] * 8 / sum(row) for row in rows_of(records, "mtp.0")], abs=6e-4)
        part = client.view("run", "experts", **{"from": 400, "to": 500})["layers"]
        assert part["edges"] == [*range(360, 521, 20)]
        assert part["load"][0] == layers["load"][0][18:26]
        assert client.get("/api/view?run=run&view=expert_layer&layer=3").json["load"] == []
        assert client.get("/api/view?run=run&view=expert_layer&layer=-1").status == 400


def test_a_picture_of_many_records_has_the_worst_of_each_column() -> None:
    records = recorded(1000)
    heat: Any = digest_of(records).experts.heat(None, None)
    assert len(heat["edges"]) == 241
    rows = {record["step"]: ratio(record["tokens"]["blocks.2"]) for record in records if record["event"] == "expert_loads"}
    for low, high, shown in zip(heat["edges"], heat["edges"][1:], heat["load"][1], strict=False):
        assert shown == pytest.approx(max(value for number, value in rows.items() if low < number <= high), abs=6e-4)
    one: Any = digest_of(records).experts.layer(1, None, None)
    low, high = heat["edges"][7:9]
    inside = [r["tokens"]["blocks.2"] for r in records if r["event"] == "expert_loads" and low < r["step"] <= high]
    sums = [sum(column) for column in zip(*inside, strict=True)]
    assert [row[7] for row in one["load"]] == pytest.approx([4 * each / sum(sums) for each in sums], abs=6e-4)


def test_steps_that_are_undone_take_their_loads_with_them() -> None:
    records = recorded(10)
    records += [{"event": "restored", "time": 900.0, "step": 110, "path": "memory", "seconds": 1.0}, step(111, 901.0)]
    records += [loads(120, random.Random(9), steps=10)]
    heat: Any = digest_of(records).experts.heat(None, None)
    assert heat["edges"] == [0, 20, 40, 60, 80, 100, 120] and heat["steps"] == 10
    assert heat["load"][0][-1] == pytest.approx(ratio(records[-1]["tokens"]["blocks.1"]), abs=6e-4)


def test_loads_of_a_long_run_are_merged_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    records = recorded(900)
    whole = digest_of(records).experts
    monkeypatch.setattr(expert_digest, "_MEMORY", 200 * (16 + 4 * (16 + 3)))
    merged = digest_of(records).experts
    assert 100 <= len(merged) <= 200 < len(whole) == 900
    all_tokens = [sum(column) for column in zip(*rows_of(records, "mtp.0"), strict=True)]
    rows = merged._columns.rows(0)
    assert rows["tokens"][:, 8:].sum(0).tolist() == all_tokens and rows["steps"].sum() == 900 * 20
    assert rows["fullest"].max(0).tolist() == pytest.approx([max(map(ratio, rows_of(records, name))) for name in LAYERS])
    assert merged.memory < 256 * (2 * 16 + 4 * 19)


@pytest.mark.parametrize(
    "tokens",
    [None, [], {}, {"a": 3}, {"a": []}, {"a": [1, -1]}, {"a": [1, 2.5]}, {"a": [True]}, {"a": [1 << 60]}, {"a": [0] * 100_001}],
)
def test_broken_loads_are_counted_and_not_shown(tokens: Any) -> None:
    good = loads(20, random.Random(0))
    digest = digest_of([started(), good, good | {"step": 40, "tokens": tokens}])
    assert digest.broken == 1 and len(digest.experts) == 1


def test_loads_without_any_token_have_no_ratio() -> None:
    digest = digest_of([started(), loads(20, random.Random(0), tokens={"<b>": [0, 0]})])
    heat: Any = digest.experts.heat(None, None)
    assert heat["names"] == ["<b>"] and heat["load"] == [[None]] and heat["last"][0]["unused"] == 2
    layer: Any = digest.experts.layer(0, None, None)
    assert layer["load"] == [[None], [None]]


def test_other_layers_than_before_begin_anew() -> None:
    records = [*recorded(5), loads(120, random.Random(0), tokens={"blocks.0": [1, 2, 3]})]
    heat: Any = digest_of(records).experts.heat(None, None)
    assert heat["names"] == ["blocks.0"] and heat["load"] == [[1.5]]
