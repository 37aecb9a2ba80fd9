"""The files that `phalanx tune` writes: every measurement as CSV, the run file with the chosen keys, and the report as JSON; and its result in
a sentence."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path

from phalanx.events.rundir import replace_file
from phalanx.planning.report import layout_keys
from phalanx.spec.json_value import Json, JsonObject
from phalanx.spec.layout import Layout
from phalanx.tuning.duel import Measurement
from phalanx.tuning.paired_ratio import Ratio
from phalanx.tuning.trial_run import Changes, Side, Value
from phalanx.tuning.tune import Learned, typical_seconds
from phalanx.tuning.tuner import Trial, TuneResult

_AS_MEASURED = "tune: as in the trials"


def new_folder(name: str, parent: Path = Path("tune")) -> Path:
    """tune/NAME, numbered if it exists; made."""
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("the numbers do not end")


def write_measurements(path: Path, result: TuneResult) -> None:
    """Every turn, one line each."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in fields(Measurement)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(row), "seconds": f"{row.seconds:.9f}"} for row in result.measurements)
    replace_file(path, text.getvalue())


def tuned_text(text: str, result: TuneResult, replan: Callable[[str], Side] | None) -> str:
    """The run file with the chosen keys. `replan`: the side that `phalanx train` would run with a text; where its plan chooses other values
    than the trials had, those are written too. None: it is not planned again."""
    from phalanx.spec.edit_file import with_commented  # imports tomlkit, which only a changed file needs

    best = result.best
    values = dict(best.changes)
    comments = {key: f"tune: {_brought(result, key):.1%} less time a step" for key in values}
    tuned = with_commented(text, _tables(values), comments)
    if replan is not None and (missing := _differences(replan(tuned), best, values)):
        tuned = with_commented(tuned, _tables(missing), dict.fromkeys(missing, _AS_MEASURED))
    return tuned


def _brought(result: TuneResult, key: str) -> float:
    """Part of a step's time that the changes of a key saved, one after the other."""
    return 1 - math.prod(trial.ratio.median for trial in result.kept if key in trial.changes and trial.ratio is not None)


def _differences(planned: Side, best: Side, chosen: Changes) -> Changes:
    """Values of the trials that a new plan would choose differently."""
    found: dict[str, Value] = {}
    if planned.plan.layout != best.plan.layout:
        found["layout"] = best.plan.layout
    if planned.plan.micro_batch != best.plan.micro_batch:
        found["train.micro_batch"] = best.plan.micro_batch
    if planned.plan.device == "cpu" and planned.plan.threads != best.plan.threads:
        found["cluster.threads"] = best.plan.threads
    for item in fields(best.run.memory):
        value = getattr(best.run.memory, item.name)
        if value is not None and value != getattr(planned.run.memory, item.name):
            found[f"memory.{item.name}"] = value
    return {key: value for key, value in found.items() if key not in chosen}


def _tables(values: Changes) -> dict[str, dict[str, Json]]:
    """Values by table and key, as the run file has them."""
    tables: dict[str, dict[str, Json]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        if isinstance(value, Layout):
            tables[table] = layout_keys(value)
        else:
            tables.setdefault(table, {})[name] = value
    return tables


def sentence(result: TuneResult) -> str:
    """The result for people."""
    if result.changed and result.confirmation is not None:
        ratio = result.confirmation.ratio
        what = f"The tuned settings take {1 - ratio.median:.1%} less time a step than the defaults"
        range_ = f"side by side, {1 - ratio.high:.1%} to {1 - ratio.low:.1%} less"
        more = f" Not confirmed, and given up: {result.unconfirmed}." if result.unconfirmed else ""
        return f"{what} ({range_}), with the same losses.{more}"
    if result.changed:
        return "Interrupted before the confirmation: the settings that were kept so far are written, each was faster twice."
    measured = [trial for trial in result.trials if trial.ratio is not None]
    if result.unconfirmed is not None:
        return f"The defaults are best: {result.unconfirmed}."
    of_all = f"of {len(measured)} candidate{'s' if len(measured) > 1 else ''}, none was faster beyond noise"
    if result.interrupted:
        return f"Interrupted: {of_all} so far." if measured else "Interrupted before a candidate was measured."
    if not measured:
        return "Nothing was measured: see the reasons above."
    return f"The defaults are best: {of_all}."


def learned_sentence(learned: Learned) -> str:
    """What the plan has learned, for people."""
    if learned.reason is not None:
        return f"Plans on this machine have not learned from it: {learned.reason}."
    assert learned.measured is not None and learned.before is not None and learned.after is not None
    before, after, measured = (f"{1000 * value:.4g} ms" for value in (learned.before, learned.after, learned.measured))
    return f"Plans on this machine now promise {after} a step instead of {before}; measured were {measured} ({learned.file})."


def report(result: TuneResult, learned: Learned) -> JsonObject:
    """For programs."""
    confirmation = result.confirmation
    return {
        "changed": result.changed,
        "keys": {key: _value(value) for key, value in result.best.changes.items()},
        "confirmation": None if confirmation is None else {**_ratio(confirmation.ratio), "faster": confirmation.faster},
        "unconfirmed": result.unconfirmed,
        "interrupted": result.interrupted,
        "seconds": result.seconds,
        "defaults_step_seconds": typical_seconds(result, result.defaults.name),
        "best_step_seconds": typical_seconds(result, result.best.name),
        "trials": [_trial(trial) for trial in result.trials],
        "learned": asdict(learned),
        "sentence": sentence(result),
    }


def _trial(trial: Trial) -> JsonObject:
    return {
        "number": trial.number,
        "key": trial.key,
        "name": trial.name,
        "changes": {key: _value(value) for key, value in trial.changes.items()},
        "outcome": trial.outcome,
        "reason": trial.reason,
        "ratio": None if trial.ratio is None else _ratio(trial.ratio),
        "seconds": trial.seconds,
    }


def _ratio(ratio: Ratio) -> JsonObject:
    high = ratio.high if ratio.high < float("inf") else None
    return {"median": ratio.median, "low": ratio.low, "high": high, "pairs": ratio.pairs}


def _value(value: Value) -> Json:
    return layout_keys(value) if isinstance(value, Layout) else value


def write_report(path: Path, result: TuneResult, learned: Learned) -> None:
    replace_file(path, json.dumps(report(result, learned), indent=2) + "\n")
