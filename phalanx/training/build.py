"""What a rank trains with, made at step 0: its part of the model, the optimizer, and what their tensors are called in a checkpoint.
The trainer makes it on a device; `training/dry_build`, for any rank of any layout, without memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.models.init import build
from phalanx.models.moe import router_sizes
from phalanx.optim.diloco import Outer
from phalanx.optim.optimizer import Optimizer
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import Pipeline
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.schedules.actions import Schedule
from phalanx.schedules.makers import schedule_for
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.live_state import pieces
from phalanx.training.recipe import recipe
from phalanx.training.stage_modules import stages


@dataclass(frozen=True, slots=True)
class Built:
    """One rank's."""

    sharded: ShardedModel
    optimizer: Optimizer
    outer: Outer | None
    """Where replicas take steps by themselves."""
    order: Schedule | None
    """Of a pipeline."""
    shapes: dict[str, tuple[int, ...]]
    """Of the whole model's tensors, by name."""
    experts: dict[str, int]
    """How many each router of the whole model has, by its name."""

    def tensors(self) -> dict[str, StateTensor]:
        """The live state by name, this rank's parts of it: what is saved, and where it is restored to."""
        return pieces(self.sharded, self.optimizer, self.outer)

    def pipeline(self, run: Run) -> Pipeline | None:
        """Of a schedule, this rank's part; all ranks make theirs at the same time."""
        if self.order is None:
            return None
        return Pipeline(self.sharded.parts, self.order, self.sharded.mesh, halves=run.memory.recompute != "selective")


def place(run: Run, plan: Plan, mesh: Mesh, folder: Path | None = None) -> Built:
    """All ranks call it at the same time. `folder`: for states in files, where the run file names none."""
    model = build(run.model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    experts = router_sizes(model)
    order = schedule_for(plan.layout, plan.accumulation)
    parts = stages(model, run, plan, mesh, order)
    placed = apply(parts, run, plan, mesh, recipe(model, run.train.seed, order))
    optimizer = Optimizer(placed.owned, run.optimizer, precision=run.precision, memory=run.memory, mesh=mesh, folder=folder)
    outer = Outer(placed.owned, run.optimizer, mesh) if run.optimizer.sync_every > 1 else None
    return Built(placed, optimizer, outer, order, shapes, experts)
