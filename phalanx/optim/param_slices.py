"""Parameters and their states as pieces of a checkpoint: which box, and which ranks hold the same one. Used by `training/live_state`
and the outer optimizer."""

from __future__ import annotations

from torch import Tensor

from phalanx.checkpointing.slices import Elsewhere, Piece
from phalanx.checkpointing.write_partition import Copies
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import ParamShard


def piece(tensor: Tensor | Elsewhere, spot: ParamShard, mesh: Mesh) -> Piece:
    """A state of a parameter lies where the parameter does; one that is a single number belongs to all of it."""
    if isinstance(tensor, Tensor) and tuple(tensor.shape) != spot.slice.shape:
        return Piece.of(tensor, copies(mesh, counted=spot.counted))
    return Piece(tensor, spot.slice.whole, spot.slice.offset, spot.slice.shape, copies(mesh, spot.split, counted=spot.counted))


def copies(mesh: Mesh, split: tuple[str, ...] = (), *, counted: bool = True) -> Copies:
    """The ranks that hold what is cut along the given mesh axes only; not `counted`: another stage's ranks write it."""
    index, count = mesh.peer_index(*split)
    return Copies(tuple(sorted(split)), index, count if counted else 0)
