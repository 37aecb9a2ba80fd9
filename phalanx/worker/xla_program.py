"""A trainer of the XLA engine in this process alone, for `px.trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.host.env import leave_gpu_memory, use_virtual_devices
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.xla.xla_trainer import XlaTrainer


def make_trainer(run: Run, plan: Plan, checkpoints: Path) -> XlaTrainer:
    """A trainer in this process, which has all devices of the run and has not used JAX before. Nothing is built yet."""
    if plan.processes > 1:
        raise RunError(
            f"engine.devices_per_process = {plan.devices_per_process} makes {plan.processes} processes, but px.trainer is one: remove the key, or use px.train."
        )
    if plan.device == "cpu":
        use_virtual_devices(plan.ranks)
    leave_gpu_memory()  # plans fill more than JAX would take
    from phalanx.xla.compiled import use_cache
    from phalanx.xla.xla_trainer import XlaTrainer

    torch.set_num_threads(plan.threads)
    use_cache(run)
    return XlaTrainer(run, plan, checkpoints)
