"""This rank's stages of a model: which schedule, which blocks. The trainer cuts the model with it before it is placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.spec.schedule import Schedule
from phalanx.spec.schedule_file import load
from phalanx.spec.schedule_make import make
from phalanx.spec.stages import cut, flop_costs


def schedule(layout: Layout, micro_batches: int) -> Schedule | None:
    """The order of a step's micro-batches; None without a pipeline."""
    if layout.pipeline == 1:
        return None
    if layout.schedule_file is None:
        return make(layout.schedule, layout.pipeline, micro_batches, layout.stages_per_rank)
    found = load(Path(layout.schedule_file))
    if found.ranks != layout.pipeline:
        raise RunError(
            [
                f"layout.schedule_file = {layout.schedule_file} is for {found.ranks} ranks, but layout.pipeline = {layout.pipeline}: "
                "set layout.pipeline to that number, or name another file."
            ]
        )
    return found


def stages(model: Any, run: Run, plan: Plan, mesh: Mesh, order: Schedule | None) -> list[nn.Module]:
    """The parts of a whole model that are this rank's, in the order of its stages."""
    if order is None:
        return [model]
    costs = flop_costs(run.model, run.train.sequence_length)
    ranges = cut(costs.blocks, costs.first, costs.last, order.stages)
    return [model.part(*ranges[stage]) for stage in order.stages_of(mesh.at("pipeline"))]
