"""Parameters and their states as pieces of a checkpoint: which box, and which ranks hold the same one. Used by `training/build`
and the outer optimizer."""

from __future__ import annotations

from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor, ReplicaGroup, StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import ParamShard


def state_tensor(tensor: Tensor | OffloadedTensor, spot: ParamShard, mesh: Mesh) -> StateTensor:
    """A state of a parameter lies where the parameter does; one that is a single number belongs to all of it."""
    if isinstance(tensor, Tensor) and tuple(tensor.shape) != spot.slice.shape:
        return StateTensor.full(tensor, replica_group(mesh, counted=spot.counted))
    return StateTensor(tensor, spot.slice, replica_group(mesh, spot.split, counted=spot.counted))


def replica_group(mesh: Mesh, split: tuple[str, ...] = (), *, counted: bool = True) -> ReplicaGroup:
    """The ranks that hold what is cut along the given mesh axes only; not `counted`: another stage's ranks write it."""
    index, count = mesh.peer_index(*split)
    return ReplicaGroup(tuple(sorted(split)), index, count if counted else 0)
