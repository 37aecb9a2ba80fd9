"""Shows a run while it trains: a live panel on a terminal, plain lines elsewhere; one line of text for each event. `phalanx train` passes every
event as it is written. A display reads nothing else and changes nothing."""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from phalanx.dashboard.numbers import count, data_share, duration, flops, number, percent, size, visible
from phalanx.events import records
from phalanx.events.records import Evaluated, Event, RunStarted, Step, StepSkipped
from phalanx.spec.dump import shown

_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 16  # losses in the sparkline: a third of 80 columns, minus its label
_ECHO = 2  # columns that the panel leaves free: the ^C of a terminal would begin a new line, and the panel would be drawn twice
_RECENT = 64  # steps from which the remaining time is estimated
_DEVICES = {"cuda": "GPU", "cpu": "CPU"}
_ACTIONS = {
    "restart": "the lost ranks were restarted",
    "spare": "spare places took over",
    "shrink": "training continues on fewer ranks",
    "grow": "training continues on more nodes",
}
_PLAIN_LINES: dict[type[Event], tuple[str, str]] = {
    records.Warned: ("warning: {event.message}", "yellow"),
    records.UploadFailed: (
        "step {event.step}  NOT UPLOADED to {event.url}: {event.reason}; it remains in the run directory",
        "bold red",
    ),
    records.SaveFailed: ("step {event.step}  NOT SAVED: {event.reason}; earlier checkpoints are untouched", "bold red"),
    records.ExportFailed: ("step {event.step}  NOT EXPORTED: {event.reason}; its checkpoint is untouched", "bold red"),
    records.HostRejected: ("host rejected: {event.message}", "bold red"),
    records.FailureNoticed: ("failure {event.number}: {event.message}", "bold red"),
    records.ControllerChanged: ("node {event.node} is now the controller", "yellow"),
    **dict.fromkeys((records.Straggling, records.Corrupted, records.NotFinite), ("{event.message}", "yellow")),
    records.FaultInjected: ("chaos: {event.fault}", "magenta"),
    records.RequestFailed: ("request for a {event.what} not carried out: {event.reason}", "yellow"),
}
"""Text and style of the lines that only repeat an event's values."""
_SOURCES = {"live": "the survivors' state", "memory": "in-memory replicas", "disk": "a checkpoint"}


class Display:
    """Prints one line for each event, and one for every `log_every`-th step. The base class of the live display."""

    def __init__(self, console: Console, steps: int, log_every: int):
        self._console = console
        self._steps = steps
        self._log_every = max(1, log_every)
        self._pace = Pace()
        self._first = True

    def show(self, event: Event) -> None:
        self._pace.add(event)
        if isinstance(event, Step):
            if self._first or event.step % self._log_every == 0 or event.step >= self._steps:
                self._print(step_line(event, self._steps, self._pace.left(self._steps)))
            self._first = False
        elif (text := event_line(event)) is not None:
            self._print(text)

    def close(self) -> None:
        """Releases the terminal; plain lines never held it."""

    def _print(self, text: Text) -> None:
        # A file has no width to wrap at: one event is one line. A terminal would break the line inside a word.
        self._console.print(text, soft_wrap=not self._console.is_terminal)


class LiveDisplay(Display):
    """Keeps a panel at the bottom of the terminal while the lines of events scroll above it."""

    def __init__(self, console: Console, steps: int, log_every: int):
        super().__init__(console, steps, log_every)
        self._last: Step | None = None
        self._evaluated: Evaluated | None = None
        self._losses: deque[float] = deque(maxlen=_SPARK)
        self._live = Live(self._panel(), console=console, refresh_per_second=8)
        self._live.start()

    def show(self, event: Event) -> None:
        if isinstance(event, Step):
            self._pace.add(event)
            self._last = event
            self._losses.append(event.loss)
        else:
            if isinstance(event, Evaluated):
                self._evaluated = event
            super().show(event)
        self._live.update(self._panel())

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> RenderableType:
        return Constrain(self._contents(), max(1, self._console.width - _ECHO))

    def _contents(self) -> RenderableType:
        done, left = self._pace.step, self._pace.left(self._steps)
        bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), expand=True, padding=(0, 1))
        bar.add_row(
            Text(f"step {done}/{self._steps}", style="bold"),
            ProgressBar(total=max(1, self._steps), completed=done),
            Text(f"{percent(done / max(1, self._steps))}  {duration(self._pace.elapsed)}, {duration(left)} left"),
        )
        if self._last is None:
            return Group(bar, Text("waiting for the first step", style="dim"))
        return Group(bar, self._numbers(self._last))

    def _numbers(self, last: Step) -> Table:
        held_out = self._evaluated.loss if self._evaluated else None
        cells = [
            ("loss", number(last.loss), "bold cyan"),
            ("held-out", number(held_out), "cyan"),
            ("recent", sparkline(self._losses), "cyan"),
            ("speed", f"{count(last.tokens_per_second)} tok/s", ""),
            ("model", flops(last.flops_per_second), ""),
            ("MFU", percent(last.mfu), ""),
            ("norm", number(last.grad_norm, 2), ""),
            ("rate", f"{last.learning_rate:.2e}", ""),
            ("memory", size(last.memory), ""),
            *([("experts", f"{number(last.expert_load, 2)} × mean", "")] if last.expert_load is not None else []),
        ]
        columns = [Column(ratio=1, no_wrap=True, overflow="ellipsis") for _ in range(3)]
        table = Table.grid(*columns, expand=True, padding=(0, 1))
        for row in range(0, len(cells), 3):
            table.add_row(
                *(Text.assemble((f"{name:<9}", "dim"), (value, style)) for name, value, style in cells[row : row + 3])
            )
        return table


class Pace:
    """Elapsed and remaining time of a run, from the times of its events: time spent in saves and evaluations counts too."""

    def __init__(self) -> None:
        self.step = 0
        self.elapsed = 0.0
        self._start: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._step_seconds = math.nan

    def add(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start = event.time
            self._recent.clear()
        if self._start is None:
            self._start = event.time
        self.elapsed = max(0.0, event.time - self._start)
        if isinstance(event, Step | StepSkipped):
            self.step = event.step
            self._recent.append((event.time, event.step))
        if isinstance(event, Step):
            self._step_seconds = event.seconds

    def left(self, steps: int) -> float | None:
        """Seconds until the last step, at the pace of recent steps. None before the second step of a launch: the first one compiles and allocates, and
        says nothing about the others."""
        if self.step >= steps:
            return 0.0
        if len(self._recent) < 2:
            return None
        (first, low), (last, high) = self._recent[0], self._recent[-1]
        each = (last - first) / (high - low) if high > low and last > first else self._step_seconds
        return (steps - self.step) * each


def display(console: Console, steps: int, log_every: int, live: bool) -> Display:
    """Creates the display for a run of `steps` steps; `live` if the console is an interactive terminal."""
    return LiveDisplay(console, steps, log_every) if live else Display(console, steps, log_every)


def sparkline(values: Iterable[float]) -> str:
    """Draws values as a row of bars, scaled between the smallest and the largest; a space for a value that is not finite."""
    row = list(values)
    finite = [value for value in row if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    steps = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * steps)] if math.isfinite(value) else " " for value in row)


def event_line(event: Event) -> Text | None:
    """Returns the line to print for an event; None for events that only update numbers."""
    line: tuple[str, str] | None
    match event:
        case records.DataOpened():
            line = _data_line(event), "dim"
        case records.SettingsChanged():
            line = f"settings changed after step {event.step}: {changes_text(event)}", "yellow"
        case _:
            line = _line(event)
    # Text, not markup: a path or a message may contain brackets, which rich would read as a style.
    return None if line is None else Text(line[0], style=line[1])


def step_line(event: Step, steps: int, left: float | None) -> Text:
    """Returns a step as a line of fewer than 80 columns, padded so that the lines of a run align."""
    parts = [
        f"step {event.step:>{len(str(steps))}}/{steps}",
        f"loss {number(event.loss)}",
        f"{count(event.tokens_per_second):>5} tok/s",
        *([f"mfu {percent(event.mfu)}"] if event.mfu is not None else []),
        _figure(event),
        f"eta {duration(left)}",
    ]
    return Text("  ".join(parts))


def _figure(event: Step) -> str:
    """The one figure that a line has room for: preferences show how many pairs are preferred, mixtures of experts the load balance."""
    if event.preferred is not None:
        return f"preferred {percent(event.preferred)}"
    return f"norm {number(event.grad_norm, 2)}" if event.expert_load is None else f"load {number(event.expert_load, 2)}"


def changes_text(event: records.SettingsChanged) -> str:
    """What has changed, in a line."""
    return "; ".join(f"{path}: {shown(before)} → {shown(after)}" for path, (before, after) in event.changes.items())


def _data_line(event: records.DataOpened) -> str:
    share = data_share(event.run_tokens, event.tokens, event.parameters)
    text = f"reading {event.documents:,} documents, {count(event.tokens)} tokens"
    return f"{text}; the run trains on {count(event.run_tokens)} tokens: {share}"


def _line(event: Event) -> tuple[str, str] | None:
    """Text and style of an event's line."""
    match event:
        case RunStarted(program=[_, *_]):
            return f"{shlex.join(event.program)} on {event.ranks} rank{'s' if event.ranks > 1 else ''}", "bold"
        case RunStarted():
            ranks = f"{event.ranks} {_DEVICES.get(event.device, event.device)} rank{'s' if event.ranks > 1 else ''}"
            work = f"{event.accumulation} × {event.micro_batch} sequences per rank and step"
            of = "" if event.adapters is None else f"{count(event.adapters)} parameters of LoRA adapters of a model of "
            return f"training {of}{count(event.parameters)} parameters on {ranks} in {event.compute}, {work}", "bold"
        case records.HostsChecked():
            return _hosts_line(event), "green" if not event.rejected else "yellow"
        case records.StepCompiled():
            return _compiled(event), "dim"
        case records.WeightsLoaded():
            return f"loaded initial weights from {event.path} in {duration(event.seconds)}", "green"
        case StepSkipped():
            why = "" if event.reason == "not finite" else f" as a {event.reason}"
            numbers = f"loss {number(event.loss)}, gradient norm {number(event.grad_norm, 2)} ({event.in_a_row} in a row)"
            return f"step {event.step} skipped{why}: {numbers}; the weights are unchanged", "yellow"
        case Evaluated():
            spent = duration(event.seconds)
            return f"step {event.step}  held-out loss {number(event.loss)}  {spent}{_by_source(event)}", "cyan"
        case records.Sampled():
            return _sample_text(event), "magenta"
        case records.WorkerFailed():
            who = "a worker" if event.rank is None else f"rank {event.rank}"
            return f"{who} failed: {event.reason}", "bold red"
        case records.RequestStarted():
            which = f"rank {event.ranks[0]}" if len(event.ranks) == 1 else f"{len(event.ranks)} ranks"
            beyond = event.step + event.steps
            return f"asked for a {event.what} of {which}, steps {event.step} to {beyond - 1}: they take longer", "dim"
        case records.Stopped():
            saved = "" if event.saved else "; nothing was saved"
            return f"stopped after step {event.step}: {event.reason}{saved}", "yellow"
        case records.Restored():
            return f"restored step {event.step} from {_name(event.path)} in {duration(event.seconds)}", "green"
        case records.Saved():
            stall = "" if event.stall > 0.9 * event.seconds else f", training waited {duration(event.stall)}"
            written = f"{_name(event.path)}  {size(event.bytes)} in {duration(event.seconds)}"
            return f"step {event.step}  saved {written}{stall}", "green"
        case records.Uploaded():
            skipped = f"; {len(event.skipped)} earlier skipped" if event.skipped else ""
            sent = f"{event.url}  {size(event.bytes)} in {duration(event.seconds)}"
            return f"step {event.step}  uploaded to {sent}{skipped}", "green"
        case records.Exported():
            written = f"hf/{_name(event.path)} in {duration(event.seconds)}; logits differ by {event.difference:.1g}"
            return f"step {event.step}  exported for transformers: {written}", "green"
        case records.CheckpointDamaged():
            return f"checkpoint {_name(event.path)} is damaged and was skipped: {event.reason}", "yellow"
        case records.Recovered():
            return f"recovered in {duration(event.seconds)}: {_recovery(event)}", "green"
        case records.Rewound():
            return _rolled_back(event), "yellow"
        case records.StrangerRefused():
            total = f" ({event.count} in all)" if event.count > 1 else ""
            return f"node {event.node} refused a connection from {event.address}{total}: {event.reason}", "yellow"
    text, style = _PLAIN_LINES.get(type(event), ("", ""))
    return (text.format(event=event), style) if text else None


def _recovery(event: records.Recovered) -> str:
    """How a run or a program goes on."""
    action = _ACTIONS.get(event.action, event.action)
    if event.source == "program":
        return f"{action}; the program runs on {event.ranks} ranks"
    lost = f", {event.steps_lost} step{'s' if event.steps_lost > 1 else ''} to repeat" if event.steps_lost else ""
    source = _SOURCES.get(event.source, "step 0")
    return f"{action}; {event.ranks} ranks continue after step {event.step} from {source}{lost}"


def _rolled_back(event: records.Rewound) -> str:
    first, end = event.skipped_samples
    return f"rolled back from step {event.step} to step {event.to_step}; sequences {first} to {end - 1} are skipped"


def _compiled(event: records.StepCompiled) -> str:
    needs = f"{size(event.arguments)} of state and batch and {size(event.temporary)} more on each device"
    how = "traced, and read from the cache of compiled programs," if event.was_cached else "compiled"
    return f"{how} in {duration(event.seconds)}: {needs}"


def _hosts_line(event: records.HostsChecked) -> str:
    """What the check of the hosts has found, in a line."""
    parts, names = [], event.hosts
    if event.links:
        slowest = min(event.links, key=lambda pair: event.links[pair])
        hosts = "–".join(names.get(node, node) for node in slowest.split("-"))
        fastest = max(event.links.values())
        parts.append(f"links up to {size(fastest)}/s (slowest: {hosts}, {size(event.links[slowest])}/s)")
    if event.flops:
        parts.append(f"devices from {flops(min(event.flops.values()))}")
    parts.append(f"{event.rejected} rejected" if event.rejected else "none rejected")
    return f"checked {len(names)} hosts in {duration(event.seconds)}: {', '.join(parts)}"


def _sample_text(event: records.Sampled) -> str:
    """The prompt and what the model wrote, below a line of their own."""
    text = visible(f"{event.prompt} ⟶ {event.text}" if event.prompt else event.text).replace("\n", "\n    ")
    return f"step {event.step}  sample of {event.tokens} tokens  {duration(event.seconds)}\n    {text}"


def _by_source(event: Evaluated) -> str:
    """One line for each data source, if there are several."""
    if len(event.sources) < 2:
        return ""
    width = max(len(name) for name in event.sources)
    return "".join(
        f"\n    {name:<{width}}  loss {number(values['loss'])}"
        + (f"  perplexity {number(values['perplexity'], 2)}" if "perplexity" in values else "")
        for name, values in event.sources.items()
    )


def _name(path: str) -> str:
    return Path(path).name or path
