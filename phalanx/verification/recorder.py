"""Looks over a trainer's shoulder: what stands in it before the first step, and loss, gradients and parameters of every step.
Both sides of a proof are watched alike; `verification/parity` has the one kept and the other compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.events.records import StepSkipped
from phalanx.parallel.owned_param import ParamShard
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.training.trainer import Trainer

Box = tuple[Tensor, ParamShard]
"""Values, and where they lie in the whole."""


@dataclass(slots=True)
class Moment:
    """A trainer after a step; step 0 is before the first."""

    step: int
    loss: float | None = None
    norm: float | None = None
    """Of the whole gradient."""
    batch: str = ""
    """Which tokens the step saw."""
    skipped: bool = False
    gradients: dict[str, Box] = field(default_factory=dict)
    """As the ranks have summed them, before clipping and dividing."""
    parameters: dict[str, Box] = field(default_factory=dict)
    """And the buffers that are kept with them."""


def moments(trainer: Trainer, steps: int) -> Iterator[Moment]:
    """The trainer's own steps, one after the other. Tensors are its live ones: copy what is to outlive the next."""
    caught: dict[str, Box] = {}
    update = trainer.optimizer.step

    def catch_first(*args: Any, **options: Any) -> Any:
        # Between the ranks' sum and the update: what the update makes of gradients is its own affair. Muon divides in place.
        for one in trainer.sharded.owned:
            if one.gradient is not None:
                caught[one.name] = (one.gradient.detach().clone(), one.shard)
        return update(*args, **options)

    trainer.optimizer.step = catch_first  # type: ignore[method-assign]
    yield Moment(0, parameters=_parameters(trainer))
    for number in range(1, steps + 1):
        caught.clear()
        event = trainer.step()
        assert event is not None, "nobody asks it to stop"
        yield Moment(
            step=number,
            loss=event.loss,
            norm=event.grad_norm,
            batch=f"{getattr(event, 'tokens', '')} {getattr(event, 'batch_digest', '')}".strip(),
            skipped=isinstance(event, StepSkipped),
            gradients=dict(caught),
            parameters=_parameters(trainer),
        )


def _parameters(trainer: Trainer) -> dict[str, Box]:
    """What a checkpoint would hold of the model."""
    found = {}
    for name, piece in trainer.tensors().items():
        if name.startswith("model/"):
            tensor = piece.tensor if isinstance(piece.tensor, Tensor) else piece.tensor.read()
            found[name.removeprefix("model/")] = (
                tensor.detach(),
                ParamShard(TensorSlice.of(piece.whole, piece.offset, piece.shape)),
            )
    if trainer.run.optimizer.sync_every > 1:  # between two meetings a checkpoint holds where replicas last met
        found |= {one.name: (one.value.detach(), one.shard) for one in trainer.sharded.owned}
    return found


def copied(boxes: Mapping[str, Box]) -> dict[str, Box]:
    return {name: (tensor.to("cpu", torch.float32, copy=True), spot) for name, (tensor, spot) in boxes.items()}
