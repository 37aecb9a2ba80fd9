"""The protocol of an optimizer and what its implementations share. `optim/optimizer` combines implementations and drives them.

To add an optimizer "lion": write `optim/lion.py` with a class that follows `ParamOptimizer` and a constant `KIND`, and add the name and
its traits to `spec.run.Optimizer.name` and `spec.run.OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor, ReplicaGroup, StateTensor
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.run import Memory
from phalanx.spec.run import Optimizer as OptimizerSpec
from phalanx.spec.tensor_slice import Box

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
        return StateBytes(
            self.device + other.device, self.host + other.host, self.files + other.files, self.buffer + other.buffer
        )


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
    group_boxes: Callable[[Group, Sequence[OwnedParam]], list[list[Box]]] | None = None
    """Finds the boxes that the ranks of a group hold, by parameter and rank: see `muon.gather_boxes`."""


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


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An entry of the registry: the constant `KIND` of the module with the optimizer's name."""

    label: str
    make: Callable[[Sequence[OwnedParam], OptimizerSetup], ParamOptimizer]
    updates: Callable[[OwnedParam], bool]
    """Whether this optimizer updates a parameter; AdamW updates the others."""


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
