"""Several runs over each other, as JSON: curves of one figure, and the keys in which their run files differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch.columns import Array
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.record_values import known
from phalanx.watch.run_views import CURVES, Window, flattened, header

AXES = ("step", "tokens", "time")
MAX_RUNS = 8
_OWN_KEYS = ("watch.",)
"""Tables that say nothing about the training."""


def compare(runs: Sequence[FollowedRun], figure: str, axis: str, window: Window) -> JsonObject:
    """`figure`: a column of steps. `axis`: steps, trained tokens, or seconds of training."""
    figure, axis = figure if figure in CURVES else "loss", axis if axis in AXES else "step"
    rows, settings = [], [flattened(run.run_file()) for run in runs]
    for run in runs:
        with run.lock:
            steps = run.digest.steps
            evaluations = run.digest.evaluations[-2000:]
            x = _axis(run, axis)
            held_out: list[Json] = []
            if figure == "loss" and len(x):
                where = np.searchsorted(steps["step"], [int(str(row["step"])) for row in evaluations], "right") - 1
                held_out = [
                    [known(float(x[max(0, at)])), row["loss"]] for at, row in zip(where.tolist(), evaluations, strict=True)
                ]
            rows.append({
                "header": header(run), "evaluations": held_out, "curve": window.curve(x, {figure: steps[figure]}),
                "eval_loss": evaluations[-1]["loss"] if evaluations else None,
                "loss": known(float(steps["loss"][-1])) if len(steps) else None,
                "tokens_per_second": known(float(np.nanmedian(steps["tokens_per_second"][2:]))) if len(steps) > 3 else None,
                "tokens": known(float(np.nansum(steps["tokens"]))),
            })  # fmt: skip
    return {"runs": rows, "differences": differences(settings), "figure": figure, "axis": axis}


def _axis(run: FollowedRun, axis: str) -> Array:
    steps = run.digest.steps
    if axis == "step":
        return steps["step"]
    column = steps["tokens" if axis == "tokens" else "seconds"]
    total: Array = np.cumsum(np.where(np.isfinite(column) & (column > 0), column, 0.0))
    return total


def differences(settings: Sequence[JsonObject]) -> list[Json]:
    """Keys whose values differ, with the value in each run; None: not set."""
    keys = sorted({key for each in settings for key in each if not key.startswith(_OWN_KEYS)})
    rows: list[Json] = []
    for key in keys:
        values = [each.get(key) for each in settings]
        if any(value != values[0] for value in values):
            rows.append({"key": key, "values": values})
    return rows
