"""Writes events to TensorBoard and Weights & Biases, if the run file asks for them. Rank 0 opens the sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from phalanx.events.records import Evaluated, Event, Finished, Step, Stopped
from phalanx.spec.run import Run

Sink = Callable[[Event], None]
Writer = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""Writes the values of a step; ends."""


def sinks(run: Run, directory: Path) -> list[Sink]:
    """Opens the sinks that this run asks for."""
    writers = []
    if run.watch.tensorboard:
        writers.append(_tensorboard(directory))
    if run.watch.wandb:
        writers.append(_wandb(run, directory))
    return [partial(_write, writer) for writer in writers]


def _write(writer: Writer, event: Event) -> None:
    write, end = writer
    if values := curves(event):
        write(values, event.step)  # type: ignore[attr-defined]
    if isinstance(event, Finished | Stopped):
        end()


def curves(event: Event) -> dict[str, float]:
    """The values of an event that are plotted, by name."""
    match event:
        case Step():
            values = {
                "train/loss": event.loss,
                "train/grad_norm": event.grad_norm,
                "train/learning_rate": event.learning_rate,
                "speed/tokens_per_second": event.tokens_per_second,
                "speed/flops_per_second": event.flops_per_second,
                "memory/bytes": float(event.memory),
            }
            optional = {"speed/mfu": event.mfu, "train/expert_load": event.expert_load}
            return values | {name: value for name, value in optional.items() if value is not None}
        case Evaluated():
            each = {f"eval/{name}/loss": source["loss"] for name, source in event.sources.items()}
            return {"eval/loss": event.loss} | (each if len(each) > 1 else {})
        case _:
            return {}


def _tensorboard(directory: Path) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(directory / "tensorboard")

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(run: Run, directory: Path) -> Writer:
    import wandb

    # The run directory's name is the id, so that a resumed run continues its curves.
    name, project = directory.name, run.watch.wandb_project
    session = wandb.init(project=project, name=name, id=name, resume="allow", dir=directory, config=asdict(run))
    return lambda values, step: session.log(values, step=step), session.finish
