"""A document about one run, as values: figures, curves, tables, texts. The figures are those of the page, from the same views. `report_files` writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from phalanx.dashboard.numbers import UNKNOWN, count, dollars, duration, percent, short_duration, size, visible
from phalanx.dashboard.numbers import number as figure
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch import plan_views, run_views
from phalanx.watch.columns import Array, bucket_starts, numbers, reduced
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.record_values import known, number, table, whole
from phalanx.watch.run_views import Window

_POINTS = 800
"""Of a curve; more would not be seen on a page."""
_ROWS = 100
"""Of a table of failures or saves: the newest."""
_TEXTS = 5
"""Samples: the newest."""
_TEXT = 2000
"""Characters of a sample or a stack."""
UNITS: dict[str, Callable[[float | None], str]] = {
    "s": short_duration,
    "count": count,
    "fraction": percent,
    "B": size,
    "$": dollars,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve of a picture. With `low` and `high`, each point stands for several steps, between these values."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False
    """Points, not a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Curves over the steps."""

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    """How values are written: a key of `UNITS`, or nothing for plain numbers."""
    marks: tuple[float, ...] = ()
    """Steps at which a failure was noticed."""
    band: tuple[float, float] | None = None
    """P10 and P90 of the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and what is below it."""

    title: str
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    code: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    title: str
    subtitle: str
    figures: tuple[tuple[str, str, str], ...]
    """Name, value, and what it is compared with."""
    sections: tuple[Section, ...]


def report_of(run: FollowedRun, run_file: str) -> Report:
    """The report of a run whose events are read. `run_file`: its text. Raises RunError if nothing has happened in it."""
    if not run.digest.launches:
        raise RunError(f"{run.rundir.path} has no events: nothing has been started there, so there is nothing to report.")
    sections = (_curves(run), _promise(run), _failures(run), _checkpoints(run), _data(run), _samples(run))
    last = Section(title="Run file", code=(run_file,) if run_file else (), notes=() if run_file else ("It cannot be read.",))
    head = run_views.header(run)
    return Report(
        title=run.name,
        subtitle=_subtitle(head),
        figures=figures(run, head),
        sections=(*(section for section in sections if section is not None), last),
    )


def _subtitle(head: JsonObject) -> str:
    layout = table(head, "layout")
    degrees = [f"{name} {value}" for name, value in layout.items() if isinstance(value, int) and value > 1 and name != "zero"]
    words = [
        f"{head['state']}, step {head['step']:,} of {head['steps']:,}",
        f"{count(number(head, 'parameters'))} parameters",
        f"{head['ranks']} {head['device']} ranks",
        " × ".join(degrees),
        str(head["compute"] or ""),
        f"phalanx {head['version']}",
        f"{_clock(number(head, 'first_time'))} to {_clock(number(head, 'last_time'))}",
    ]
    return " · ".join(word for word in words if word)


def figures(run: FollowedRun, head: JsonObject) -> tuple[tuple[str, str, str], ...]:
    """Name, value, and what it is compared with, of all that is known. `head`: as `run_views.header` returns it."""
    views = run_views.overview(run, Window())
    found, promise = table(views, "figures"), table(views, "promise")

    def promised(name: str, unit: Callable[[float | None], str]) -> str:
        return "" if promise.get(name) is None else f"promised {unit(known(number(promise, name)))}"

    def value(name: str) -> float | None:
        return known(number(found, name))

    steps_lost = f"{count(value('steps_lost'))} steps repeated, {count(value('skipped'))} skipped"
    rows = [
        ("loss", figure(value("loss")), f"from {figure(value('first_loss'))}"),
        ("held-out loss", figure(value("eval_loss")), ""),
        ("tokens", count(value("tokens")), ""),
        (
            "tokens/s",
            count(value("recent_tokens_per_second")),
            promised("tokens_per_second", count) or "median of the last 100 steps",
        ),
        ("MFU", percent(value("mfu")), promised("mfu", percent)),
        ("step time", short_duration(value("step_seconds")), promised("seconds", short_duration)),
        ("memory", size(value("peak_memory")), promised("total_memory", size)),
        ("duration", duration(known(number(head, "elapsed"))), _plural(whole(head, "launches") or 0, "launch", "launches")),
        ("price", dollars(known(number(head, "price"))), ""),
        ("failures", str(head["failures"]), steps_lost),
    ]
    return tuple(row for row in rows if row[1] != UNKNOWN)


def _curves(run: FollowedRun) -> Section | None:
    digest, steps = run.digest, run.digest.steps
    if not len(steps):
        return None
    marks = tuple(number(row, "step") for row in digest.failures if row["step"] is not None)
    planned = table(digest.launch, "promise")
    low, high = number(planned, "low"), number(planned, "high")
    x = steps["step"]
    held_out = Line(
        name="held-out loss",
        x=[number(row, "step") for row in digest.evaluations],
        y=[number(row, "loss") for row in digest.evaluations],
        dots=True,
    )
    undone = Line(name="undone steps", x=_floats(digest.undone["step"]), y=_floats(digest.undone["loss"]), dots=True)
    losses = tuple(line for line in (held_out, undone) if len(line.x))
    pictures = [Picture(title="loss", lines=(_line("loss", x, steps["loss"]), *losses), marks=marks)]
    for title, name, unit in (
        ("tokens/s", "tokens_per_second", "count"),
        ("step time", "seconds", "s"),
        ("MFU", "mfu", "fraction"),
        ("gradient norm", "grad_norm", ""),
        ("learning rate", "learning_rate", ""),
        ("memory of the fullest rank", "memory", "B"),
        ("load of the fullest expert", "expert_load", ""),
    ):
        if np.isfinite(steps[name]).any():
            band = (low, high) if name == "seconds" and low > 0 else None
            pictures.append(Picture(title=title, lines=(_line(title, x, steps[name]),), unit=unit, marks=marks, band=band))
    return Section(title="Curves", pictures=tuple(pictures))


def _line(name: str, x: Array, y: Array) -> Line:
    if len(x) <= _POINTS:
        return Line(name=name, x=_floats(x), y=_floats(y))
    starts = bucket_starts(len(x), _POINTS)
    low, mean, high = reduced(y, starts)
    return Line(name=name, x=_floats(x[starts]), y=_floats(mean), low=_floats(low), high=_floats(high))


def _floats(values: Array) -> list[float]:
    return [np.nan if value is None else value for value in numbers(values)]


def _promise(run: FollowedRun) -> Section | None:
    view = plan_views.promise(run, Window())
    if not view["promised"]:
        return None
    rows = []
    for row in _rows(view, "rows"):
        shown = UNITS[str(row["unit"])]
        values = [
            shown(known(number(row, name))) for name in ("planned", "low", "high", "measured", "measured_low", "measured_high")
        ]
        note = "at the present pace" if row.get("projected") else ""
        rows.append((str(row["name"]), values[0], _interval(*values[1:3]), values[3], _interval(*values[4:6]), note))
    for kind, unit in (("parts", short_duration), ("memory", size)):
        for row in _rows(view, kind):
            planned, measured = (unit(known(number(row, name))) for name in ("planned", "measured"))
            rows.append((f"{'of a step: ' if kind == 'parts' else 'of memory: '}{row['label']}", planned, "", measured, "", ""))
    heads = ("", "promised", "P10 to P90", "measured", "P10 to P90", "")
    return Section(title="Promise", table=Table(heads=heads, rows=tuple(rows)))


def _interval(low: str, high: str) -> str:
    return "" if UNKNOWN in (low, high) else f"{low} to {high}"


def _failures(run: FollowedRun) -> Section | None:
    view = run_views.failures(run, Window())
    found, happened = _rows(view, "failures"), _rows(view, "happenings")
    if not found and not happened:
        return None
    rows: list[tuple[str, ...]] = []
    stacks: list[str] = []
    for row in found[:_ROWS]:
        recovery = table(row, "recovery") if row["recovery"] else {}
        done = f"{recovery['action']} from {recovery['source']}" if recovery else "not recovered"
        lost = (
            f"{duration(known(number(recovery, 'seconds')))}, {whole(recovery, 'steps_lost') or 0} steps lost"
            if recovery
            else ""
        )
        where = "" if row["rank"] is None else f"rank {row['rank']}"
        rows.append((_clock(number(row, "time")), _step(row), where, f"{row['cause']}: {row['message']}", done, lost))
        if row["traceback"] and len(stacks) < _TEXTS:
            stacks.append(f"{where or 'a node'} at step {_step(row)}\n{str(row['traceback'])[-_TEXT:]}")
    figures = table(view, "figures")
    useful = f"{percent(known(number(figures, 'useful')))} of the time went into steps that count."
    failed, recovered = whole(view, "total") or 0, whole(figures, "recovered") or 0
    counts = f"{_plural(failed, 'failure', 'failures')}, {_plural(recovered, 'recovery', 'recoveries')}"
    notes = [f"{counts}, {duration(known(number(figures, 'seconds_lost')))} lost. {useful}"]
    notes += [f"The newest {_ROWS} are listed."] if len(found) > _ROWS else []
    notes += [f"{_clock(number(row, 'time'))} {row['text']}" for row in reversed(happened[:_ROWS])]
    heads = ("time", "step", "where", "failure", "recovery", "cost")
    listed = Table(heads=heads, rows=tuple(reversed(rows))) if rows else None
    return Section(title="Failures and notices", notes=tuple(notes), table=listed, code=tuple(reversed(stacks)))


def _checkpoints(run: FollowedRun) -> Section | None:
    view = run_views.checkpoints(run, Window())
    saves, copies = _rows(view, "saves"), table(view, "copies")
    if not saves and not copies.get("count"):
        return None
    rows = []
    for row in reversed(saves[:_ROWS]):
        values = (
            size(known(number(row, "bytes"))),
            short_duration(known(number(row, "seconds"))),
            short_duration(known(number(row, "stall"))),
        )
        where = str(row.get("path") or row.get("url") or "")
        rows.append(
            (
                _clock(number(row, "time")),
                _step(row),
                str(row["kind"]).replace("_", " "),
                *values,
                str(row.get("reason") or where),
            )
        )
    notes = [f"Training was blocked by saves for {short_duration(known(number(view, 'stall')))}."]
    if copies.get("count"):
        notes.append(
            f"{copies['count']} copies in host memory, which blocked it for {short_duration(known(number(copies, 'stall')))}."
        )
    heads = ("time", "step", "", "size", "seconds", "blocked", "")
    return Section(title="Checkpoints", notes=tuple(notes), table=Table(heads=heads, rows=tuple(rows)) if rows else None)


def _data(run: FollowedRun) -> Section | None:
    view = run_views.data(run, Window())
    data = table(view, "data")
    if not data:
        return None
    share = f"{figure(known(number(view, 'epochs')), 2)} epochs, {figure(known(number(view, 'tokens_per_parameter')), 2)} tokens per parameter"
    words = f"{count(number(data, 'documents'))} documents with {count(number(data, 'tokens'))} training tokens; trained on {count(number(view, 'tokens'))}: {share}."
    rows = tuple((key, str(value)) for key, value in table(view, "settings").items())
    return Section(title="Data", notes=(words,), table=Table(heads=("data", ""), rows=rows) if rows else None)


def _samples(run: FollowedRun) -> Section | None:
    found = _rows(run_views.samples(run, Window()), "samples")[:_TEXTS]
    texts = tuple(
        f"step {_step(row)}: {visible(str(row['prompt']))}{visible(str(row['text'])[:_TEXT])}" for row in reversed(found)
    )
    return Section(title="Samples", code=texts) if texts else None


def _rows(view: JsonObject, name: str) -> list[JsonObject]:
    rows = view[name]
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _plural(value: int, one: str, many: str) -> str:
    return f"{value:,} {one if value == 1 else many}"


def _step(row: JsonObject) -> str:
    step: Json = row["step"]
    return "" if not isinstance(step, int) else f"{step:,}"


def _clock(seconds: float) -> str:
    if not np.isfinite(seconds) or not 0 <= seconds < 1e11:
        return UNKNOWN
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
