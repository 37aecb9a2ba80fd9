"""What a run came to, computed from its events alone: the closing panel, and the same numbers for programs.

The CLI shows it when a run ends, and prints it as JSON where that is asked for.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from phalanx.dashboard.failure_lines import recoveries
from phalanx.dashboard.loss_curve import FILE_NAME
from phalanx.dashboard.numbers import count, duration, number, percent, short_duration, size
from phalanx.dashboard.run_history import history
from phalanx.events.records import Event, Finished, RunStarted, Saved, Stopped, WorkerFailed, plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The state a run directory has reached, and how fast its last launch was."""

    steps: int
    """Step that has been reached."""
    planned: int
    """Steps of the whole run."""
    loss: float | None
    """Of the last step."""
    first_loss: float | None
    eval_loss: float | None
    """Of the last evaluation; None: there was none."""
    eval_sources: dict[str, dict[str, float]]
    """The same evaluation by source: loss, perplexity and tokens of each."""
    expert_load: float | None
    """Load of the fullest expert over the mean, in the worst layer, averaged over the last steps; None: there are no experts."""
    tokens: int
    """Target tokens of all steps that count; those undone by a resumption do not."""
    tokens_per_second: float | None
    """Median over the last launch without its first step, which warms up."""
    mfu: float | None
    """Likewise; None where the device's peak is unknown."""
    steps_skipped: int
    recoveries: int
    """How often the last launch recovered from failures by itself."""
    steps_lost: int
    """Complete steps that it had to take again for that."""
    seconds_lost: float
    """From each failure to the first step after it."""
    step_seconds: float | None
    """Of a step, likewise …"""
    promised_step_seconds: float | None
    """… and what the plan said it would be, with its P10 and P90; None where it promised nothing."""
    promised_low: float | None
    promised_high: float | None
    promised_tokens_per_second: float | None
    memory: int | None
    """Bytes, the largest of all ranks and steps of the last launch: of the device at peak on GPUs, resident ones on CPUs …"""
    promised_memory: float | None
    """… and what the plan said."""
    seconds: float
    """Wall time of the last launch."""
    ranks: int
    parameters: int
    checkpoint: str | None
    """The newest, as the record names it."""
    finished: bool
    """All steps are done."""
    failure: str | None
    """Why the last launch failed; None: it did not."""

    def to_json(self, run_dir: Path | str) -> dict[str, Any]:
        """For programs. Numbers that JSON lacks are strings, as in events.jsonl."""
        return {key: plain(value) for key, value in asdict(self).items()} | {"run_dir": str(run_dir)}

    def render(self, console: Console, run_dir: Path | str) -> None:
        """The closing panel: the result, the speed, where to look."""
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
                yield "held-out", ", ".join(f"{name} {number(of['loss'])}" for name, of in self.eval_sources.items())
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
        if self.step_seconds is not None and self.promised_step_seconds is not None:
            between = f"{short_duration(self.promised_low)} to {short_duration(self.promised_high)}"
            promised = f"promised {short_duration(self.promised_step_seconds)} ({between}), {count(self.promised_tokens_per_second)} tokens/s"
            yield "a step", f"{short_duration(self.step_seconds)}, {promised}"
        if self.memory is not None and self.promised_memory is not None:
            yield "memory", f"{size(self.memory)}, promised {size(self.promised_memory)}"
        yield "events", str(run_dir / "events.jsonl")
        if (run_dir / FILE_NAME).exists():
            yield "curve", str(run_dir / FILE_NAME)
        if self.checkpoint is not None:
            yield "checkpoint", self.checkpoint
            yield "generate", f"phalanx generate {shlex.quote(str(run_dir))}"


def summarize(events: Iterable[Event]) -> Summary:
    """Compute the summary from all events of a run directory, in order."""
    every = list(events)
    known = history(every)
    begin = max((place for place, event in enumerate(every) if isinstance(event, RunStarted)), default=0)
    launch = every[begin:]
    started = next((event for event in launch if isinstance(event, RunStarted)), None)
    ends = [event for event in launch if isinstance(event, Finished | Stopped)]
    failures = [event.reason for event in launch if isinstance(event, WorkerFailed)]
    saved = [event.path for event in every if isinstance(event, Saved)]
    steps = [known.steps[step] for step in sorted(known.steps)]
    evaluations = known.evaluations
    reached = [*known.steps, *(event.step for event in ends), *(record.step for record in known.skipped)]
    times, again, seconds = recoveries(launch)
    promise = (started.promise if started else None) or {}
    return Summary(
        recoveries=times,
        steps_lost=again,
        seconds_lost=seconds,
        steps=max(reached, default=0),
        planned=started.steps if started else 0,
        loss=steps[-1].loss if steps else None,
        first_loss=steps[0].loss if steps else None,
        eval_loss=evaluations[max(evaluations)].loss if evaluations else None,
        eval_sources=evaluations[max(evaluations)].sources if evaluations else {},
        expert_load=steps[-1].expert_load if steps else None,
        tokens=sum(step.tokens for step in steps),
        tokens_per_second=_middle([step.tokens_per_second for step in known.launch]),
        mfu=_middle([step.mfu for step in known.launch]),
        steps_skipped=len(known.skipped),
        step_seconds=_middle([step.seconds for step in known.launch]),
        promised_step_seconds=promise.get("seconds"),
        promised_low=promise.get("low"),
        promised_high=promise.get("high"),
        promised_tokens_per_second=promise.get("tokens_per_second"),
        memory=max((step.memory for step in known.launch), default=None),
        promised_memory=promise.get("total_memory"),
        seconds=launch[-1].time - launch[0].time if launch else 0.0,
        ranks=started.ranks if started else 0,
        parameters=started.parameters if started else 0,
        checkpoint=saved[-1] if saved else None,
        finished=any(isinstance(event, Finished) for event in ends),
        failure=failures[0] if failures else None,
    )


def _middle(values: Sequence[float | None]) -> float | None:
    """Median of all but the first, or of the only one; None where there is nothing to tell."""
    known = [value for value in (values[1:] or values) if isinstance(value, int | float) and math.isfinite(value)]
    return median(known) if known else None
