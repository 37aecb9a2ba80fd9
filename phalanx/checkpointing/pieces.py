"""Parts of tensors, by name and place: what a rank saves and restores, whatever the layout. `checkpointing/save` and `load` hand
these planners to torch's distributed checkpoint, which then moves exactly the bytes that each rank holds."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.spec.errors import RunFailed


class Elsewhere(Protocol):
    """A tensor that is not in memory: in a file, to be read and written as a whole."""

    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        """Its values, in memory of its own or in that of `into`, of the same shape and in one piece."""

    def write(self, values: Tensor, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: the live values, the shape of the whole, and where the box begins in it."""

    tensor: Tensor | Elsewhere
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Piece:
        """All of it."""
        return Piece(tensor, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    @property
    def box(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=torch.Size(self.shape))


def pieces(tensors: Mapping[str, Tensor | Piece]) -> dict[str, Piece]:
    """Whole tensors as pieces too."""
    return {name: found if isinstance(found, Piece) else Piece.of(found) for name, found in tensors.items()}


class SavePieces(dcp.DefaultSavePlanner):
    """Writes pieces. Those that several ranks hold alike are written once, by turns."""

    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__()
        self._pieces = pieces
        self._passage: mmap.mmap | None = None

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, piece) for name, piece in self._pieces.items() if not piece.empty]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Asked for when the tensor before has been written. torch keeps all that it is given until the file is complete: what is
        not in memory as it is to be written passes through the same memory, one after the other."""
        piece = self._pieces[write_item.index.fqn]
        found = piece.tensor
        if isinstance(found, Tensor) and found.is_cpu and found.untyped_storage().nbytes() == found.nbytes:
            return found.detach()
        if self._passage is None:
            size = max(math.prod(piece.shape) * piece.tensor.dtype.itemsize for piece in self._pieces.values())
            self._passage = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        passage = torch.frombuffer(self._passage, dtype=found.dtype, count=math.prod(piece.shape)).view(piece.shape)
        return passage.copy_(found.detach()) if isinstance(found, Tensor) else found.read(passage)


def _write_item(name: str, piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.tensor.dtype)
    data = TensorWriteData(chunk=piece.box, properties=properties, size=torch.Size(piece.whole))
    return WriteItem(index=MetadataIndex(name, torch.Size(piece.offset)), type=WriteItemType.SHARD, tensor_data=data)


class LoadPieces(dcp.DefaultLoadPlanner):
    """Reads into pieces, from whatever boxes were saved: only the bytes that a piece needs."""

    def __init__(self, pieces: Mapping[str, Piece]):
        super().__init__()
        self._pieces = pieces
        self._borrowed: dict[int, Tensor] = {}  # by the item: the tensor comes back as another view

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            found = self.metadata.state_dict_metadata.get(name)
            if not isinstance(found, TensorStorageMetadata):
                raise RunFailed(f"The checkpoint has no tensor {name}: it was saved by a run of other settings.")
            if tuple(found.size) != piece.whole:
                raise RunFailed(
                    f"The checkpoint has {name} of shape {list(found.size)}, but this run has {list(piece.whole)}: it was saved by a "
                    "run of other settings."
                )
            if not piece.empty:
                items += create_read_items_for_chunk_list(name, found, [piece.box])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        found = self._pieces[read_item.dest_index.fqn].tensor
        target = found.detach() if isinstance(found, Tensor) else found.read()
        region = target
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            region = region.narrow(dimension, offset, length)
        if not isinstance(found, Tensor):
            self._borrowed[id(read_item)] = target
        return region

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        found = self._pieces[read_item.dest_index.fqn].tensor
        if not isinstance(found, Tensor):
            found.write(self._borrowed.pop(id(read_item)))
