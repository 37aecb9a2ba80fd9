"""The live state of a trainer by name, this rank's parts of it: what is saved, and where it is restored to. And what it comes to."""

from __future__ import annotations

from dataclasses import replace

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import ModelPlaced
from phalanx.optim.diloco import Outer
from phalanx.optim.optimizer import Optimizer
from phalanx.optim.param_slices import replica_group, state_tensor
from phalanx.parallel.sharded_model import ShardedModel


def pieces(placed: ShardedModel, optimizer: Optimizer, outer: Outer | None) -> dict[str, StateTensor]:
    """Parameters and kept buffers as model/NAME, states as optimizer/NAME/STATE."""
    held, mesh = {one.name: one for one in placed.owned}, placed.mesh
    found = {f"model/{name}": state_tensor(one.value.detach(), one.shard, mesh) for name, one in held.items()}
    for part in placed.parts:
        kept = part.state_dict().keys()  # not among them: buffers that a model declares to be of the moment
        found |= {
            f"model/{name}": replace(StateTensor.full(buffer, replica_group(mesh)), is_buffer=True)
            for name, buffer in part.named_buffers()
            if name in kept
        }
    for name, state in optimizer.state().items():
        spot = held[name.rpartition("/")[0]].shard
        found[f"optimizer/{name}"] = state_tensor(state, spot, mesh) if outer is None else outer.of_replica(state, spot)
    return found | (outer.tensors() if outer is not None else {})


def placement(placed: ShardedModel, optimizer: Optimizer, outer: Outer | None) -> ModelPlaced:
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
