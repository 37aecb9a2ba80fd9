"""DiLoCo: local SGD between replicas on slow links. Each replica takes steps by itself, and every `optimizer.sync_every` steps they
synchronize: the anchor, their common parameters at the last synchronization, minus the mean of their parameters is the gradient of an outer
SGD with Nesterov momentum. All replicas continue from the new anchor and keep the states of their inner optimizers.

A checkpoint holds all states of all replicas, so it can be taken between any two steps; a resumed run needs as many replicas. The anchor
has the parameter's own name; the replicas' values and inner states are stacked along a first dimension of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpointing.state_tensor import OffloadedTensor, StateTensor
from phalanx.optim.offload_stores import split_chunks
from phalanx.optim.optimizer import State, StateBytes, flat, replica_group, state_tensor
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.run import Optimizer as OptimizerSpec
from phalanx.spec.tensor_slice import Box, TensorSlice

_CHUNK = 1 << 22
"""Elements sent in one message."""


class OuterOptimizer:
    """The outer optimizer, equal on the ranks of all replicas that hold the same slices."""

    def __init__(self, params: Sequence[OwnedParam], spec: OptimizerSpec, mesh: Mesh):
        """All ranks make it at the same time; the present values become the anchor."""
        self._params, self._spec, self._mesh = list(params), spec, mesh
        self._group = mesh.group("data", use="local steps")
        self._anchors = [param.value.detach().clone() for param in params]
        self._momentum = [torch.zeros_like(anchor) for anchor in self._anchors]

    def due(self, step: int) -> bool:
        """Whether replicas synchronize after this many steps, taken or skipped."""
        return step % self._spec.sync_every == 0

    @torch.no_grad()
    def adopt(self) -> None:
        """The anchors were written by something else, such as initial weights: every replica starts from them."""
        torch._foreach_copy_([param.value.detach() for param in self._params], self._anchors)

    @torch.no_grad()
    def step(self) -> None:
        """Synchronizes the replicas: all end with the same new values. The caller tells the engine and the inner optimizer."""
        for chunk in split_chunks([anchor.numel() for anchor in self._anchors], _CHUNK):
            first = self._anchors[chunk.runs[0].index]
            mean = torch.zeros(chunk.size, dtype=first.dtype, device=first.device)
            for run in chunk.runs:
                run.within(mean).copy_(run.of(flat(self._params[run.index].value)))
            self._group.all_reduce(mean).div_(self._group.size)
            for run in chunk.runs:
                anchor = run.of(flat(self._anchors[run.index]))
                self._update(anchor, run.within(mean), run.of(flat(self._momentum[run.index])))
                run.of(flat(self._params[run.index].value)).copy_(anchor)

    def _update(self, anchor: Tensor, mean: Tensor, momentum: Tensor) -> None:
        """torch.optim.SGD(nesterov=True), with the mean movement as the gradient."""
        gradient = anchor - mean
        momentum.mul_(self._spec.outer_momentum).add_(gradient)
        anchor.add_(gradient.add(momentum, alpha=self._spec.outer_momentum), alpha=-self._spec.outer_learning_rate)

    def tensors(self) -> dict[str, StateTensor]:
        """For a checkpoint: anchors under the parameters' names, momentum, and each replica's own values."""
        tensors = {}
        for param, anchor, momentum in zip(self._params, self._anchors, self._momentum, strict=True):
            tensors[f"model/{param.name}"] = state_tensor(anchor, param.shard, self._mesh)
            tensors[f"outer/{param.name}/momentum"] = state_tensor(momentum, param.shard, self._mesh)
            tensors[f"outer/{param.name}/local"] = self.replica_state(param.value.detach(), param.shard)
        return tensors

    def replica_state(self, state: State, shard: ParamShard) -> StateTensor:
        """A state that every replica has its own of, as one row of the stack of all replicas; a scalar, or sharded as its parameter."""
        count, index = self._group.size, self._group.index
        row = state.unsqueeze(0) if isinstance(state, Tensor) else _OffloadedRow(state, state.dtype)
        if isinstance(state, Tensor) and tuple(state.shape) != shard.slice.shape:
            assert state.ndim == 0
            group = replica_group(self._mesh, ("data",), counted=shard.counted)
            return StateTensor(row, TensorSlice.of((count,), (index,), (1,)), group)
        group = replica_group(self._mesh, ("data", *shard.split), counted=shard.counted)
        boxes = tuple(Box((index, *box.offset), (1, *box.shape)) for box in shard.slice.boxes)
        return StateTensor(row, TensorSlice((count, *shard.slice.whole), boxes, shard.slice.dim + 1), group)

    def bytes(self) -> StateBytes:
        return StateBytes(device=sum(tensor.nbytes for tensor in (*self._anchors, *self._momentum)))

    @property
    def applied(self) -> str:
        return (
            f"{self._group.size} replicas synchronize every {self._spec.sync_every} steps, anchors and momentum of "
            f"{len(self._params)} parameters"
        )


@dataclass(slots=True)
class _OffloadedRow:
    """A state in a file as one row of a taller tensor."""

    state: OffloadedTensor
    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        return self.state.read(None if into is None else into.squeeze(0)).unsqueeze(0)

    def write(self, values: Tensor, /) -> None:
        self.state.write(values.squeeze(0))
