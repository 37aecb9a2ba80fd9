"""Parts of tensors, by name and place: what a rank saves and restores, whatever the layout. `checkpointing/save` and `load` hand
these planners to torch's distributed checkpoint, which then moves exactly the bytes that each rank writes or needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.checkpointing.write_partition import ALONE, Copies, portions
from phalanx.spec.errors import RunFailed


class Elsewhere(Protocol):
    """A tensor that is not in memory: in a file, to be read and written as a whole."""

    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        """Its values, in memory of its own or in that of `into`, of the same shape and in one piece."""

    def write(self, values: Tensor, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: the live values, the shape of the whole, where the box begins in it, and who else holds it."""

    tensor: Tensor | Elsewhere
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    copies: Copies = ALONE
    steady: bool = True
    """Only an update of the optimizer changes it. A module's buffer may change in any forward."""

    @staticmethod
    def of(tensor: Tensor, copies: Copies = ALONE) -> Piece:
        """All of it."""
        return Piece(tensor, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape), copies)

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    @property
    def box(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=torch.Size(self.shape))

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.whole) * self.tensor.dtype.itemsize


def pieces(tensors: Mapping[str, Tensor | Piece]) -> dict[str, Piece]:
    """Whole tensors as pieces too."""
    return {name: found if isinstance(found, Piece) else Piece.of(found) for name, found in tensors.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a piece that this rank writes."""

    name: str
    piece: Piece
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


def written(pieces: Mapping[str, Piece]) -> list[Part]:
    """What this rank writes of what it holds, in the order of names."""
    groups: dict[Copies, list[str]] = {}
    for name in sorted(pieces):
        if not pieces[name].empty:
            groups.setdefault(pieces[name].copies, []).append(name)
    found = []
    for copies, names in groups.items():
        shapes = [(pieces[name].shape or (1,), pieces[name].tensor.dtype.itemsize) for name in names]
        rows = [(shape[0], math.prod(shape[1:]) * size) for shape, size in shapes]
        found += [
            Part(name, pieces[name], first, last)
            for name, (first, last) in zip(names, portions(rows, copies), strict=True)
            if last > first
        ]
    return sorted(found, key=lambda part: part.name)


class SavePieces(dcp.DefaultSavePlanner):
    """Writes this rank's parts. The plan needs nobody else: `checkpointing/write_partition` gave each part to one rank."""

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

    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__()
        self._pieces = pieces
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
