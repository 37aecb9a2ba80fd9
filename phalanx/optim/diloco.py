"""Local SGD between replicas on slow links, as DiLoCo does it: each takes steps by itself, and every so often they meet.

When they meet, the way from where all started (the anchor) to the mean of where they are now is a gradient for an outer
optimizer, SGD with Nesterov momentum; from the new anchor all go on. Each replica keeps the states of its inner optimizer.

A checkpoint holds everything of every replica, so it can be made between any two steps and a resumed run equals one that never
stopped: the anchor under the parameter's own name, the replicas' values and inner states stacked in a dimension that counts
replicas. It is resumed with as many replicas. Driven by training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor, StateTensor
from phalanx.optim.adamw import Bytes, flat, size
from phalanx.optim.chunks import portions
from phalanx.optim.param_slices import replica_group, state_tensor
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import OwnedParam, ParamShard
from phalanx.spec.run import Optimizer as OptimizerSpec
from phalanx.spec.tensor_slice import Box, TensorSlice

_PORTION = 1 << 22  # numbers that travel in one message


class Outer:
    """The outer optimizer, alike on the ranks of all replicas that hold the same boxes."""

    def __init__(self, held: Sequence[OwnedParam], spec: OptimizerSpec, mesh: Mesh):
        """All ranks make it at the same time; afterwards the values count as where all started."""
        self._held, self._spec, self._mesh = list(held), spec, mesh
        self._group = mesh.group("data", use="local steps")
        self._anchors = [one.value.detach().clone() for one in held]
        self._momentum = [torch.zeros_like(anchor) for anchor in self._anchors]

    def due(self, step: int) -> bool:
        """Whether replicas meet after this many steps, taken or skipped."""
        return step % self._spec.sync_every == 0

    @torch.no_grad()
    def adopt(self) -> None:
        """Anchors were written by somebody else, as initial weights are: every replica starts from there."""
        torch._foreach_copy_([one.value.detach() for one in self._held], self._anchors)

    @torch.no_grad()
    def step(self) -> None:
        """Meet: every replica ends with the same new values. The engine and the optimizer are to be told that they changed."""
        for portion in portions([anchor.numel() for anchor in self._anchors], _PORTION):
            first = self._anchors[portion.slices[0].index]
            mean = torch.zeros(portion.size, dtype=first.dtype, device=first.device)
            for part in portion.slices:
                part.within(mean).copy_(part.of(flat(self._held[part.index].value)))
            self._group.all_reduce(mean).div_(self._group.size)
            for part in portion.slices:
                anchor = part.of(flat(self._anchors[part.index]))
                self._move(anchor, part.within(mean), part.of(flat(self._momentum[part.index])))
                part.of(flat(self._held[part.index].value)).copy_(anchor)

    def _move(self, anchor: Tensor, mean: Tensor, momentum: Tensor) -> None:
        """torch.optim.SGD(nesterov=True), with the mean movement for a gradient."""
        gradient = anchor - mean
        momentum.mul_(self._spec.outer_momentum).add_(gradient)
        anchor.add_(gradient.add(momentum, alpha=self._spec.outer_momentum), alpha=-self._spec.outer_learning_rate)

    def tensors(self) -> dict[str, StateTensor]:
        """For a checkpoint: they take the place of the values under the parameters' names, and add to them."""
        found = {}
        for one, anchor, momentum in zip(self._held, self._anchors, self._momentum, strict=True):
            found[f"model/{one.name}"] = state_tensor(anchor, one.shard, self._mesh)
            found[f"outer/{one.name}/momentum"] = state_tensor(momentum, one.shard, self._mesh)
            found[f"outer/{one.name}/local"] = self.replica_state(one.value.detach(), one.shard)
        return found

    def replica_state(self, state: Tensor | OffloadedTensor, spot: ParamShard) -> StateTensor:
        """A state that each replica has its own of, as a piece of all of them together; a single number, or one laid out as `shard`."""
        count, here = self._group.size, self._group.index
        mine = state.unsqueeze(0) if isinstance(state, Tensor) else _Row(state, state.dtype)
        if isinstance(state, Tensor) and tuple(state.shape) != spot.slice.shape:
            assert state.ndim == 0
            return StateTensor(
                mine, TensorSlice.of((count,), (here,), (1,)), replica_group(self._mesh, ("data",), counted=spot.counted)
            )
        alike = replica_group(self._mesh, ("data", *spot.split), counted=spot.counted)
        stacked = tuple(Box((here, *box.offset), (1, *box.shape)) for box in spot.slice.boxes)
        return StateTensor(mine, TensorSlice((count, *spot.slice.whole), stacked, spot.slice.dim + 1), alike)

    def bytes(self) -> Bytes:
        return Bytes(device=sum(size(tensor) for tensor in (*self._anchors, *self._momentum)))

    @property
    def applied(self) -> str:
        return f"{self._group.size} replicas meet every {self._spec.sync_every} steps, anchors and momentum of {len(self._held)} parameters"


@dataclass(slots=True)
class _Row:
    """A state in a file, seen as one row of a taller one."""

    state: OffloadedTensor
    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        return self.state.read(None if into is None else into.squeeze(0)).unsqueeze(0)

    def write(self, values: Tensor, /) -> None:
        self.state.write(values.squeeze(0))
