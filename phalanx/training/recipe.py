"""What placing a model needs to know from its own room: names of dimensions, initial values, the loss. The trainer hands it to
`parallel/apply`, which knows no model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from phalanx.models.custom import axes
from phalanx.models.init import Box, fill, reset_buffers, table
from phalanx.parallel.owned_param import ParamShard
from phalanx.parallel.sharded_model import Recipe
from phalanx.schedules.actions import Schedule
from phalanx.spec.model import ModelSpec
from phalanx.training.loss import summed_loss


def recipe(model: nn.Module, seed: int, schedule: Schedule | None = None) -> Recipe:
    """For a whole model as `models/init` builds it, and the schedule of its pipeline."""
    spec, initial = model.spec, table(model)
    assert isinstance(spec, ModelSpec), "build gives every model its spec"

    @torch.no_grad()
    def write(name: str, tensor: Tensor, spot: ParamShard) -> None:
        if not (tensor.is_meta or is_fake(tensor)):  # a rank that is only foreseen or rehearsed has no memory to write to
            for box, local in spot.slice.regions():
                fill(tensor[local.index], seed, name, spec, Box(spot.slice.whole, box.offset), initial)

    return Recipe(
        axes=axes(spec.module),
        fill=write,
        reset_buffers=reset_buffers,
        loss=summed_loss,
        schedule=schedule,
        tied="embed.weight" if spec.tied and spec.module is None else None,
    )
