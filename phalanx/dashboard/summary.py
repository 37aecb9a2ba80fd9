"""Summarizes a run directory from its events alone: the panel that the CLI shows when a run ends, the same numbers as JSON, and the history
of its steps, which `dashboard/pictures` draws."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from phalanx.dashboard.numbers import count, data_share, duration, number, percent, short_duration, size
from phalanx.dashboard.progress import changes_text
from phalanx.events import records
from phalanx.events.records import Evaluated, Event, RunStarted, Step, StepSkipped
from phalanx.spec.json_value import Json

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


class Summary:
    """The state that a run directory has reached, and the speed of its last launch, from all of its events."""

    def __init__(self, events: Iterable[Event]):
        events = list(events)
        known = history(events)
        steps = [known.steps[step] for step in sorted(known.steps)]
        evaluated = known.evaluations[max(known.evaluations)] if known.evaluations else None
        saved = [event.path for event in events if isinstance(event, records.Saved)]
        begin = max((index for index, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
        ended = [event.step for event in events[begin:] if isinstance(event, records.Finished | records.Stopped)]
        self.loss = steps[-1].loss if steps else None
        """Loss of the last step."""
        self.first_loss = steps[0].loss if steps else None
        self.eval_loss = evaluated.loss if evaluated else None
        """Loss of the last evaluation; None if there was none."""
        self.eval_sources = evaluated.sources if evaluated else {}
        """The same evaluation for each data source: loss, perplexity and tokens."""
        self.expert_load = steps[-1].expert_load if steps else None
        """Load of the fullest expert over the mean, in the worst layer, averaged over the last steps; None for dense models."""
        self.tokens = sum(step.tokens for step in steps)
        """Target tokens of all steps that count; a step that was repeated counts once."""
        self.steps_skipped = len(known.skipped)
        self.checkpoint = saved[-1] if saved else None
        """The newest checkpoint, as its event names it."""
        self._changes = [event for event in events if isinstance(event, records.SettingsChanged)]
        self.settings_changed: list[Json] = [{"step": event.step, "changes": event.changes} for event in self._changes]
        """Where launches continued with other settings: the step, and [old, new] by key."""
        self._add_launch(events[begin:], known.launch)
        self.steps = max([*known.steps, *ended, *(event.step for event in known.skipped)], default=0)
        """The last step reached."""

    def _add_launch(self, launch: Sequence[Event], steps: Sequence[Step]) -> None:
        """Adds what is known of the last launch."""
        started = next((event for event in launch if isinstance(event, RunStarted)), None)
        opened = next((event for event in launch if isinstance(event, records.DataOpened)), None)
        failures = [event.reason for event in launch if isinstance(event, records.WorkerFailed)]
        recoveries = [event for event in launch if isinstance(event, records.Recovered) and event.failures]
        self.planned = started.steps if started else 0
        """Steps of the whole run."""
        self.ranks = started.ranks if started else 0
        self.parameters = started.parameters if started else 0
        self.adapters = started.adapters if started else None
        self.documents = opened.documents if opened else None
        """Documents of the data; None if the launch did not report it."""
        self.data_tokens = opened.tokens if opened else None
        """Training tokens in one epoch of the data."""
        self.epochs = self.tokens / opened.tokens if opened and opened.tokens else None
        """Trained tokens divided by those of an epoch."""
        self.tokens_per_parameter = self.tokens / self.parameters if self.parameters else None
        self._saves = started.saves if started else True
        self.promise = started.promise if started else None
        """What the plan promised; None if it made no promise."""
        self.tokens_per_second = _warm_median([step.tokens_per_second for step in steps])
        """Median over the steps, without the first one, which warms up."""
        self.step_seconds = _warm_median([step.seconds for step in steps])
        self.mfu = _warm_median([step.mfu for step in steps])
        """None if the device's peak is unknown."""
        self.memory = max((step.memory for step in steps), default=None)
        """Largest memory of any rank and step, in bytes: peak device memory on GPUs, resident memory on CPUs."""
        self.recoveries = len(recoveries)
        """Recoveries from failures."""
        self.steps_lost = sum(event.steps_lost for event in recoveries)
        """Complete steps that these recoveries repeated."""
        self.seconds_lost = sum(event.seconds for event in recoveries)
        """Sum of the times from each failure to the first step after it."""
        self.seconds = launch[-1].time - launch[0].time if launch else 0.0
        """Wall time."""
        self.finished = any(isinstance(event, records.Finished) for event in launch)
        """Whether all steps are done."""
        self.failure = failures[0] if failures else None
        """Why the launch failed; None if it did not."""

    def to_json(self, run_dir: Path | str) -> dict[str, Any]:
        """Returns the summary for programs. Numbers that JSON lacks become strings, as in events.jsonl."""
        table = {name: value for name, value in vars(self).items() if name != "promise" and not name.startswith("_")}
        promised = {f"promised_{name}": getattr(self.promise, key, None) for name, key in _PROMISED.items()}
        return {key: records.plain(value) for key, value in (table | promised).items()} | {"run_dir": str(run_dir)}

    def render(self, console: Console, run_dir: Path | str) -> None:
        """Prints the closing panel: result, speed, and where the files are."""
        table = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
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
            of = "" if self.adapters is None else f"{count(self.adapters)} parameters of LoRA adapters of a model of "
            yield "trained", f"{of}{count(self.parameters)} parameters on {count(self.tokens)} tokens{skipped}"
        if self.documents is not None and self.data_tokens:
            share = data_share(self.tokens, self.data_tokens, self.parameters)
            yield "data", f"{self.documents:,} documents, {count(self.data_tokens)} tokens: {share}"
        for event in self._changes:
            yield "changed", f"after step {event.step}: {changes_text(event)}"
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
        elif not self._saves:
            yield "checkpoint", "none: checkpoint.save = false"


def _warm_median(values: Sequence[float | None]) -> float | None:
    """Median without the first value, or of the only one; None if no value is known."""
    known = [value for value in (values[1:] or values) if isinstance(value, int | float) and math.isfinite(value)]
    return median(known) if known else None
