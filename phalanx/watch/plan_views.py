"""What the page shows of a run next to its plan, as JSON: the promise, the ranks in their layout, one rank, the pipeline schedule."""

from __future__ import annotations

import math

import numpy as np

from phalanx.dashboard.pictures import ACTION_COLORS
from phalanx.dashboard.plan_picture import MEMORY, OTHER_COLOR, STEP
from phalanx.events.records import StepTimed
from phalanx.planning.feedback import MEASURED_PARTS, Timed, timed
from phalanx.planning.report import MEMORY_LABELS, PART_LABELS
from phalanx.schedules.actions import KINDS
from phalanx.schedules.makers import NAMES, make, problems_for
from phalanx.schedules.timing import bubble, simulate
from phalanx.spec.json_value import Json, JsonObject
from phalanx.spec.layout import default_stages
from phalanx.watch import rank_digest
from phalanx.watch.columns import Array, Columns, last_of_each, numbers
from phalanx.watch.executed_step import executed
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.rank_digest import PARTS, WAITS
from phalanx.watch.record_values import known, number, numbers_of, table, whole
from phalanx.watch.run_digest import Digest
from phalanx.watch.run_views import Window, price_rate, time_left, warm_rows

AXES = ("pipeline", "data", "shard", "context", "tensor")
"""Degrees of a layout, outermost first: the last varies fastest with the rank."""
_MAX_DRAWN = 1 << 16
"""Ranks of a picture."""
_MAX_STAGES = 256
"""Of a pipeline whose executed steps are read."""
_MAX_ACTIONS = 20_000
_ACTIVATIONS = ("activations", "logits", "gathered", "buffers")
"""Components of planned memory that a run measures as one."""


def promise(run: FollowedRun, window: Window) -> JsonObject:
    """What the plan promised next to what is measured."""
    digest = run.digest
    planned = table(digest.launch, "promise")
    measured = _timed(digest)
    return {
        "promised": bool(planned),
        "rows": _promised_rows(digest, planned),
        "parts": _part_rows(digest, planned, measured),
        "timed": None if measured is None else {"step": measured.step, "rank": measured.rank, "ranks": measured.ranks},
        "memory": _memory_rows(digest, planned),
        "machine": run.plan().get("machine"),
        "split": [
            _colored(name, value, PART_LABELS, STEP) for name, value in numbers_of(planned, "split").items() if value > 0
        ],
    }


def _promised_rows(digest: Digest, planned: JsonObject) -> list[Json]:
    rows = warm_rows(digest)
    seconds, speed, mfu = (digest.steps[name][rows] for name in ("seconds", "tokens_per_second", "mfu"))
    tokens = number(planned, "tokens_per_second") * number(planned, "seconds")
    low, high = number(planned, "low"), number(planned, "high")
    left, rate = time_left(digest), price_rate(digest)
    whole_run = None if left is None else digest.elapsed + left
    memory = digest.steps["memory"][rows]
    flops = number(planned, "mfu") * number(planned, "seconds")
    return [
        _row("step time", "s", planned.get("seconds"), (low, high), seconds),
        _row("tokens/s", "count", planned.get("tokens_per_second"), (_over(tokens, high), _over(tokens, low)), speed),
        _row("MFU", "fraction", planned.get("mfu"), (_over(flops, high), _over(flops, low)), mfu),
        _row("memory of the fullest rank", "B", planned.get("total_memory"), None, np.array([np.nanmax(memory)]) if len(memory) else memory),
        _projected("duration of the whole run", "s", number(planned, "days") * 86400, whole_run, (low, high, number(planned, "seconds"))),
        _projected("price of the whole run", "$", number(planned, "price"), None if rate is None or whole_run is None else rate * whole_run, None),
    ]  # fmt: skip


def _row(name: str, unit: str, planned: Json, interval: tuple[float, float] | None, values: Array) -> JsonObject:
    """One figure of the plan with its P10 and P90, next to median, P10 and P90 of the measured values."""
    finite = values[np.isfinite(values)]
    p10, median, p90 = (float(value) for value in np.quantile(finite, (0.1, 0.5, 0.9))) if len(finite) else (math.nan,) * 3
    low, high = interval or (math.nan, math.nan)
    ends: JsonObject = {"low": known(low), "high": known(high)}
    return ends | {
        "name": name, "unit": unit, "planned": planned, "measured": known(median), "count": len(finite),
        "measured_low": known(p10) if len(finite) > 1 else None, "measured_high": known(p90) if len(finite) > 1 else None,
    }  # fmt: skip


def _projected(
    name: str, unit: str, planned: float, value: float | None, step: tuple[float, float, float] | None
) -> JsonObject:
    """A figure of the whole run, at the present pace. `step`: P10, P90 and mean of a step, whose ratio the whole run shares."""
    row = _row(name, unit, known(planned), None, np.array([] if value is None else [value]))
    if step is not None:
        row |= {"low": known(planned * _over(step[0], step[2])), "high": known(planned * _over(step[1], step[2]))}
    return row | {"projected": True}


def _over(value: float, by: float) -> float:
    return value / by if by else math.nan


def _timed(digest: Digest) -> Timed | None:
    """A measured step of the newest ranks, in the parts of the time model."""
    columns = digest.ranks.timed
    if not len(columns):
        return None
    newest = np.flatnonzero(columns["generation"] == columns["generation"][-1])
    rows = columns.rows(int(newest[0]))
    heads = zip(*(rows[name].tolist() for name in ("step", "rank", "seconds")), strict=True)
    parts = zip(*(rows[name].tolist() for name in PARTS), strict=True)
    return timed(
        [
            StepTimed(step=step, rank=rank, seconds=seconds, parts=dict(zip(PARTS, spent, strict=True)))
            for (step, rank, seconds), spent in zip(heads, parts, strict=True)
        ]
    )


def _part_rows(digest: Digest, planned: JsonObject, measured: Timed | None) -> list[Json]:
    """Parts of a step, as planned and as measured; the measured ones sum to the median step."""
    split = numbers_of(planned, "split")
    seconds = digest.steps["seconds"][warm_rows(digest)]
    median = float(np.nanmedian(seconds)) if len(seconds) and np.isfinite(seconds).any() else None
    spent = {} if measured is None or median is None or not measured.seconds else measured.of(median)
    rows: list[Json] = []
    for part, (label, covered) in MEASURED_PARTS.items():
        expected = sum(split.get(name, 0.0) for name in covered) if covered else None
        if expected or spent.get(part):
            color = STEP.get(part, OTHER_COLOR)
            rows.append(
                {
                    "name": part,
                    "label": label,
                    "planned": expected,
                    "measured": spent.get(part, 0.0) if spent else None,
                    "color": color,
                }
            )
    return rows


def _memory_rows(digest: Digest, planned: JsonObject) -> list[Json]:
    """Components of memory: as planned of the rank that needs most, as measured of the rank that has most."""
    expected, accounted = numbers_of(planned, "memory"), digest.ranks.accounted
    measured: dict[str, float] = {}
    if len(accounted):
        recent = accounted.rows(int(np.flatnonzero(accounted["generation"] == accounted["generation"][-1])[0]))
        total = np.nansum([recent[name] for name in rank_digest.MEMORY], axis=0)
        fullest = recent[int(np.argmax(total))]
        measured = {name: float(fullest[name]) for name in rank_digest.MEMORY if math.isfinite(fullest[name])}
    rows: list[Json] = []
    for name in ("parameters", "gradients", "optimizer", "activations", "fixed"):
        parts = _ACTIVATIONS if name == "activations" else (name,)
        total_planned = math.fsum(expected.get(part, 0.0) for part in parts) if expected else None
        label = "activations and buffers" if name == "activations" else MEMORY_LABELS[name]
        if total_planned or measured.get(name):
            rows.append(
                {"name": name, "label": label, "planned": total_planned, "measured": measured.get(name), "color": MEMORY[name]}
            )
    return rows


def _colored(name: str, value: float, labels: dict[str, str], colors: dict[str, str]) -> JsonObject:
    return {"name": name, "label": labels.get(name, name), "value": value, "color": colors.get(name, OTHER_COLOR)}


def ranks(run: FollowedRun, window: Window) -> JsonObject:
    """The newest figures of every rank, and the axes that they are drawn along."""
    digest, own = run.digest, run.digest.ranks
    count = min(max(whole(digest.launch, "ranks") or 0, own.count if not digest.launch else 0), _MAX_DRAWN)
    layout = table(digest.launch, "layout")
    sizes = [max(1, whole(layout, axis) or 1) for axis in AXES]
    axes: list[Json] = [{"name": name, "size": size} for name, size in zip(AXES, sizes, strict=True)]
    if math.prod(sizes) != count:
        axes = [{"name": "rank", "size": count}]
    started = last_of_each(own.started["rank"], count)
    failed = np.zeros(count, dtype=np.int64)
    for row in digest.failures:
        if (rank := whole(row, "rank")) is not None and rank < count:
            failed[rank] += 1
    return {
        "ranks": count,
        "axes": axes,
        "metrics": [
            _metric("computing", "s", own.timed, ("compute",), count),
            _metric("waiting for others", "s", own.timed, WAITS, count),
            _metric("step time", "s", own.timed, ("seconds",), count),
            _metric("waiting for data", "s", own.timed, ("loading",), count),
            _metric("memory", "B", own.accounted, rank_digest.MEMORY, count),
            _metric("sent", "B", own.accounted, ("sent",), count),
            {"name": "failures", "unit": "count", "values": numbers(failed)},
        ],
        "hosts": [None if row < 0 else own.names[int(own.started["host"][row])] for row in started],
        "stragglers": [row for row in digest.happenings if row["kind"] == "straggling"][-100:],
        "step": int(own.timed["step"][-1]) if len(own.timed) else None,
        "known": run.ranks_known,
    }


def _metric(name: str, unit: str, columns: Columns, parts: tuple[str, ...], count: int) -> JsonObject:
    """The sum of some columns in the newest row of each rank."""
    newest = last_of_each(columns["rank"], count)
    known_ranks = newest >= 0
    values = np.full(count, np.nan)
    values[known_ranks] = np.nansum([columns[part][newest[known_ranks]] for part in parts], axis=0)
    return {"name": name, "unit": unit, "values": numbers(values)}


def rank_story(run: FollowedRun, rank: int) -> JsonObject:
    """Everything that the records say of one rank."""
    digest, own = run.digest, run.digest.ranks
    layout, place, distance = table(digest.launch, "layout"), {}, 1
    for axis in reversed(AXES):
        size = max(1, whole(layout, axis) or 1)
        place[axis] = rank // distance % size
        distance *= size
    starts: list[Json] = [
        {
            "time": known(float(row["time"])),
            "host": own.names[int(row["host"])],
            "device": own.names[int(row["device"])],
            "pid": int(row["pid"]),
        }
        for row in _rows_of_rank(own.started, rank, 50)
    ]
    timed_rows: list[Json] = [
        {
            "time": known(float(row["time"])),
            "step": int(row["step"]),
            "seconds": known(float(row["seconds"])),
            "parts": {part: float(row[part]) for part in PARTS if row[part]},
        }
        for row in _rows_of_rank(own.timed, rank, 30)
    ]
    accounted: list[Json] = [
        {"step": int(row["step"])}
        | {name: known(float(row[name])) for name in (*rank_digest.MEMORY, "sent", "flops", "repeated")}
        for row in _rows_of_rank(own.accounted, rank, 1)
    ]
    events: list[Json] = [row for row in digest.happenings if row["rank"] == rank]
    failed: list[Json] = [
        {
            "kind": "failure_noticed",
            "time": row["time"],
            "step": row["step"],
            "text": row["message"],
            "severe": True,
            "id": row["id"],
        }
        for row in digest.failures
        if row["rank"] == rank
    ]
    labels: JsonObject = {part: label for part, (label, _) in MEASURED_PARTS.items()}
    return {
        "rank": rank, "place": dict[str, Json](place), "starts": starts, "timed": timed_rows, "accounted": accounted,
        "placed": own.placed(rank), "events": [*events[-100:], *failed[-100:]], "labels": labels, "colors": {part: STEP.get(part, OTHER_COLOR) for part in PARTS},
        "log": run.log_tail(rank),
    }  # fmt: skip


def _rows_of_rank(columns: Columns, rank: int, limit: int) -> list[Array]:
    found = np.flatnonzero(columns["rank"] == rank)[-limit:]
    rows = columns.rows(0)
    return [rows[index] for index in found]


def executed_pipeline(run: FollowedRun, window: Window, step: int | None, copy: int) -> JsonObject:
    """As `pipeline`, and a step as it was executed: the newest that is recorded, or this one. `copy`: which of the pipelines, which have a rank in
    every stage."""
    answer, launch = pipeline(run, window), run.digest.launch
    degree, ranks = whole(table(launch, "layout"), "pipeline") or 1, whole(launch, "ranks") or 0
    copies = ranks // degree
    if degree == 1 or not copies or degree > _MAX_STAGES:
        return answer
    own = [stage * copies + min(copy, copies - 1) for stage in range(degree)]  # pipeline is the outermost axis of a layout
    kinds: JsonObject = {kind: {"label": KINDS[kind], "color": ACTION_COLORS[kind]} for kind in KINDS}
    found: JsonObject = executed(run.timeline, own, step, run.digest.clocks) | {"copies": copies, "copy": min(copy, copies - 1)}
    return answer | {"executed": found, "kinds": kinds}


def pipeline(run: FollowedRun, window: Window) -> JsonObject:
    """One step's actions as the schedule orders them, and the bubble: of the schedule, as planned, as measured."""
    digest = run.digest
    layout, micro_batches = table(digest.launch, "layout"), whole(digest.launch, "accumulation") or 0
    degree, name = whole(layout, "pipeline") or 1, layout.get("schedule")
    split, seconds = numbers_of(table(digest.launch, "promise"), "split"), number(table(digest.launch, "promise"), "seconds")
    own = digest.ranks.timed
    idle = float(np.nanmean(own["bubble"] / own["seconds"])) if len(own) else math.nan
    answer: JsonObject = {
        "pipeline": degree,
        "schedule": name,
        "micro_batches": micro_batches,
        "planned": known(_over(split.get("bubble", 0.0), seconds)),
        "measured": known(idle),
    }
    if degree == 1:
        return answer | {"reason": "This layout has no pipeline: layout.pipeline = 1."}
    if layout.get("schedule_file") is not None or name not in NAMES:
        return answer | {
            "reason": "The run has a schedule of its own (layout.schedule_file): `phalanx schedule FILE` draws it."
        }
    per_rank = whole(layout, "stages") or default_stages(str(name))
    if degree * micro_batches * per_rank * 3 > _MAX_ACTIONS:
        return answer | {
            "reason": f"{degree} ranks × {micro_batches} micro-batches are too many to draw here: `phalanx schedule {name} --png FILE` draws them."
        }
    if problems := problems_for(str(name), degree, micro_batches, per_rank):
        return answer | {"reason": problems[0]}
    timeline = simulate(make(str(name), degree, micro_batches, per_rank))
    rows: list[Json] = [
        [[each.kind, each.stage, each.micro_batch, each.start, each.stop] for each in row] for row in timeline.ranks
    ]
    kinds: JsonObject = {kind: {"label": KINDS[kind], "color": ACTION_COLORS[kind]} for kind in KINDS}
    return answer | {"rows": rows, "stop": timeline.stop, "bubble": bubble(timeline), "kinds": kinds, "idle": ACTION_COLORS["idle"]}  # fmt: skip
