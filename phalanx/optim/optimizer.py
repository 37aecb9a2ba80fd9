"""The optimizer of a rank: AdamW, or another optimizer with AdamW for the parameters it does not update, behind one step that can be
skipped. `training/step` drives it.

The arithmetic is that of torch.optim. Here states exist from the start, are known by parameter name and are where the run file says;
clipping, averaging and skipping are part of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from phalanx.optim.param_optimizer import (
    REAL,
    OptimizerKind,
    OptimizerSetup,
    ParamOptimizer,
    Resources,
    State,
    StateBytes,
    Update,
)
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam
from phalanx.spec.run import Memory, Precision
from phalanx.spec.run import Optimizer as OptimizerSpec

_PRECISION, _MEMORY = Precision(), Memory()


def optimizer_kind(name: str) -> OptimizerKind:
    """The registry: optimizer NAME of a run file is the `KIND` of the module `optim/NAME`."""
    kind = import_module(f"phalanx.optim.{name}").KIND
    assert isinstance(kind, OptimizerKind), f"phalanx.optim.{name} has no KIND"
    return kind


class Optimizer:
    """Updates all parameters that one rank owns. The methods are those of its parts (see `ParamOptimizer`), on all of them."""

    def __init__(
        self,
        params: Sequence[OwnedParam],
        spec: OptimizerSpec,
        *,
        precision: Precision = _PRECISION,
        memory: Memory = _MEMORY,
        mesh: Mesh | None = None,
        resources: Resources = REAL,
    ):
        """All ranks of a job call it at the same time."""
        kind, fallback = optimizer_kind(spec.name), optimizer_kind("adamw")
        assert not memory.offloads or spec.traits.no_offload is None, "the checks of the run file refuse it"
        assert all(param.value.dtype == torch.float32 for param in params), "the optimizer updates fp32 master weights"
        self._order, self._spec = {param.name: number for number, param in enumerate(params)}, spec
        moments = torch.bfloat16 if precision.optimizer == "bf16" else torch.float32
        setup = OptimizerSetup(spec, moments, memory, mesh, resources)
        own = [param for param in params if kind.updates(param)]
        rest = [param for param in params if not kind.updates(param)]
        self.parts: dict[str, ParamOptimizer] = {}
        """Implementations by label."""
        if rest:
            self.parts[fallback.label] = fallback.make(rest, setup)
        if own or not rest:
            self.parts[kind.label] = kind.make(own, setup)

    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates with every gradient divided by `divisor`; changes nothing if `skip` is 1.

        Both are fp32 scalars on the device: AdamW's fused kernel divides and skips there, without waiting for the host.
        """
        update = Update(self._spec, learning_rate, divisor, skip)
        for part in self.parts.values():
            part.step(update)

    def adopt(self) -> None:
        for part in self.parts.values():
            part.adopt()

    def state(self) -> dict[str, State]:
        """Every live state by "parameter name/state name", in the order of the parameters."""
        states = {name: state for part in self.parts.values() for name, state in part.state().items()}
        return dict(sorted(states.items(), key=lambda pair: self._order[pair[0].rpartition("/")[0]]))

    def bytes(self) -> StateBytes:
        return sum((part.bytes() for part in self.parts.values()), StateBytes())

    @property
    def applied(self) -> str:
        return "; ".join(f"{label}: {part.applied}" for label, part in self.parts.items())

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def learning_rate(optimizer: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up, then the schedule down to the final fraction.

    A pure function of the step: there is nothing to save.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    done, whole = step - optimizer.warmup_steps, max(1, steps - optimizer.warmup_steps)
    if optimizer.schedule == "wsd":
        decay = optimizer.decay_steps if optimizer.decay_steps is not None else max(1, min(whole, steps // 5))
        done, whole = max(0, done - (whole - decay)), decay
    progress = min(1.0, done / whole)
    match optimizer.schedule:
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            left = 1 - progress
        case "constant":
            left = 1.0
    return optimizer.learning_rate * (optimizer.final_fraction + (1 - optimizer.final_fraction) * left)
