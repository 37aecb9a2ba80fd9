"""Records the initial state of a trainer, and loss, gradients and parameters of every step. `verification/parity` records both sides
of a case with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.events.records import StepSkipped
from phalanx.parallel.sharded_model import ParamShard
from phalanx.training.trainer import Trainer

ShardValue = tuple[Tensor, ParamShard]
"""The values of a shard, and its position in the whole tensor."""


@dataclass(slots=True)
class StepRecord:
    """The state of a trainer after a step; step 0 is before the first."""

    step: int
    loss: float | None = None
    norm: float | None = None
    """Norm of the whole gradient."""
    batch: str = ""
    """Token count and digest of the batch."""
    skipped: bool = False
    gradients: dict[str, ShardValue] = field(default_factory=dict)
    """Gradients after the reduction over ranks, before clipping and scaling."""
    parameters: dict[str, ShardValue] = field(default_factory=dict)
    """Parameters and persistent buffers."""


def record_steps(trainer: Trainer, steps: int) -> Iterator[StepRecord]:
    """Takes the trainer's steps and yields a record of each. Tensors are live: copy what has to outlive the next step."""
    gradients: dict[str, ShardValue] = {}
    update = trainer.optimizer.step

    def record_gradients(*args: Any, **options: Any) -> Any:
        # After the reduction and before the update, which may change gradients in place, as Muon does.
        for owned in trainer.sharded.owned:
            if owned.gradient is not None:
                gradients[owned.name] = (owned.gradient.detach().clone(), owned.shard)
        return update(*args, **options)

    trainer.optimizer.step = record_gradients  # type: ignore[method-assign]
    yield StepRecord(0, parameters=_parameters(trainer))
    for number in range(1, steps + 1):
        gradients.clear()
        event = trainer.step()
        assert event is not None, "nothing stops this trainer"
        yield StepRecord(
            step=number,
            loss=event.loss,
            norm=event.grad_norm,
            batch=f"{getattr(event, 'tokens', '')} {getattr(event, 'batch_digest', '')}".strip(),
            skipped=isinstance(event, StepSkipped),
            gradients=dict(gradients),
            parameters=_parameters(trainer),
        )


def _parameters(trainer: Trainer) -> dict[str, ShardValue]:
    """The model state that a checkpoint would store."""
    values = {}
    for name, piece in trainer.tensors().items():
        if name.startswith("model/"):
            tensor = piece.tensor if isinstance(piece.tensor, Tensor) else piece.tensor.read()
            values[name.removeprefix("model/")] = (
                tensor.detach(),
                ParamShard(piece.slice),
            )
    if trainer.run.optimizer.sync_every > 1:  # between two syncs, a checkpoint stores the state of the last sync
        values |= {owned.name: (owned.value.detach(), owned.shard) for owned in trainer.sharded.owned}
    return values


def copied(values: Mapping[str, ShardValue]) -> dict[str, ShardValue]:
    return {name: (tensor.to("cpu", torch.float32, copy=True), shard) for name, (tensor, shard) in values.items()}
