"""Checkpoints written and read a part at a time, for models larger than memory. Called by `phalanx import`, `export` and
`checkpoint`.

What is written is a checkpoint like any other: training, sampling and export read it with `checkpointing/restore`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.checkpointing import checksums, directory, rank_file
from phalanx.checkpointing.checksums import BLOCK
from phalanx.checkpointing.location import Location, at
from phalanx.checkpointing.rank_file import Box
from phalanx.checkpointing.shard_io import WORDS, Holding, Reader, raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and how to get its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A tensor that is not whole in memory, where its chunks follow each other as its values do."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]

    @property
    def in_order(self) -> bool:
        starts = [_start(chunk.offsets, self.shape) for chunk in self.chunks]
        sizes = [math.prod(chunk.sizes) for chunk in self.chunks]
        following = all(second - first == size for (first, second), size in zip(pairwise(starts), sizes, strict=False))
        return following and all(_in_one_piece(chunk.sizes, self.shape) for chunk in self.chunks)

    def values(self) -> Iterator[memoryview]:
        """All of its bytes, in order."""
        if self.in_order:
            for chunk in self.chunks:
                yield raw(chunk.read())
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = chunk.read()
        yield raw(whole)


def _start(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    place = 0
    for offset, size in zip(offsets, shape, strict=True):
        place = place * size + offset
    return place


def _in_one_piece(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box's values stand side by side in the whole: ones first, then a range, then all."""
    cut = [dim for dim, (size, all_) in enumerate(zip(sizes, shape, strict=True)) if size != all_]
    return not cut or all(size == 1 for size in sizes[: cut[-1]])


def write(checkpoints: Location | Path, step: int, tensors: Sequence[Streamed], contents: dict[str, Any]) -> Location:
    """Write a checkpoint of `tensors`, chunk by chunk, with `contents` beside them; returns where it is."""
    partial = directory.begin(checkpoints, step)
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    whole = [Box(t.name, WORDS[t.dtype], t.shape, (0,) * len(t.shape), t.shape) for t in ordered]
    holding = Holding(0, {box.name: box.bytes for box in whole})
    write_file(partial, (0, 1), whole, (part for tensor in ordered for part in tensor.values()), holding)
    return directory.commit(partial, contents | {"step": step})


def write_file(
    folder: Location, place: tuple[int, int], boxes: Sequence[Box], values: Iterator[memoryview], holding: Holding
) -> None:
    """One rank's file of a checkpoint, and what tells about it, where all ranks are written by one process; `place`: rank, ranks."""
    name, head = rank_file.file_name(*place), rank_file.header(boxes)

    def chunks() -> Iterator[memoryview | bytes]:
        yield head
        yield from values

    sums = checksums.write(folder / name, chunks())
    size = sum(box.bytes for box in boxes)
    about = rank_file.about(name, len(head) + size, size, sums, boxes) | {"stage": holding.stage}
    if holding.names is not None:
        about["names"] = dict(holding.names)
    checksums.write(folder / rank_file.beside(name), [json.dumps(about).encode() + b"\n"])


class Saved:
    """A checkpoint's tensors by name, read one at a time, and each a few rows at a time."""

    def __init__(self, path: Location | Path):
        self.path = at(path)
        self._reader = Reader(self.path)
        self.contents = self._reader.marker
        metadata = self._reader.read_metadata()
        self._tensors = {
            name: found for name, found in metadata.state_dict_metadata.items() if isinstance(found, TensorStorageMetadata)
        }

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None: there is no such tensor."""
        return tuple(self._tensors[name].size) if name in self._tensors else None

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._tensors[name].properties.dtype
        assert dtype is not None
        return dtype

    def boxes(self, name: str) -> list[tuple[str, Box]]:
        """Where it lies: boxes and the files they are in."""
        return [self._reader.boxes[MetadataIndex(name, chunk.offsets)] for chunk in self._tensors[name].chunks]

    def parts(self, name: str, together: int = 1) -> list[tuple[int, int]]:
        """Ranges of the first dimension that fill a block each, or the fewest rows; so many rows at a time are kept together."""
        shape = self._tensors[name].size or (1,)
        row = math.prod(shape[1:]) * self.dtype(name).itemsize
        step = max(1, BLOCK // max(1, row * together)) * together
        return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """first … last of the first dimension, in the format they are stored in; of a single number, the number."""
        found = self._tensors[name]
        if not found.size:
            return self._read(name, (), ())
        sizes = ((found.size[0] if last is None else last) - first, *found.size[1:])
        return self._read(name, (first, *[0] * (len(sizes) - 1)), sizes)

    def read_box(self, name: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Any box of it."""
        return self._read(name, offset, sizes)

    def _read(self, name: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        box = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(sizes))
        target = torch.empty(sizes, dtype=self.dtype(name))
        for item in create_read_items_for_chunk_list(name, self._tensors[name], [box]):
            region = target
            for dimension, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                region = region.narrow(dimension, begin, length)
            self._reader.read(item, region)
        return target

    def close(self) -> None:
        self._reader.close()
