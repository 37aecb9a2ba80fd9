"""What the page shows of one run, as JSON: header, overview, failures, checkpoints, data, samples, experts. `page_server` sends it, frontend/src draws it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch.columns import Array, Columns, curve, numbers
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.record_values import known, number, table, whole
from phalanx.watch.run_digest import Digest

CURVES = ("loss", "tokens_per_second", "mfu", "grad_norm", "learning_rate", "seconds", "memory", "preferred", "reward")
"""Columns of steps that the overview draws."""
_RECENT = 50
"""Steps whose pace the time left is computed from."""
_MARKS = 2000
"""Marks of one kind in a chart."""
_CHECKPOINT = re.compile(r"step-\d{1,12}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of a chart's axis that is asked for, and its width in points."""

    low: float | None = None
    high: float | None = None
    width: int = 600
    pack: bool = False
    """Curves are sent as the page reads them; else as numbers, for everybody."""

    def curve(self, x: Array, columns: Mapping[str, Array]) -> JsonObject:
        """The part of curves that is asked for."""
        return curve(x, columns, self.width, self.low, self.high, pack=self.pack)


def header(run: FollowedRun) -> JsonObject:
    """The lines at the top of every view."""
    digest, launch = run.digest, run.digest.launch
    steps, reason = whole(launch, "steps") or 0, None if digest.ended is None else digest.ended["reason"]
    names = (
        "ranks",
        "device",
        "parameters",
        "adapters",
        "compute",
        "layout",
        "version",
        "micro_batch",
        "accumulation",
        "program",
    )
    left = time_left(digest)
    price = price_rate(digest)
    return {
        "name": run.name,
        "state": run.state,
        "reason": reason or None,
        "step": digest.last_step,
        "steps": steps,
        "elapsed": digest.elapsed,
        "time_left": left,
        "first_time": known(digest.first_time),
        "last_time": known(digest.last_time),
        "price": None if price is None else price * digest.elapsed,
        "price_end": None if price is None or left is None else price * (digest.elapsed + left),
        "launches": digest.kinds["run_started"],
        "failures": digest.kinds["failure_noticed"],
        "progress": run.progress,
        "ranks_known": run.ranks_known,
        "unreadable": run.unreadable,
        "experts": bool(np.isfinite(digest.steps["expert_load"][-1:]).any()),
    } | {name: launch.get(name) for name in names}


def time_left(digest: Digest) -> float | None:
    """Seconds until the last step at the pace of recent ones, with saves and evaluations; None before the first step."""
    times, steps = digest.steps["time"][-_RECENT:], digest.steps["step"][-_RECENT:]
    if not len(steps):
        return None
    remaining = max(0, (whole(digest.launch, "steps") or 0) - digest.last_step)
    span, count = float(times[-1] - times[0]), int(steps[-1] - steps[0])
    each = span / count if count and span > 0 else float(digest.steps["seconds"][-1])
    return known(remaining * each)


def price_rate(digest: Digest) -> float | None:
    """Dollars a second, as the plan assumes them."""
    promise = table(digest.launch, "promise")
    price, days = number(promise, "price"), number(promise, "days")
    return price / (days * 86400) if price > 0 and days > 0 else None


def overview(run: FollowedRun, window: Window) -> JsonObject:
    """Loss, speed and the other curves of the steps that count, and what was skipped, undone or lost."""
    digest = run.digest
    steps = digest.steps
    drawn = {name: steps[name] for name in CURVES if name in ("loss", "seconds") or np.isfinite(steps[name][-500:]).any()}
    recent = slice(-100, None)
    launch_rows = _rows_of_launch(digest)
    figures: JsonObject = {name: known(float(steps[name][-1])) if len(steps) else None for name in CURVES}
    figures |= {
        "step_seconds": _median(steps["seconds"][recent]),
        "recent_tokens_per_second": _median(steps["tokens_per_second"][recent]),
        "tokens": known(float(np.nansum(steps["tokens"]))),
        "peak_memory": known(float(np.nanmax(steps["memory"][launch_rows]))) if len(steps["memory"][launch_rows]) else None,
        "eval_loss": digest.evaluations[-1]["loss"] if digest.evaluations else None,
        "first_loss": known(float(steps["loss"][0])) if len(steps) else None,
        "skipped": len(digest.skipped),
        "steps_lost": digest.steps_lost,
    }
    promise = table(digest.launch, "promise")
    return {
        "figures": figures,
        "curve": window.curve(steps["step"], drawn),
        "evaluations": _marks(digest.evaluations, window, ("step", "loss")),
        "skipped": _marks(digest.skipped, window, ("step", "reason", "loss", "grad_norm")),
        "undone": _undone(digest, window),
        "failures": _marks(list(digest.failures), window, ("step", "id", "cause", "rank")),
        "promise": {name: promise.get(name) for name in ("seconds", "low", "high", "tokens_per_second", "mfu", "total_memory")},
    }


def _rows_of_launch(digest: Digest) -> slice:
    """The steps of the last launch that count."""
    first = whole(digest.launch, "first_step") or 0
    return slice(int(np.searchsorted(digest.steps["step"], first, "left")), None)


def warm_rows(digest: Digest) -> slice:
    """The steps of the last launch, without the two that warm up, if there are others."""
    begin = _rows_of_launch(digest).start
    return slice(begin + 2 if len(digest.steps) > begin + 2 else begin, None)


def _median(values: Array) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _marks(rows: list[JsonObject], window: Window, names: tuple[str, ...]) -> list[Json]:
    """The newest rows whose step is in the window."""
    low, high = -math.inf if window.low is None else window.low, math.inf if window.high is None else window.high
    inside = [row for row in rows if isinstance(step := row["step"], int) and low <= step <= high][-_MARKS:]
    return [{name: row[name] for name in names} for row in inside]


def _undone(digest: Digest, window: Window) -> JsonObject:
    """Steps that were repeated: points, with a gap between two stretches."""
    steps, losses, cuts = (digest.undone[name] for name in ("step", "loss", "cut"))
    low, high = -np.inf if window.low is None else window.low, np.inf if window.high is None else window.high
    inside = np.flatnonzero((steps >= low) & (steps <= high))
    inside = inside[:: max(1, -(-len(inside) // _MARKS))]
    return {"x": numbers(steps[inside]), "y": numbers(losses[inside]), "cut": numbers(cuts[inside]), "count": len(steps)}


def failures(run: FollowedRun, window: Window) -> JsonObject:
    """What broke, what was done about it, and what it cost."""
    digest = run.digest
    time = np.maximum.accumulate(digest.progress["time"]) if len(digest.progress) else digest.progress["time"]
    useful = float(np.nansum(digest.steps["seconds"]))
    # The newest first; stacks only of as many as a person reads, so that a page of thousands stays small.
    rows = [dict(row) for row in reversed(digest.failures)][:1000]
    for row in rows[100:]:
        row["traceback"] = ""
    return {
        "failures": rows,
        "total": digest.kinds["failure_noticed"],
        "recoveries": [row for row in digest.recoveries if not row["failures"]][-200:],
        "happenings": list(digest.happenings)[-500:][::-1],
        "ended": digest.ended,
        "launches": [
            {name: launch.get(name) for name in ("time", "last", "ranks", "step", "version")} for launch in digest.launches
        ][-500:],
        "progress": window.curve(time, {"step": digest.progress["step"]}),
        "figures": {
            "steps_lost": digest.steps_lost,
            "seconds_lost": digest.seconds_lost,
            "recovered": digest.kinds["recovered"],
            "useful": useful / digest.elapsed if digest.elapsed > 0 else None,
            "steps_undone": len(digest.undone),
        },
    }


def checkpoints(run: FollowedRun, window: Window) -> JsonObject:
    """Saves, exports and uploads, copies in host memory, and what is on disk now."""
    digest, copies = run.digest, run.digest.copies
    saved = [row for row in digest.saves if row["kind"] == "saved"]
    return {
        "saves": list(digest.saves)[-500:][::-1],
        "counts": {kind: digest.kinds[kind] for kind in ("saved", "save_failed", "exported", "export_failed", "uploaded", "upload_failed", "checkpoint_damaged", "copied")},
        "curve": {
            "x": [row["step"] for row in saved],
            "y": {name: [row.get(name) for row in saved] for name in ("seconds", "stall", "bytes_per_second")},
        },
        "stall": sum(known(number(row, "stall")) or 0.0 for row in saved),
        "on_disk": _on_disk(run),
        "copies": _copies(copies),
        "copy_curve": _copy_curve(copies, window),
    }  # fmt: skip


def _copies(copies: Columns) -> JsonObject:
    if not len(copies):
        return {"count": 0}
    row = copies.rows(len(copies) - 1)[0]
    stall, skipped = float(np.nansum(copies["stall"])), int(copies["skipped"].sum())
    last: JsonObject = {"step": int(row["step"]), "bytes": known(float(row["bytes"])), "peer": bool(row["peer"])}
    return {"count": len(copies), "stall": stall, "skipped": skipped, "last": last}


def _copy_curve(copies: Columns, window: Window) -> JsonObject:
    steps = np.maximum.accumulate(copies["step"]) if len(copies) else copies["step"]
    return replace(window, low=None, high=None).curve(steps, {name: copies[name] for name in ("seconds", "stall")})


def _on_disk(run: FollowedRun) -> list[Json]:
    """Complete checkpoints in the run directory."""
    folder = run.rundir.checkpoints
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if _CHECKPOINT.fullmatch(entry.name))
    except OSError:
        return []
    return [name for name in names[-500:] if (folder / name / "commit.json").is_file()]


def data(run: FollowedRun, window: Window) -> JsonObject:
    """What the run reads, how far it is, and how well each source is predicted."""
    digest = run.digest
    trained = known(float(np.nansum(digest.steps["tokens"]))) or 0.0
    epoch, parameters = number(digest.data, "tokens"), number(digest.data, "parameters")
    sources: dict[str, dict[str, list[Json]]] = {}
    for row in digest.evaluations[-_MARKS:]:
        for name, values in table(row, "sources").items():
            entry = sources.setdefault(name, {"x": [], "loss": []})
            entry["x"].append(row["step"])
            entry["loss"].append(known(number(values, "loss")) if isinstance(values, dict) else None)
    rewinds = [row for row in digest.happenings if row["kind"] in ("rewound", "settings_changed")]
    return {
        "data": digest.data,
        "tokens": trained,
        "samples": known(float(digest.steps["samples"][-1])) if len(digest.steps) else None,
        "epochs": trained / epoch if epoch > 0 else None,
        "tokens_per_parameter": trained / parameters if parameters > 0 else None,
        "sources": sources,
        "settings": flattened(table(run.run_file(), "data")),
        "changes": rewinds[-100:],
    }


def flattened(settings: JsonObject, prefix: str = "") -> JsonObject:
    """Keys of a run file such as "data.source", with their values as text."""
    flat: JsonObject = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            shown = str(value) if not isinstance(value, bool) else str(value).lower()
            flat[f"{prefix}{key}"] = shown if len(shown) <= 400 else f"{shown[:399]}…"
    return flat


def samples(run: FollowedRun, window: Window) -> JsonObject:
    """Texts that the model wrote, the newest first."""
    return {"samples": list(run.digest.samples)[::-1], "total": run.digest.kinds["sampled"]}


def experts(run: FollowedRun, window: Window) -> JsonObject:
    """The load of the fullest expert over the steps, and of every layer."""
    steps = run.digest.steps
    load = window.curve(steps["step"], {"expert_load": steps["expert_load"]})
    return {"curve": load, "layers": run.digest.experts.heat(window.low, window.high)}


def expert_layer(run: FollowedRun, layer: int, window: Window) -> JsonObject:
    """The load of every expert of a layer."""
    return {"layer": layer} | run.digest.experts.layer(layer, window.low, window.high)


View = Callable[[FollowedRun, Window], JsonObject]
