"""Muon on matrices that lie in boxes on several ranks. `optim/optimizer` hands it the matrices.

The arithmetic is torch.optim.Muon's: momentum number by number, then Newton–Schulz iterations, which need the whole matrix. The
ranks that share matrices take as many at a time as they are: each sends its boxes round, makes one matrix orthogonal, and sends
the boxes back. So no rank has more than one whole matrix, and the work is shared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from phalanx.optim.adamw import Bytes, Move, State, moving, size
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import OwnedParam, ParamShard
from phalanx.spec.run import Optimizer as OptimizerSpec

_COEFFICIENTS, _STEPS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch.optim.Muon's defaults


@dataclass(frozen=True, slots=True)
class _Box:
    """A rank's part of a matrix."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numbers(self) -> int:
        return self.shape[0] * self.shape[1]


class Muon:
    def __init__(self, held: Sequence[OwnedParam], spec: OptimizerSpec, mesh: Mesh | None, kept: torch.dtype):
        self._held, self._spec = list(held), spec
        self._momentum = [torch.zeros_like(one.value.detach(), dtype=kept) for one in held]
        self._alone: list[int] = []
        self._shared: list[_Shared] = []
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for index, one in enumerate(held):
            by_axes.setdefault(one.shard.split, []).append(index)
        for axes, indices in by_axes.items():
            if axes and not held[indices[0]].value.is_meta:  # a rank that is only foreseen meets nobody and takes no step
                assert mesh is not None, f"{held[indices[0]].name} is a part, of which only a mesh knows the others"
                group = mesh.group(*axes, use="muon")
                if group.size > 1:
                    self._shared.append(_Shared(group, indices, self._held))
                    continue
            self._alone += indices

    @torch.no_grad()
    def step(self, move: Move) -> None:
        if move.bad.item():
            return
        for index in self._alone:
            if moving(self._held[index]):
                self._apply(index, _orthogonal(self._moved(index, move)), move)
        for shared in self._shared:
            for round_ in shared.rounds():
                # Newton–Schulz begins by rounding to bf16: rounded here, half as much travels, and the result is the same.
                boxes = [self._moved(index, move).bfloat16() for index in round_]
                for index, box in zip(round_, shared.orthogonal(round_, boxes), strict=True):
                    self._apply(index, box, move)

    def state(self) -> dict[str, State]:
        return {f"{one.name}/momentum_buffer": kept for one, kept in zip(self._held, self._momentum, strict=True)}

    def bytes(self) -> Bytes:
        return Bytes(device=sum(size(kept) for kept in self._momentum))

    @property
    def applied(self) -> str:
        parts = sum(len(shared.indices) for shared in self._shared)
        sharers = sorted({shared.group.size for shared in self._shared})
        together = f", {parts} of them made orthogonal together by {sharers} ranks" if parts else ""
        return f"{len(self._held)} matrices, momentum {self._momentum[0].dtype} on {self._momentum[0].device}{together}"

    def _moved(self, index: int, move: Move) -> Tensor:
        """The gradient with Nesterov momentum; the memory of it moves on."""
        one, kept, momentum = self._held[index], self._momentum[index], self._spec.momentum
        if one.gradient is None:
            return torch.zeros_like(one.value)
        gradient = one.gradient.float().div_(move.divisor)
        buffer = kept.float()  # the very tensor, where it is in fp32
        buffer.lerp_(gradient, 1 - momentum)
        if buffer is not kept:
            kept.copy_(buffer)
        return gradient.lerp(buffer, momentum)

    def _apply(self, index: int, update: Tensor, move: Move) -> None:
        one = self._held[index]
        if one.gradient is None:
            return
        value = one.value.detach()
        value.mul_(1 - move.learning_rate * self._spec.weight_decay)
        # One learning rate serves AdamW too: the root of the mean square of both updates is alike.
        rate = _adjust_lr(move.learning_rate, "match_rms_adamw", torch.Size(one.shard.slice.whole))
        value.add_(update, alpha=-rate)


class _Shared:
    """Matrices whose boxes the same ranks hold."""

    def __init__(self, group: Group, indices: list[int], held: Sequence[OwnedParam]):
        self.group, self.indices = group, indices
        spots = [held[index].shard for index in indices]
        device = held[indices[0]].value.device
        names = crc32("\n".join(held[index].name for index in indices).encode())
        of_all = group.all_gather(torch.tensor([[names, len(indices)]], device=device))
        assert (of_all == of_all[0]).all(), "ranks that share matrices hold different ones"
        places = boxes_of_all(group, spots, device)
        self._whole = {index: spot.slice.whole for index, spot in zip(indices, spots, strict=True)}
        self._boxes = {index: [_box(*row) for row in rows] for index, rows in zip(indices, places, strict=True)}
        for index, spot in zip(indices, spots, strict=True):
            _check(held[index].name, spot, self._boxes[index])

    def rounds(self) -> list[list[int]]:
        """As many matrices at a time as there are ranks; each rank has one of them whole."""
        count = self.group.size
        return [self.indices[first : first + count] for first in range(0, len(self.indices), count)]

    def orthogonal(self, round_: list[int], boxes: list[Tensor]) -> list[Tensor]:
        """This rank's boxes of the orthogonal matrices, from its boxes of the matrices."""
        group, here = self.group, self.group.index
        mine = round_[here] if here < len(round_) else None
        sizes = [box.numel() for box in boxes] + [0] * (group.size - len(boxes))
        taken = [box.numbers for box in self._boxes[mine]] if mine is not None else [0] * group.size
        received = group.all_to_all(torch.cat([box.reshape(-1) for box in boxes]), sizes, taken)
        back = received
        if mine is not None:
            whole = received.new_empty(self._whole[mine])
            places = self._boxes[mine]
            for place, part in zip(places, received.split(taken), strict=True):
                whole[place.rows, place.columns] = part.view(place.shape)
            whole = _orthogonal(whole)
            back = torch.cat([whole[place.rows, place.columns].reshape(-1) for place in places])
        returned = group.all_to_all(back, taken, sizes)
        parts = returned.split(sizes)[: len(round_)]
        return [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)]


def boxes_of_all(group: Group, spots: Sequence[ParamShard], device: torch.device) -> list[list[list[int]]]:
    """Offset and shape of every rank's box, by matrix and rank. A rehearsal, which is told nothing by others, puts its own in the place
    of this function."""
    places = group.all_gather(torch.tensor([[*spot.slice.offset, *spot.slice.shape] for spot in spots], device=device)[None])
    return list(places.transpose(0, 1).tolist())


def _orthogonal(matrix: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(matrix, _COEFFICIENTS, _STEPS, _EPS)


def _box(row: int, column: int, height: int, width: int) -> _Box:
    return _Box(slice(row, row + height), slice(column, column + width))


def _check(name: str, spot: ParamShard, boxes: list[_Box]) -> None:
    """Together the boxes are the matrix; several ranks may hold the same one."""
    apart = {(box.rows.start, box.columns.start, *box.shape): box.numbers for box in boxes if box.numbers}
    total = spot.slice.whole[0] * spot.slice.whole[1]
    assert sum(apart.values()) == total, f"the ranks hold {sum(apart.values())} of {total} numbers of {name}"
