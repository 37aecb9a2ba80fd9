"""The training state as tensors by name: which slice of each a rank holds, which ranks hold the same, and which part of it each writes.

Saving needs no planning among ranks: every rank evaluates the same rule, `partition`, for itself. Ranks that hold the same slices lay them
end to end in one line of bytes and cut it into equal lengths, one for each. So a rank writes at most one range of rows of each slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.checkpointing.format import SavedBox
from phalanx.spec.errors import RunFailed
from phalanx.spec.tensor_slice import Box, TensorSlice

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By their safetensors names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MIN_BYTES = 512  # that a rank writes of what others hold too


def raw_bytes(values: Tensor) -> memoryview:
    """The bytes of a tensor in host memory; a copy if it is not contiguous."""
    return values.detach().contiguous().view(-1).view(torch.uint8).numpy().data


class OffloadedTensor(Protocol):
    """A tensor in a file, which is read and written as a whole."""

    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        """Its values, in new memory or in `into`, which is contiguous and has its shape."""

    def write(self, values: Tensor, /) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The ranks that hold the same slice."""

    key: tuple[str, ...] = ()
    """Identifies the group: slices with equal keys on a rank are held by the same ranks."""
    index: int = 0
    """This rank's index in the group."""
    count: int = 1
    """Ranks in the group. 0: other ranks write the tensor, and this rank's copy only mirrors theirs."""


NO_REPLICAS = ReplicaGroup()


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of the training state on this rank: its live values, which slice of the whole they are, and which ranks hold the same."""

    tensor: Tensor | OffloadedTensor
    slice: TensorSlice
    replicas: ReplicaGroup = NO_REPLICAS
    is_buffer: bool = False
    """A module's buffer, which may change in any forward. Everything else changes only in the optimizer step."""

    @staticmethod
    def full(tensor: Tensor, replicas: ReplicaGroup = NO_REPLICAS) -> StateTensor:
        """All of a tensor."""
        return StateTensor(tensor, TensorSlice.full(tuple(tensor.shape)), replicas)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole tensor, over all ranks."""
        return math.prod(self.slice.whole) * self.tensor.dtype.itemsize

    def values(self) -> Tensor:
        """The live values, or those read from the file."""
        return self.tensor.detach() if isinstance(self.tensor, Tensor) else self.tensor.read()


def as_state_tensors(tensors: Mapping[str, Tensor | StateTensor]) -> dict[str, StateTensor]:
    """Plain tensors become state tensors that this rank holds all of."""
    return {name: value if isinstance(value, StateTensor) else StateTensor.full(value) for name, value in tensors.items()}


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box of a state tensor that this rank writes to its file."""

    name: str
    state: StateTensor
    local: Box
    """In the rank's local tensor."""
    box: Box
    """In the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        return self.state.tensor.dtype

    @property
    def bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def saved(self) -> SavedBox:
        if self.dtype not in DTYPE_NAMES:
            raise RunFailed(
                f"{self.name} has the number format {self.dtype}, which a checkpoint cannot store: use one of {', '.join(DTYPES)}."
            )
        return SavedBox(self.name, DTYPE_NAMES[self.dtype], self.state.slice.whole, self.box)

    def values(self) -> Tensor:
        """The values of the box, read from its file if the tensor is offloaded."""
        return self.state.values()[self.local.index]

    def copy_into(self, memory: Tensor) -> None:
        """Copies the values into contiguous memory of the box's shape; from a device perhaps not at once."""
        tensor = self.state.tensor
        if not isinstance(tensor, Tensor) and self.local.shape == self.state.slice.shape:
            tensor.read(memory)  # not through memory of its own
        else:
            memory.copy_(self.values(), non_blocking=True)


def written_boxes(tensors: Mapping[str, StateTensor]) -> list[WrittenBox]:
    """What this rank writes of what it holds, in file order: wide number formats first, so that every box is aligned to its format."""
    groups: dict[ReplicaGroup, list[str]] = {}
    for name in sorted(tensors):
        if not tensors[name].slice.empty:
            groups.setdefault(tensors[name].replicas, []).append(name)
    boxes: list[WrittenBox] = []
    for replicas, names in groups.items():
        shapes = [(tensors[name].slice.shape or (1,), tensors[name].tensor.dtype.itemsize) for name in names]
        rows = [(shape[0], math.prod(shape[1:]) * size) for shape, size in shapes]
        for name, (first, last) in zip(names, partition(rows, replicas), strict=True):
            if last > first:
                boxes += _boxes_of_rows(name, tensors[name], first, last)
    return sorted(boxes, key=file_order)


def file_order(box: WrittenBox) -> tuple[int, str]:
    """By this the boxes of a file are sorted."""
    return -box.dtype.itemsize, box.name


def _boxes_of_rows(name: str, state: StateTensor, first: int, last: int) -> list[WrittenBox]:
    """Rows first … last of a rank's local tensor, as boxes of the whole."""
    if not state.slice.whole:  # a single number
        return [WrittenBox(name, state, Box((), ()), Box((), ()))]
    boxes = []
    for box, local in state.slice.narrow(0, first, last - first).regions():
        if box.numel:
            offset = (local.offset[0] + first, *local.offset[1:])
            boxes.append(WrittenBox(name, state, Box(offset, local.shape), box))
    return boxes


def partition(rows: Sequence[tuple[int, int]], replicas: ReplicaGroup) -> list[tuple[int, int]]:
    """Which rows (first, last) this rank writes of tensors that the same ranks hold, given as (number of rows, bytes of a row)."""
    if not replicas.count:
        return [(0, 0)] * len(rows)
    total = sum(count * size for count, size in rows)
    # Small states are not scattered over the files of thousands of ranks: each rank that loads would have to look into all of them.
    writers = min(replicas.count, -(-total // _MIN_BYTES) or 1)
    low, high = (total * min(index, writers) // writers for index in (replicas.index, replicas.index + 1))
    ranges, begin = [], 0
    for count, size in rows:
        ranges.append((_row_at(low - begin, count, size), _row_at(high - begin, count, size)))
        begin += count * size
    return ranges


def _row_at(byte: int, count: int, size: int) -> int:
    """The first row that begins at `byte` or later. The rank that ends there and the one that begins there compute the same."""
    return min(max(-(-byte // size), 0), count) if size else 0
