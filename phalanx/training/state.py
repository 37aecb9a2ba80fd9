"""The live state of a trainer by name, this rank's parts of it: what is saved, and where it is restored to. And what it comes to."""

from __future__ import annotations

from torch import Tensor

from phalanx.checkpointing.pieces import Elsewhere, Piece
from phalanx.events.records import ModelPlaced
from phalanx.parallel.placed import Placed
from phalanx.parallel.placement import Spot
from phalanx.training.optimizer import Optimizer
from phalanx.training.outer import Outer


def pieces(placed: Placed, optimizer: Optimizer, outer: Outer | None) -> dict[str, Piece]:
    """Parameters and kept buffers as model/NAME, states as optimizer/NAME/STATE."""
    held = {one.name: one for one in placed.held}
    found = {f"model/{name}": _piece(one.value.detach(), one.spot) for name, one in held.items()}
    for part in placed.parts:
        kept = part.state_dict().keys()  # not among them: buffers that a model declares to be of the moment
        found |= {f"model/{name}": Piece.of(buffer) for name, buffer in part.named_buffers() if name in kept}
    for name, state in optimizer.state().items():
        spot = held[name.rpartition("/")[0]].spot
        found[f"optimizer/{name}"] = _piece(state, spot) if outer is None else outer.of_replica(state, spot)
    return found | (outer.tensors() if outer is not None else {})


def _piece(tensor: Tensor | Elsewhere, spot: Spot) -> Piece:
    """A state of a parameter lies where the parameter does; one that is a single number belongs to all of it."""
    if isinstance(tensor, Tensor) and tuple(tensor.shape) != spot.shape:
        return Piece.of(tensor)
    return Piece(tensor, spot.whole, spot.offset, spot.shape)


def placement(placed: Placed, optimizer: Optimizer, outer: Outer | None) -> ModelPlaced:
    """What this rank really holds."""
    applied = placed.applied | {"optimizer": optimizer.applied}
    kept, states = placed.engine.bytes(), optimizer.bytes()
    if outer is not None:
        applied["local steps"] = outer.applied
        states = states + outer.bytes()
    return ModelPlaced(
        rank=placed.mesh.rank,
        applied=applied,
        parameters=kept["parameters"],
        gradients=kept["gradients"],
        optimizer=states.device + states.host,
        files=states.files,
    )
