"""One event as one line of text, for the displays. What a person would want to know, and no more."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from phalanx.dashboard.failure_lines import trouble_line
from phalanx.dashboard.numbers import count, duration, number, percent, size
from phalanx.events.records import (
    CheckpointDamaged,
    Evaluated,
    Event,
    Exported,
    ExportFailed,
    Restored,
    RunStarted,
    Saved,
    SaveFailed,
    Step,
    StepSkipped,
    Stopped,
    Uploaded,
    UploadFailed,
    Warned,
    WeightsLoaded,
    WorkerFailed,
)

_DEVICES = {"cuda": "GPU", "cpu": "CPU"}


def line(event: Event) -> Text | None:
    """What to print about an event; None for those that only move the numbers.

    Text, not markup: a path or a message may hold brackets, which rich would read as a style.
    """
    match event:
        case RunStarted():
            device = _DEVICES.get(event.device, event.device)
            work = f"{event.accumulation} × {event.micro_batch} sequences per rank and step"
            return Text(
                f"training {count(event.parameters)} parameters on {event.ranks} {device} "
                f"rank{'s' if event.ranks > 1 else ''} in {event.compute}, {work}",
                style="bold",
            )
        case Restored():
            return Text(f"restored step {event.step} from {_name(event.path)} in {duration(event.seconds)}", style="green")
        case WeightsLoaded():
            return Text(f"begins with the weights of {event.path}, read in {duration(event.seconds)}", style="green")
        case StepSkipped():
            why = "" if event.reason == "not finite" else f" as a {event.reason}"
            return Text(
                f"step {event.step} skipped{why}: loss {number(event.loss)}, gradient norm {number(event.grad_norm, 2)} "
                f"({event.in_a_row} in a row); nothing was changed",
                style="yellow",
            )
        case Evaluated():
            return Text(
                f"step {event.step}  held-out loss {number(event.loss)}  {duration(event.seconds)}{_by_source(event)}",
                style="cyan",
            )
        case Warned():
            return Text(f"warning: {event.message}", style="yellow")
        case WorkerFailed():
            who = "a worker" if event.rank is None else f"rank {event.rank}"
            return Text(f"{who} failed: {event.reason}", style="bold red")
        case Stopped():
            return Text(f"stopped after step {event.step}: {event.reason}", style="yellow")
        case _:
            return _checkpoint_line(event)


def _checkpoint_line(event: Event) -> Text | None:
    """What became of a checkpoint."""
    match event:
        case Saved():
            waited = "" if event.stall > 0.9 * event.seconds else f", {duration(event.stall)} of it waited for"
            return Text(
                f"step {event.step}  saved {_name(event.path)}  {size(event.bytes)} in {duration(event.seconds)}{waited}",
                style="green",
            )
        case Uploaded():
            passed = f"; {len(event.skipped)} earlier passed over" if event.skipped else ""
            return Text(
                f"step {event.step}  uploaded to {event.url}  {size(event.bytes)} in {duration(event.seconds)}{passed}",
                style="green",
            )
        case UploadFailed():
            return Text(
                f"step {event.step}  NOT UPLOADED to {event.url}: {event.reason}; it is in the run directory", style="bold red"
            )
        case SaveFailed():
            return Text(f"step {event.step}  NOT SAVED: {event.reason}; earlier checkpoints are untouched", style="bold red")
        case Exported():
            return Text(
                f"step {event.step}  exported for transformers: hf/{_name(event.path)} in {duration(event.seconds)}; "
                f"logits differ by {event.difference:.1g}",
                style="green",
            )
        case ExportFailed():
            return Text(f"step {event.step}  NOT EXPORTED: {event.reason}; its checkpoint is untouched", style="bold red")
        case CheckpointDamaged():
            return Text(f"checkpoint {_name(event.path)} is damaged and was passed over: {event.reason}", style="yellow")
        case _:
            return trouble_line(event)


def step_line(event: Step, steps: int, left: float | None) -> Text:
    """A step in under 80 columns, padded so that lines of one run stand in columns."""
    parts = [
        f"step {event.step:>{len(str(steps))}}/{steps}",
        f"loss {number(event.loss)}",
        f"{count(event.tokens_per_second):>5} tok/s",
        *([f"mfu {percent(event.mfu)}"] if event.mfu is not None else []),
        # There is room for one of them, and a person who trains experts watches their balance.
        f"norm {number(event.grad_norm, 2)}" if event.expert_load is None else f"load {number(event.expert_load, 2)}",
        f"eta {duration(left)}",
    ]
    return Text("  ".join(parts))


def _by_source(event: Evaluated) -> str:
    """A line for each source, where there are several."""
    if len(event.sources) < 2:
        return ""
    wide = max(len(name) for name in event.sources)
    rows = [
        f"\n    {name:<{wide}}  loss {number(of['loss'])}  perplexity {number(of['perplexity'], 2)}"
        for name, of in event.sources.items()
    ]
    return "".join(rows)


def _name(path: str) -> str:
    return Path(path).name or path
