"""Muon for the matrices of the blocks, which may be sharded over several ranks. AdamW updates the other parameters.

The arithmetic is that of torch.optim.Muon: momentum element by element, then Newton–Schulz iterations, which need the whole matrix.
They are in bf16, as torch's are, or in fp32 if `precision.newton_schulz` says so.
Ranks that share matrices process as many at a time as there are ranks: each rank gathers one whole matrix, orthogonalizes it and
sends the boxes back. So no rank holds more than one whole matrix, and the work is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr

from phalanx.optim.optimizer import OptimizerKind, OptimizerSetup, ParamOptimizer, State, StateBytes, Update, is_updated
from phalanx.parallel.group import Group
from phalanx.parallel.sharded_model import OwnedParam, extract
from phalanx.spec.tensor_slice import Box, TensorSlice

_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch.optim.Muon's defaults
_LAYERS = ("blocks.", "mtp.")  # not the embedding and the head, which are matrices too


class Muon(ParamOptimizer):
    """Muon on the matrices, or boxes of matrices, of one rank."""

    def __init__(self, params: Sequence[OwnedParam], setup: OptimizerSetup):
        self._params, self._spec, self._iterations = list(params), setup.spec, setup.newton_schulz
        self._momentum = [torch.zeros_like(param.value.detach(), dtype=setup.moments) for param in params]
        self._whole: list[int] = []
        """Indices of the matrices that this rank holds whole."""
        self._shared: list[_SharedMatrices] = []
        find_slices = setup.resources.group_slices or gather_slices
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for index, param in enumerate(params):
            by_axes.setdefault(param.shard.split, []).append(index)
        for axes, indices in by_axes.items():
            if axes and not params[indices[0]].value.is_meta:  # a dry build has no peers and takes no step
                assert setup.mesh is not None, f"{params[indices[0]].name} is sharded: its group is known to a mesh only"
                group = setup.mesh.group(*axes, use="muon")
                if group.size > 1:
                    slices = find_slices(group, [params[index] for index in indices])
                    self._shared.append(_SharedMatrices(group, self._params, dict(zip(indices, slices, strict=True))))
                    continue
            self._whole += indices

    @torch.no_grad()
    def step(self, update: Update) -> None:
        if update.skip.item():
            return
        for index in self._whole:
            if is_updated(self._params[index]):
                self._apply(index, _orthogonalize(self._nesterov(index, update).to(self._iterations)), update)
        for shared in self._shared:
            for indices in shared.rounds():
                # The iterations begin by rounding to their format. Rounding here halves what is sent and gives the same result.
                parts = [self._nesterov(index, update).to(self._iterations) for index in indices]
                for index, part in zip(indices, shared.orthogonalize(indices, parts), strict=True):
                    self._apply(index, part, update)

    def state(self) -> dict[str, State]:
        return {f"{param.name}/momentum_buffer": kept for param, kept in zip(self._params, self._momentum, strict=True)}

    def bytes(self) -> StateBytes:
        return StateBytes(device=sum(momentum.nbytes for momentum in self._momentum))

    @property
    def applied(self) -> str:
        shared = sum(len(matrices.indices) for matrices in self._shared)
        sizes = sorted({matrices.group.size for matrices in self._shared})
        note = f", {shared} of them made orthogonal together by {sizes} ranks" if shared else ""
        if not self._params:
            return "nothing"
        return f"{len(self._params)} matrices, momentum {self._momentum[0].dtype} on {self._momentum[0].device}{note}"

    def _nesterov(self, index: int, update: Update) -> Tensor:
        """Updates the momentum and returns the gradient with Nesterov momentum."""
        param, stored, momentum = self._params[index], self._momentum[index], self._spec.momentum
        if param.gradient is None:
            return torch.zeros_like(param.value)
        gradient = param.gradient.float().div_(update.divisor)
        buffer = stored.float()  # the same tensor if it is in fp32
        buffer.lerp_(gradient, 1 - momentum)
        if buffer is not stored:
            stored.copy_(buffer)
        return gradient.lerp(buffer, momentum)

    def _apply(self, index: int, direction: Tensor, update: Update) -> None:
        param = self._params[index]
        if param.gradient is None:
            return
        value = param.value.detach()
        value.mul_(1 - update.learning_rate * self._spec.weight_decay)
        # Both optimizers share one learning rate: this factor gives their updates the same root mean square.
        rate = _adjust_lr(update.learning_rate, "match_rms_adamw", torch.Size(param.shard.slice.whole))
        value.add_(direction, alpha=-rate)


class _SharedMatrices:
    """Matrices of which the ranks of one group hold slices."""

    def __init__(self, group: Group, params: Sequence[OwnedParam], slices: dict[int, list[TensorSlice]]):
        """`slices`: of every rank, by index of the matrix."""
        self.group, self.indices, self._slices = group, list(slices), slices
        self._shapes = {index: params[index].shard.slice.whole for index in slices}

    def rounds(self) -> list[list[int]]:
        """As many matrices at a time as there are ranks; each rank gathers one of them."""
        count = self.group.size
        return [self.indices[first : first + count] for first in range(0, len(self.indices), count)]

    def orthogonalize(self, indices: list[int], parts: list[Tensor]) -> list[Tensor]:
        """Returns this rank's slices of the orthogonalized matrices, from its slices of the matrices."""
        group, rank = self.group, self.group.index
        own = indices[rank] if rank < len(indices) else None
        sent = [part.numel() for part in parts] + [0] * (group.size - len(parts))
        received = [part.numel for part in self._slices[own]] if own is not None else [0] * group.size
        values = group.all_to_all(torch.cat([part.reshape(-1) for part in parts]), sent, received)
        if own is not None:
            matrix = values.new_empty(self._shapes[own])
            for part, given in zip(self._slices[own], values.split(received), strict=True):
                for box, local in part.regions():
                    matrix[box.index] = given.view(part.shape)[local.index]
            matrix = _orthogonalize(matrix)
            values = torch.cat([extract(part, matrix).reshape(-1) for part in self._slices[own]])
        returned = group.all_to_all(values, received, sent)
        own_parts = returned.split(sent)[: len(indices)]
        return [new.view(old.shape) for new, old in zip(own_parts, parts, strict=True)]


def gather_slices(group: Group, params: Sequence[OwnedParam]) -> list[list[TensorSlice]]:
    """The slices that the group's ranks hold, by matrix and rank. Checks that the ranks hold the same matrices, and all of each."""
    device = params[0].value.device
    names = crc32("\n".join(param.name for param in params).encode())
    of_all = group.all_gather(torch.tensor([[names, len(params)]], device=device))
    assert (of_all == of_all[0]).all(), "ranks that share matrices hold different ones"
    # Of a fused matrix a rank has several boxes; ranks that have fewer send empty ones.
    counts = group.all_gather(torch.tensor([max(len(param.shard.slice.boxes) for param in params)], device=device))
    own = [_box_table(param.shard.slice, int(counts.max())) for param in params]
    rows = group.all_gather(torch.tensor(own, device=device)[None]).transpose(0, 1).tolist()
    slices = [[_slice_of(param.shard.slice, boxes) for boxes in of_ranks] for param, of_ranks in zip(params, rows, strict=True)]
    for param, of_ranks in zip(params, slices, strict=True):
        # Several ranks may hold the same box.
        distinct = {box: box.numel for part in of_ranks for box in part.boxes if box.numel}
        height, width = param.shard.slice.whole
        count = sum(distinct.values())
        assert count == height * width, f"the ranks hold {count} of {height * width} elements of {param.name}"
    return slices


def _box_table(part: TensorSlice, rows: int) -> list[list[int]]:
    boxes = [[*box.offset, *box.shape] for box in part.boxes]
    return boxes + [[0, 0, 0, 0]] * (rows - len(boxes))


def _slice_of(like: TensorSlice, table: list[list[int]]) -> TensorSlice:
    """The slice of another rank, from its boxes."""
    boxes = tuple(Box((row[0], row[1]), (row[2], row[3])) for row in table)
    return replace(like, boxes=tuple(box for box in boxes if box.numel) or boxes[:1])


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Newton–Schulz iterations in the dtype of the matrix, which is overwritten; in bf16 with the bits of torch.optim.Muon."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=_EPS))  # no singular value is above 1
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def _updates(param: OwnedParam) -> bool:
    """Whether Muon updates it: matrices of the blocks. The shape of the whole parameter counts, not that of the shard. Stacked experts have
    three dimensions, so AdamW updates them."""
    return len(param.shard.slice.whole) == 2 and param.name.startswith(_LAYERS)


KIND = OptimizerKind("Muon", Muon, _updates)
