"""This rank's stages of a model, cut by what their blocks cost. The trainer cuts the model with it before it is placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.models.init import build, materialize
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.stage_cost import measure_costs
from phalanx.schedules.actions import Schedule
from phalanx.schedules.stage_split import Costs, cut, flop_costs
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.loss import summed_loss
from phalanx.transforms.precision import computing


def stages(model: Any, run: Run, plan: Plan, mesh: Mesh, order: Schedule | None) -> list[nn.Module]:
    """The parts of a whole model that are this rank's, in the order of its stages."""
    if order is None:
        return [model]
    spec, length = run.model, run.train.sequence_length
    costs = flop_costs(spec, length) if plan.layout.stage_split == "counted" else timed_costs(spec, length, plan, mesh)
    ranges = cut(costs.blocks, costs.first, costs.last, order.stages)
    return [model.part(*ranges[stage]) for stage in order.stages_of(mesh.coordinate("pipeline"))]


def timed_costs(spec: ModelSpec, length: int, plan: Plan, mesh: Mesh) -> Costs:
    """Of a model, by timing a first, a middle and a last block of each kind at the sizes of the run, on rank 0 for all."""
    moe = spec.moe
    kinds = {"dense": replace(spec, layers=3, moe=None, mtp_depth=0)} if moe is None or spec.dense_layers else {}
    if moe is not None and spec.layers > spec.dense_layers:
        kinds["sparse"] = replace(spec, layers=3, moe=replace(moe, dense_layers=0), mtp_depth=0)
    tried: dict[str, Callable[[], Tensor]] = {}
    if mesh.rank == 0:
        for kind, three in kinds.items():
            small = materialize(build(three), 0, mesh.device)
            tried |= {f"{kind} {number}": _one(small, number, length, plan, mesh) for number in range(3)}
    seconds = measure_costs(tried, mesh)
    first_kind = "dense" if spec.dense_layers or moe is None else "sparse"
    last_kind = "dense" if spec.dense_layers == spec.layers or moe is None else "sparse"
    dense, sparse = seconds.get("dense 1", 0.0), seconds.get("sparse 1", 0.0)
    return Costs(
        first=max(0.0, seconds[f"{first_kind} 0"] - seconds[f"{first_kind} 1"]),
        blocks=(dense,) * spec.dense_layers + (sparse,) * (spec.layers - spec.dense_layers),
        last=max(0.0, seconds[f"{last_kind} 2"] - seconds[f"{last_kind} 1"]),
    )


def _one(model: Any, number: int, length: int, plan: Plan, mesh: Mesh) -> Callable[[], Tensor]:
    """A forward of one block with what stands before or behind it. Its gradients stay with a model that is soon forgotten."""
    part, spec = model.part(number, number + 1), model.spec
    shape = (plan.micro_batch, length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device)
    positions = torch.arange(length, device=mesh.device).expand(shape)
    states = torch.randn(*shape, spec.dim, device=mesh.device, requires_grad=True)

    def forward() -> Tensor:
        with computing(plan.compute, mesh.device):
            output = part(states if number else tokens, positions, None)
        return summed_loss(output, tokens) if number == 2 else output

    return forward
