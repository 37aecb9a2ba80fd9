"""The optimizer of a rank: AdamW, or another optimizer with AdamW for the parameters it does not update, behind one step that can be
skipped; the protocol of its implementations, and what they share. The arithmetic is that of torch.optim. Here states exist from the start,
are known by parameter name and are where the run file says; clipping, averaging and skipping are part of the step.

To add an optimizer "lion": write `optim/lion.py` with a class that follows `ParamOptimizer` and a constant `KIND`, and add the name and
its traits to `spec.run.Optimizer.name` and `spec.run.OPTIMIZERS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from importlib import import_module
from operator import add
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor, ReplicaGroup, StateTensor
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.run import Memory, Precision
from phalanx.spec.run import Optimizer as OptimizerSpec
from phalanx.spec.tensor_slice import TensorSlice

_PRECISION, _MEMORY = Precision(), Memory()
State = Tensor | OffloadedTensor


@dataclass(frozen=True, slots=True)
class Update:
    """The inputs of one step."""

    spec: OptimizerSpec
    learning_rate: float
    divisor: Tensor
    """Every gradient is divided by it. An fp32 scalar on the device, like `skip`."""
    skip: Tensor
    """1: change nothing."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Where the optimizer's state is."""

    device: int = 0
    host: int = 0
    """In host memory, offloaded from a device."""
    files: int = 0
    buffer: int = 0
    """Host memory that state passes through between a file and the device."""

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*map(add, astuple(self), astuple(other)))


class ParamOptimizer(Protocol):
    """Updates some of a rank's parameters. Implementations subclass it and inherit `adopt` and `close`."""

    def step(self, update: Update) -> None:
        """Updates the parameters in place, or changes nothing if `update.skip` is 1."""

    def state(self) -> dict[str, State]:
        """The live states by "parameter name/state name": writing to them restores. They exist from the start."""
        ...

    def bytes(self) -> StateBytes:
        """Size of the states; scalars are not counted."""
        ...

    @property
    def applied(self) -> str:
        """What was built, read from the tensors and files."""
        ...

    def adopt(self) -> None:
        """Parameters were written by something other than this optimizer: brings master weights elsewhere up to them."""
        return None

    def close(self) -> None:
        """Closes files; states in them are lost."""
        return None


@dataclass(frozen=True, slots=True)
class Resources:
    """What an optimizer takes from its surroundings besides parameters. A rehearsal, which has no memory and no peers, replaces the
    functions; None stands for the real ones."""

    folder: Path | None = None
    """Folder for offloaded states, if the run file names none."""
    host_buffer: Callable[[int, bool], Any] | None = None
    """Allocates host memory from (size in bytes, whether it is pinned): see `offload_stores.HostBuffer`."""
    scratch_file: Callable[[Path, int], Any] | None = None
    """Creates a file from (path, size in bytes): see `offload_stores.ScratchFile`."""
    group_slices: Callable[[Group, Sequence[OwnedParam]], list[list[TensorSlice]]] | None = None
    """Finds the slices that the ranks of a group hold, by parameter and rank: see `muon.gather_slices`."""


REAL = Resources()


@dataclass(frozen=True, slots=True)
class OptimizerSetup:
    """What an implementation is made from, besides its parameters."""

    spec: OptimizerSpec
    moments: torch.dtype
    """Dtype of moments and momentum."""
    memory: Memory
    mesh: Mesh | None = None
    """None: parameters are whole."""
    resources: Resources = REAL
    newton_schulz: torch.dtype = torch.bfloat16
    """Dtype of Muon's iterations."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An entry of the registry: the constant `KIND` of the module with the optimizer's name."""

    label: str
    make: Callable[[Sequence[OwnedParam], OptimizerSetup], ParamOptimizer]
    updates: Callable[[OwnedParam], bool]
    """Whether this optimizer updates a parameter; AdamW updates the others."""


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
        iterations = torch.float32 if precision.newton_schulz == "fp32" else torch.bfloat16
        setup = OptimizerSetup(spec, moments, memory, mesh, resources, iterations)
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


def is_updated(param: OwnedParam) -> bool:
    """Whether a step counts for the parameter. A frozen parameter has no gradient; an empty shard counts, as those of other ranks do."""
    return param.gradient is not None or not param.value.numel()


def flat(tensor: Tensor) -> Tensor:
    """The same memory in one dimension."""
    assert tensor.is_contiguous(), f"a shard of shape {tuple(tensor.shape)} is not contiguous"
    return tensor.detach().view(-1)


def state_tensor(tensor: State, shard: ParamShard, mesh: Mesh) -> StateTensor:
    """A state for a checkpoint: it is sharded as its parameter is; a scalar belongs to the whole parameter."""
    if isinstance(tensor, Tensor) and tuple(tensor.shape) != shard.slice.shape:
        return StateTensor.full(tensor, replica_group(mesh, counted=shard.counted))
    return StateTensor(tensor, shard.slice, replica_group(mesh, shard.split, counted=shard.counted))


def replica_group(mesh: Mesh, split: tuple[str, ...] = (), *, counted: bool = True) -> ReplicaGroup:
    """The ranks that hold the same slice of a tensor that is split along these mesh axes. Not `counted`: another stage writes it."""
    index, count = mesh.peer_index(*split)
    return ReplicaGroup(tuple(sorted(split)), index, count if counted else 0)
