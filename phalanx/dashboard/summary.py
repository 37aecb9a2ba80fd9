"""Summarizes a run directory from its events alone: the closing panel, the same numbers as JSON, and the history of its steps.

The CLI shows the summary when a run ends, and prints it as JSON on request. `dashboard/pictures` draws the history as a loss curve.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from phalanx.dashboard.numbers import count, duration, number, percent, short_duration, size
from phalanx.events import records
from phalanx.events.records import Evaluated, Event, RunStarted, Step, StepSkipped
from phalanx.spec.plan import Promise

LOSS_CURVE = "loss.png"
"""File name of the loss curve in a run directory."""
_PROMISED = {
    "step_seconds": "seconds", "low": "low", "high": "high", "tokens_per_second": "tokens_per_second", "memory": "total_memory",
}  # fmt: skip
"""Numbers of a promise in the JSON of a summary, and their names in the promise."""


@dataclass(slots=True)
class History:
    """The steps and evaluations of a run directory that count, by step. Steps that a rollback repeated count once."""

    steps: dict[int, Step] = field(default_factory=dict)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    skipped: list[StepSkipped] = field(default_factory=list)
    launch: list[Step] = field(default_factory=list)
    """Steps of the last launch, in the order in which it took them."""


def history(events: Iterable[Event]) -> History:
    """Replays the events of a run directory, which may hold several launches."""
    result, first_step = History(), True
    for event in events:
        if isinstance(event, RunStarted):
            result.launch, first_step = [], True
        elif isinstance(event, records.Restored):
            _drop_from(result, event.step + 1)
        elif isinstance(event, Step | StepSkipped):
            if first_step or event.step in result.steps:
                # A launch or a recovery without a checkpoint writes no `restored` event: its first step tells where it starts.
                _drop_from(result, event.step)
                first_step = False
            if isinstance(event, StepSkipped):
                result.skipped.append(event)
            else:
                result.steps[event.step] = event
                result.launch.append(event)
        elif isinstance(event, Evaluated):
            result.evaluations[event.step] = event
    return result


def _drop_from(history: History, step: int) -> None:
    history.steps = {number: event for number, event in history.steps.items() if number < step}
    history.evaluations = {number: event for number, event in history.evaluations.items() if number < step}
    history.skipped = [event for event in history.skipped if event.step < step]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The state that a run directory has reached, and the speed of its last launch."""

    steps: int
    """The last step reached."""
    planned: int
    """Steps of the whole run."""
    loss: float | None
    """Loss of the last step."""
    first_loss: float | None
    eval_loss: float | None
    """Loss of the last evaluation; None if there was none."""
    eval_sources: dict[str, dict[str, float]]
    """The same evaluation for each data source: loss, perplexity and tokens."""
    expert_load: float | None
    """Load of the fullest expert over the mean, in the worst layer, averaged over the last steps; None for dense models."""
    tokens: int
    """Target tokens of all steps that count; a step that was repeated counts once."""
    tokens_per_second: float | None
    """Median over the steps of the last launch, without its first step, which warms up."""
    mfu: float | None
    """Median over the same steps; None if the device's peak is unknown."""
    steps_skipped: int
    recoveries: int
    """Recoveries from failures during the last launch."""
    steps_lost: int
    """Complete steps that these recoveries repeated."""
    seconds_lost: float
    """Sum of the times from each failure to the first step after it."""
    step_seconds: float | None
    """Median seconds of a step in the last launch."""
    promise: Promise | None
    """What the plan promised; None if it made no promise."""
    memory: int | None
    """Largest memory of any rank and step of the last launch, in bytes: peak device memory on GPUs, resident memory on CPUs."""
    seconds: float
    """Wall time of the last launch."""
    ranks: int
    parameters: int
    checkpoint: str | None
    """The newest checkpoint, as its event names it."""
    finished: bool
    """Whether all steps are done."""
    failure: str | None
    """Why the last launch failed; None if it did not."""

    def to_json(self, run_dir: Path | str) -> dict[str, Any]:
        """Returns the summary for programs. Numbers that JSON lacks become strings, as in events.jsonl."""
        table = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "promise"}
        promised = {f"promised_{name}": getattr(self.promise, key, None) for name, key in _PROMISED.items()}
        return {key: records.plain(value) for key, value in (table | promised).items()} | {"run_dir": str(run_dir)}

    def render(self, console: Console, run_dir: Path | str) -> None:
        """Prints the closing panel: result, speed, and where the files are."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows(Path(run_dir)):
            table.add_row(name, Text(value))
        title, style = self._title()
        console.print(Panel(table, title=Text(title, style=f"bold {style}"), title_align="left", border_style=style))

    def _title(self) -> tuple[str, str]:
        if self.finished:
            return f"finished {self.steps} steps", "green"
        how, style = ("failed", "red") if self.failure is not None else ("stopped", "yellow")
        return f"{how} after step {self.steps} of {self.planned}", style

    def _rows(self, run_dir: Path) -> Iterable[tuple[str, str]]:
        if self.failure is not None:
            yield "reason", self.failure
        if self.loss is not None:
            held_out = f", held-out {number(self.eval_loss)}" if self.eval_loss is not None else ""
            yield "loss", f"{number(self.first_loss)} → {number(self.loss)}{held_out}"
            if len(self.eval_sources) > 1:
                yield "held-out", ", ".join(f"{name} {number(values['loss'])}" for name, values in self.eval_sources.items())
            skipped = f", {self.steps_skipped} skipped" if self.steps_skipped else ""
            yield "trained", f"{count(self.parameters)} parameters on {count(self.tokens)} tokens{skipped}"
        if self.recoveries:
            times = f"{self.recoveries} time{'s' if self.recoveries > 1 else ''}"
            yield "recovered", f"{times}, {self.steps_lost} steps and {duration(self.seconds_lost)} lost"
        if self.expert_load is not None:
            yield "experts", f"the fullest takes {number(self.expert_load, 2)} × the mean load"
        if self.tokens_per_second is not None:
            mfu = f", MFU {percent(self.mfu)}" if self.mfu is not None else ""
            ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
            yield "speed", f"{count(self.tokens_per_second)} tokens/s on {ranks}{mfu}, {duration(self.seconds)}"
        if self.step_seconds is not None and (promise := self.promise) is not None:
            between = f"{short_duration(promise.low)} to {short_duration(promise.high)}"
            speed = f"{count(promise.tokens_per_second)} tokens/s"
            yield (
                "a step",
                f"{short_duration(self.step_seconds)}, promised {short_duration(promise.seconds)} ({between}), {speed}",
            )
        if self.memory is not None and self.promise is not None:
            yield "memory", f"{size(self.memory)}, promised {size(self.promise.total_memory)}"
        yield "events", str(run_dir / "events.jsonl")
        if (run_dir / LOSS_CURVE).exists():
            yield "curve", str(run_dir / LOSS_CURVE)
        if self.checkpoint is not None:
            yield "checkpoint", self.checkpoint
            yield "generate", f"phalanx generate {shlex.quote(str(run_dir))}"


def summarize(events: Iterable[Event]) -> Summary:
    """Computes the summary from all events of a run directory, in order."""
    events = list(events)
    known = history(events)
    begin = max((index for index, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    launch = events[begin:]
    started = next((event for event in launch if isinstance(event, RunStarted)), None)
    ends = [event for event in launch if isinstance(event, records.Finished | records.Stopped)]
    failures = [event.reason for event in launch if isinstance(event, records.WorkerFailed)]
    recoveries = [event for event in launch if isinstance(event, records.Recovered) and event.failures]
    saved = [event.path for event in events if isinstance(event, records.Saved)]
    steps = [known.steps[step] for step in sorted(known.steps)]
    last_evaluation = known.evaluations[max(known.evaluations)] if known.evaluations else None
    reached = [*known.steps, *(event.step for event in ends), *(event.step for event in known.skipped)]
    return Summary(
        recoveries=len(recoveries),
        steps_lost=sum(event.steps_lost for event in recoveries),
        seconds_lost=sum(event.seconds for event in recoveries),
        steps=max(reached, default=0),
        planned=started.steps if started else 0,
        loss=steps[-1].loss if steps else None,
        first_loss=steps[0].loss if steps else None,
        eval_loss=last_evaluation.loss if last_evaluation else None,
        eval_sources=last_evaluation.sources if last_evaluation else {},
        expert_load=steps[-1].expert_load if steps else None,
        tokens=sum(step.tokens for step in steps),
        tokens_per_second=_warm_median([step.tokens_per_second for step in known.launch]),
        mfu=_warm_median([step.mfu for step in known.launch]),
        steps_skipped=len(known.skipped),
        step_seconds=_warm_median([step.seconds for step in known.launch]),
        promise=started.promise if started else None,
        memory=max((step.memory for step in known.launch), default=None),
        seconds=launch[-1].time - launch[0].time if launch else 0.0,
        ranks=started.ranks if started else 0,
        parameters=started.parameters if started else 0,
        checkpoint=saved[-1] if saved else None,
        finished=any(isinstance(event, records.Finished) for event in ends),
        failure=failures[0] if failures else None,
    )


def _warm_median(values: Sequence[float | None]) -> float | None:
    """Median without the first value, or of the only one; None if no value is known."""
    known = [value for value in (values[1:] or values) if isinstance(value, int | float) and math.isfinite(value)]
    return median(known) if known else None
