"""Parts of tensors, by name and place: what a rank saves and restores, whatever the layout. `checkpointing/save` and `load` hand
these planners to torch's distributed checkpoint, which then moves exactly the bytes that each rank writes or needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.spec.errors import RunFailed
from phalanx.spec.tensor_slice import TensorSlice

_LEAST = 512  # bytes that a rank writes of what others hold too


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The ranks that hold the same piece."""

    key: tuple[str, ...] = ()
    """Names them: pieces with the same key on a rank are held by the same ranks."""
    index: int = 0
    """This rank among them."""
    count: int = 1
    """0: others write it, as this rank's copy only mirrors theirs."""


NO_REPLICAS = ReplicaGroup()


def portions(rows: Sequence[tuple[int, int]], copies: ReplicaGroup) -> list[tuple[int, int]]:
    """Of pieces held by the same ranks, given as (number of rows, bytes of a row): the rows (first, last) that this rank writes."""
    if not copies.count:
        return [(0, 0)] * len(rows)
    total = sum(count * size for count, size in rows)
    # What is not worth sharing is not strewn over the files of thousands of ranks, for each rank that loads would look into them all.
    writers = min(copies.count, -(-total // _LEAST) or 1)
    low, high = (total * min(place, writers) // writers for place in (copies.index, copies.index + 1))
    found, begin = [], 0
    for count, size in rows:
        found.append((_row(low - begin, count, size), _row(high - begin, count, size)))
        begin += count * size
    return found


def _row(byte: int, count: int, size: int) -> int:
    """The first row that begins at a byte or after it; the same for the rank that ends there and for the one that begins."""
    return min(max(-(-byte // size), 0), count) if size else 0


class OffloadedTensor(Protocol):
    """A tensor that is not in memory: in a file, to be read and written as a whole."""

    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        """Its values, in memory of its own or in that of `into`, of the same shape and in one piece."""

    def write(self, values: Tensor, /) -> None: ...


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of the training state on this rank: its live values, the slice of the whole that they are, and which ranks hold the same."""

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
    def whole(self) -> tuple[int, ...]:
        return self.slice.whole

    @property
    def offset(self) -> tuple[int, ...]:
        return self.slice.offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slice.shape

    @property
    def empty(self) -> bool:
        return self.slice.empty

    @property
    def box(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=torch.Size(self.shape))

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole tensor, over all ranks."""
        return math.prod(self.whole) * self.tensor.dtype.itemsize


def as_state_tensors(tensors: Mapping[str, Tensor | StateTensor]) -> dict[str, StateTensor]:
    """Plain tensors become state tensors that this rank holds all of."""
    return {name: value if isinstance(value, StateTensor) else StateTensor.full(value) for name, value in tensors.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a piece that this rank writes."""

    name: str
    piece: StateTensor
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.last - self.first, *self.piece.shape[1:]) if self.piece.shape else ()

    @property
    def offset(self) -> tuple[int, ...]:
        return (self.piece.offset[0] + self.first, *self.piece.offset[1:]) if self.piece.shape else ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.piece.tensor.dtype.itemsize

    def of(self, values: Tensor) -> Tensor:
        """These rows of the piece's values."""
        return values[self.first : self.last] if self.piece.shape else values


def written(tensors: Mapping[str, StateTensor]) -> list[Part]:
    """What this rank writes of what it holds, in the order of names."""
    groups: dict[ReplicaGroup, list[str]] = {}
    for name in sorted(tensors):
        if not tensors[name].empty:
            groups.setdefault(tensors[name].replicas, []).append(name)
    found = []
    for copies, names in groups.items():
        shapes = [(tensors[name].shape or (1,), tensors[name].tensor.dtype.itemsize) for name in names]
        rows = [(shape[0], math.prod(shape[1:]) * size) for shape, size in shapes]
        found += [
            Part(name, tensors[name], first, last)
            for name, (first, last) in zip(names, portions(rows, copies), strict=True)
            if last > first
        ]
    return sorted(found, key=lambda part: part.name)


class SavePieces(dcp.DefaultSavePlanner):
    """Writes this rank's parts. The plan needs nobody else: `checkpointing/state_tensor` gave each part to one rank."""

    def __init__(self, parts: list[Part]):
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(part) for part in self._parts], planner_data={})
        return self.plan


def _write_item(part: Part) -> WriteItem:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=torch.Size(part.shape)),
        properties=TensorProperties(dtype=part.piece.tensor.dtype),
        size=torch.Size(part.piece.whole),
    )
    return WriteItem(index=MetadataIndex(part.name, torch.Size(part.offset)), type=WriteItemType.SHARD, tensor_data=data)


class LoadPieces(dcp.DefaultLoadPlanner):
    """Reads into pieces, from whatever boxes were saved: only the rows that a piece needs.

    What is not in memory is borrowed while its parts arrive, and written back with the last of them.
    """

    def __init__(self, tensors: Mapping[str, StateTensor]):
        super().__init__()
        self._pieces = tensors
        self._borrowed: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            if 0 in piece.whole:
                continue  # it has no values, and no file has a word about it
            found = self.metadata.state_dict_metadata.get(name)
            if not isinstance(found, TensorStorageMetadata):
                raise RunFailed(f"The checkpoint has no tensor {name}: it was saved by a run of other settings.")
            if tuple(found.size) != piece.whole:
                raise RunFailed(
                    f"The checkpoint has {name} of shape {list(found.size)}, but this run has {list(piece.whole)}: it was saved by a "
                    "run of other settings."
                )
            if not piece.empty:
                wanted = create_read_items_for_chunk_list(name, found, [piece.box])
                if sum(math.prod(item.lengths) for item in wanted) != math.prod(piece.shape):
                    raise RunFailed(
                        f"The checkpoint does not hold all of {name}: values of this rank's part are in none of its files."
                    )
                self._missing[name] = len(wanted)
                items += wanted
        return LoadPlan(items)

    def elsewhere(self, item: ReadItem) -> bool:
        """Whether what is read goes where only whole tensors go."""
        return not isinstance(self._pieces[item.dest_index.fqn].tensor, Tensor)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        name = read_item.dest_index.fqn
        found = self._pieces[name].tensor
        if isinstance(found, Tensor):
            region = found.detach()
        else:
            if name not in self._borrowed:
                self._borrowed[name] = found.read()
            region = self._borrowed[name]
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            region = region.narrow(dimension, offset, length)
        return region

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        name = read_item.dest_index.fqn
        found = self._pieces[name].tensor
        self._missing[name] -= 1
        if not isinstance(found, Tensor) and not self._missing[name]:
            found.write(self._borrowed.pop(name))
