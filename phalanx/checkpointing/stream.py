"""Checkpoints written and read a part at a time, for models larger than memory. Called by `phalanx import` and `export`.

What is written is a checkpoint like any other: training, sampling and export read it with `checkpointing/load`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.checkpointing import disk
from phalanx.checkpointing.quiet import quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and how to get its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A tensor that is never whole in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]


def write(checkpoints: Path, step: int, tensors: Sequence[Streamed], contents: dict[str, Any]) -> Path:
    """Write a checkpoint of `tensors`, chunk by chunk, with `contents` beside them; returns where it is."""
    partial = disk.folder(checkpoints, step).with_suffix(disk.PARTIAL)
    partial.mkdir(parents=True)
    with quiet():
        dcp.save({}, storage_writer=_Writer(partial), planner=_Planner(tensors), no_dist=True)
    return disk.commit(partial, contents | {"step": step})


class _Writer(dcp.FileSystemWriter):
    """Writes what the library's own writer writes, but lets go of each chunk: that one keeps all until the file is closed."""

    def __init__(self, path: Path):
        super().__init__(path, sync_files=False)  # commit syncs every file once
        self._folder = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        name = "__0_0.distcp"
        with (self._folder / name).open("wb") as file:
            for item in plan.items:
                first = file.tell()
                torch.save(planner.resolve_data(item), file)
                place = _StorageInfo(name, first, file.tell() - first)
                results.append(WriteResult(index=item.index, size_in_bytes=place.length, storage_data=place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _Planner(dcp.DefaultSavePlanner):
    """Hands the writer each chunk when its turn comes."""

    def __init__(self, tensors: Sequence[Streamed]):
        super().__init__()
        self._tensors = tensors
        self._chunks = {_index(tensor, chunk): chunk for tensor in tensors for chunk in tensor.chunks}

    def create_local_plan(self) -> SavePlan:
        items = [_item(tensor, chunk) for tensor in self._tensors for chunk in tensor.chunks]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._chunks[write_item.index].read()


def _index(tensor: Streamed, chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(tensor.name, torch.Size(chunk.offsets))


def _item(tensor: Streamed, chunk: Chunk) -> WriteItem:
    box = ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
    data = TensorWriteData(chunk=box, properties=TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape))
    return WriteItem(index=_index(tensor, chunk), type=WriteItemType.SHARD, tensor_data=data)


class Saved:
    """A checkpoint's tensors by name, read one at a time."""

    def __init__(self, path: Path):
        self.path, self.contents = path, disk.read_marker(path)
        self._reader = dcp.FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            name: found for name, found in metadata.state_dict_metadata.items() if isinstance(found, TensorStorageMetadata)
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None: there is no such tensor."""
        return tuple(self._tensors[name].size) if name in self._tensors else None

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._tensors[name].properties.dtype
        assert dtype is not None
        return dtype

    def parts(self, name: str) -> list[tuple[int, int]]:
        """The finest ranges of the first dimension that were stored apart: reading one of them reads no other."""
        found = self._tensors[name]
        ranges = sorted((box.offsets[0], box.offsets[0] + box.sizes[0]) for box in found.chunks)
        parts: list[tuple[int, int]] = []
        for first, last in ranges:
            if parts and first < parts[-1][1]:
                parts[-1] = (parts[-1][0], max(last, parts[-1][1]))
            else:
                parts.append((first, last))
        return parts

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """first … last of the first dimension, in the format they are stored in."""
        found = self._tensors[name]
        sizes = [(found.size[0] if last is None else last) - first, *found.size[1:]]
        box = ChunkStorageMetadata(offsets=torch.Size([first, *[0] * (len(sizes) - 1)]), sizes=torch.Size(sizes))
        target = torch.empty(sizes, dtype=self.dtype(name))
        items = create_read_items_for_chunk_list(name, found, [box])
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target


class _Into(dcp.DefaultLoadPlanner):
    """Puts whatever is read into its place in one tensor."""

    def __init__(self, target: Tensor):
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        region = self._target
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            region = region.narrow(dimension, offset, length)
        return region

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
