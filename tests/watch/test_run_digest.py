"""The digest of a run's events, against plain computations from the same events."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from watch_runs import Record, lines, started, step

from phalanx.dashboard.summary import history
from phalanx.events.records import decode, plain
from phalanx.watch.columns import curve
from phalanx.watch.run_digest import Digest


def digest_of(records: list[Record]) -> Digest:
    digest = Digest()
    digest.feed(lines(records).split(b"\n"))
    return digest


def random_run(seed: int) -> list[Record]:
    """Launches, failures, skipped steps and evaluations in any order that a run can write."""
    dice, records, now, number = random.Random(seed), [started(0.0)], 0.0, 0
    for _ in range(400):
        now += 1.0
        number += 1
        chance = dice.random()
        if chance < 0.06:
            records.append(
                {
                    "event": "step_skipped",
                    "time": now,
                    "step": number,
                    "samples": 1,
                    "loss": "nan",
                    "grad_norm": "inf",
                    "in_a_row": 1,
                }
            )
        else:
            records.append(
                step(number, now, loss=dice.random(), seconds=dice.random(), mfu=None if dice.random() < 0.2 else 0.3)
            )
        if chance > 0.9:
            records.append(
                {
                    "event": "evaluated",
                    "time": now,
                    "step": number,
                    "loss": dice.random(),
                    "tokens": 5,
                    "seconds": 1.0,
                    "sources": {},
                }
            )
        if chance > 0.97:
            number = dice.randrange(0, number)
            if dice.random() < 0.5:
                records.append({"event": "restored", "time": now, "step": number, "path": "memory", "seconds": 0.1})
        if chance < 0.01:
            records.append(started(now))
    return records


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_count_are_those_of_the_summary(seed: int) -> None:
    records = random_run(seed)
    digest = digest_of(records)
    known = history(event for record in records if (event := decode(json.dumps(record))) is not None)
    assert digest.steps["step"].tolist() == sorted(known.steps)
    assert digest.steps["loss"].tolist() == [known.steps[number].loss for number in sorted(known.steps)]
    assert [row["step"] for row in digest.evaluations] == sorted(known.evaluations)
    assert digest.last_step == max([*known.steps, *(event.step for event in known.skipped)])
    assert digest.broken == 0


@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_kept_or_undone(seed: int) -> None:
    records = random_run(seed)
    digest = digest_of(records)
    taken = [record["step"] for record in records if record["event"] == "step"]
    assert sorted([*digest.steps["step"].tolist(), *digest.undone["step"].tolist()]) == sorted(taken)
    written = [record["step"] for record in records if record["event"] in ("step", "step_skipped")]
    assert digest.progress["step"].tolist() == written


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_lines_may_come_in_parts(cut: int) -> None:
    every = lines(random_run(1)).split(b"\n")
    whole, parts = Digest(), Digest()
    whole.feed(every)
    for begin in range(0, len(every), cut):
        parts.feed(every[begin : begin + cut])
    for name in ("step", "time", "loss", "mfu", "seconds"):
        np.testing.assert_array_equal(whole.steps[name], parts.steps[name])
    assert whole.cuts == parts.cuts


def ranks_of(generation: int, ranks: int = 3) -> list[Record]:
    made: list[Record] = []
    for rank in range(ranks):
        made.append(
            {
                "event": "worker_started",
                "time": 1.0,
                "rank": rank,
                "host": f"h{rank // 2}",
                "pid": 10 * generation + rank,
                "device": "cpu",
            }
        )
        made.append(
            {
                "event": "step_timed",
                "time": 1.0,
                "step": 2,
                "rank": rank,
                "seconds": 1.0 + generation,
                "parts": {"compute": 0.5 + rank, "data": 0.25},
            }
        )
        made.append(
            {
                "event": "model_placed",
                "time": 1.0,
                "rank": rank,
                "applied": {"data": f"generation {generation}"},
                "parameters": 5,
                "gradients": 6,
                "optimizer": 7,
            }
        )
    return made


def test_records_of_ranks_may_be_read_later() -> None:
    """A large run's records of ranks are read after everything else; what is known then is the same."""
    failure = {
        "event": "failure_noticed",
        "time": 3.0,
        "number": 1,
        "cause": "died",
        "message": "rank 1 died",
        "rank": 1,
        "step": 1,
    }
    every = lines([started(), *ranks_of(0), step(1), failure, *ranks_of(1), step(2)]).split(b"\n")
    at_once, later = Digest(), Digest()
    at_once.feed(every)
    later.feed(every, ranks=False)
    assert not len(later.ranks.started) and later.steps["step"].tolist() == [1, 2]
    later.feed_ranks(every)
    for name in ("started", "timed", "accounted"):
        assert getattr(at_once.ranks, name).rows(0).tolist() == getattr(later.ranks, name).rows(0).tolist()
    assert at_once.ranks.timed["generation"].tolist() == [1, 1, 1, 2, 2, 2]
    placed = later.ranks.placed(2)
    assert placed is not None and placed["applied"] == {"data": "generation 1"}
    assert later.ranks.placed(9) is None


def test_a_failure_has_its_recovery() -> None:
    def failed(number: int, time: float) -> Record:
        return {
            "event": "failure_noticed",
            "time": time,
            "number": number,
            "cause": "died",
            "message": f"failure {number}",
            "rank": 0,
            "step": 1,
        }

    recovered = {
        "event": "recovered", "time": 9.0, "failures": [2, 3], "action": "shrink", "generation": 1, "ranks": 2, "layout": {"data": 2}, "source": "live", "step": 1,
        "steps_lost": 4, "noticed": 5.0, "decided": 6.0, "restarted": 8.0, "first_step": 9.0, "seconds": 4.0,
    }  # fmt: skip
    digest = digest_of([started(), failed(1, 1.0), failed(2, 5.0), failed(3, 5.5), recovered])
    assert [row["recovery"] is not None for row in digest.failures] == [False, True, True]
    assert (digest.steps_lost, digest.seconds_lost) == (4, 4.0)
    assert digest.launch["ranks"] == 2


HOSTILE: dict[str, bytes] = {
    "no JSON": b"{",
    "not an object": b"[1, 2]",
    "deep": b"[" * 100_000,
    "not text": b'{"event": "step", "time": 1.0, "step": 2, "loss": "\xff"}',
    "step is text": b'{"event": "step", "time": 1.0, "step": "<b>2</b>"}',
    "step is negative": b'{"event": "step", "time": 1.0, "step": -5}',
    "step is huge": b'{"event": "step", "time": 1.0, "step": ' + b"9" * 400 + b"}",
    "digits without end": b'{"event": "step", "time": 1.0, "step": ' + b"9" * 5000 + b"}",
    "nothing else": b'{"event": "step", "time": 1.0, "step": 2}',
    "every type wrong": b'{"event": "recovered", "time": [], "failures": 7, "action": {}, "layout": [], "step": null, "seconds": "x", "ranks": true}',
    "rank is huge": b'{"event": "step_timed", "time": 1.0, "rank": 99999999999, "step": 1, "seconds": 1.0, "parts": {}}',
    "time is NaN": b'{"event": "step", "time": NaN, "step": 2, "loss": NaN}',
    "time is far away": b'{"event": "warned", "time": 1e300, "message": "x"}',
    "kind is a list": b'{"event": ["step"], "time": 1.0}',
    "sources are text": b'{"event": "evaluated", "time": 1.0, "step": 1, "loss": "inf", "sources": {"a": "b"}}',
    "promise is text": b'{"event": "run_started", "time": 1.0, "promise": "much", "layout": 3, "ranks": -1}',
    "half a character": b'{"event": "warned", "time": 1.0, "message": "\\ud800<script>alert(1)</script>"}',
    "applied is a list": b'{"event": "model_placed", "time": 1.0, "rank": 0, "applied": [1]}',
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_lines_break_nothing(case: str) -> None:
    from watch_views import every_view

    good = lines([started(), *ranks_of(0), step(1), step(3)]).split(b"\n")
    digest = Digest()
    digest.feed([*good[:-1], HOSTILE[case], *lines([step(4)]).split(b"\n")])
    digest.feed_ranks([HOSTILE[case]])
    assert digest.steps["step"].tolist()[-1] == 4
    for answer in every_view(digest).values():
        json.dumps(plain(answer), allow_nan=False)


@pytest.mark.parametrize(("count", "width"), [(10, 100), (1000, 100), (1001, 7), (5, 5), (1, 50)])
def test_a_curve_is_reduced_without_losing_extremes(count: int, width: int) -> None:
    dice = random.Random(count)
    x = np.cumsum([dice.randrange(1, 4) for _ in range(count)])
    values = np.array(
        [dice.choice([dice.gauss(0, 1), math.nan, math.inf]) if dice.random() < 0.1 else dice.gauss(0, 1) for _ in range(count)]
    )
    made: Any = curve(x, {"y": values}, width, None, None)
    finite = values[np.isfinite(values)]
    y = made["y"]["y"]
    assert len(made["x"]) == min(count, width) and made["x"][-1] == x[-1] and made["rows"] == count
    lows, highs = ([value for value in y.get(name, y["mean"]) if value is not None] for name in ("min", "max"))
    assert min(lows) == pytest.approx(finite.min(), rel=1e-6) and max(highs) == pytest.approx(finite.max(), rel=1e-6)
    starts = [count * index // min(count, width) for index in range(min(count, width))] + [count]
    for index, mean in enumerate(y["mean"]):
        bucket = [value for value in values[starts[index] : starts[index + 1]] if math.isfinite(value)]
        assert mean == (pytest.approx(sum(bucket) / len(bucket), rel=1e-5, abs=1e-9) if bucket else None)


def test_a_zoom_has_the_rows_around_its_ends() -> None:
    made: Any = curve(np.arange(1, 101), {"y": np.arange(1.0, 101.0)}, 1000, 20.0, 29.5)
    assert made["x"] == list(range(19, 31)) and not made["reduced"]
