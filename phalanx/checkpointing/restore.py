"""State from storage, into tensors that already lie where they belong. Called by the trainer, by sampling and by import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.checkpointing.format import BLOCK, Box
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.quiet import quiet
from phalanx.checkpointing.shard_io import Reader
from phalanx.checkpointing.state_tensor import LoadPieces, StateTensor, as_state_tensors
from phalanx.checkpointing.storage import open_location
from phalanx.spec.errors import PhalanxError


def load(path: Location | Path, tensors: Mapping[str, Tensor | StateTensor]) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint of any layout; returns the plain values saved beside them.

    Each rank reads for itself, and only the rows it needs; what it reads is compared with the checksums. DamagedCheckpoint where
    something is wrong, and then the tensors may hold some of the new values and some of the old.
    """
    wanted = as_state_tensors(tensors)
    reader = Reader(open_location(path), wanted)
    try:
        reader.read_metadata()  # here, as torch would tell of a failure in words of its own
        with quiet():
            dcp.load({}, storage_reader=reader, planner=LoadPieces(wanted), no_dist=True)
    except CheckpointException as error:
        raise cause(error) from error
    finally:
        reader.close()
    return reader.marker


def cause(error: BaseException) -> BaseException:
    """What went wrong, out of the wrapping that torch gives it."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def failure_text(error: BaseException) -> str:
    """In words."""
    found = cause(error)
    if isinstance(found, OSError) and found.strerror:
        return f"{found.strerror} ({found.filename})" if found.filename else found.strerror
    return str(found) if isinstance(found, PhalanxError) else f"{type(found).__name__}: {found}"


class CheckpointReader:
    """A checkpoint's tensors by name, read one at a time, and each a few rows at a time."""

    def __init__(self, path: Location | Path):
        self.path = open_location(path)
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
