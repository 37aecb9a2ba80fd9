"""Writes events to TensorBoard and Weights & Biases, if the run file asks for them. Rank 0 opens the sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from phalanx.events.records import Evaluated, Event, Finished, Step, Stopped
from phalanx.spec.run import Run

Sink = Callable[[Event], None]


def sinks(run: Run, directory: Path) -> list[Sink]:
    """Opens the sinks that this run asks for."""
    opened: list[Sink] = []
    if run.watch.tensorboard:
        opened.append(_tensorboard(directory))
    if run.watch.wandb:
        opened.append(_wandb(run, directory))
    return opened


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


def _tensorboard(directory: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(directory / "tensorboard")

    def write(event: Event) -> None:
        for name, value in curves(event).items():
            writer.add_scalar(name, value, event.step)  # type: ignore[attr-defined]
        if isinstance(event, Finished | Stopped):
            writer.close()

    return write


def _wandb(run: Run, directory: Path) -> Sink:
    import wandb

    # The run directory's name is the id, so that a resumed run continues its curves.
    session = wandb.init(
        project=run.watch.wandb_project,
        name=directory.name,
        id=directory.name,
        resume="allow",
        dir=directory,
        config=asdict(run),
    )

    def write(event: Event) -> None:
        if values := curves(event):
            session.log(values, step=event.step)  # type: ignore[attr-defined]
        if isinstance(event, Finished | Stopped):
            session.finish()

    return write
