"""Boxes of tensors in a checkpoint's files, as storage for torch's distributed checkpoint: its planners decide what is moved,
these move it. Each rank writes one file and reads, of any files, the rows it needs, with their blocks checked on the way."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.checkpointing import blocks, disk, image
from phalanx.checkpointing.blocks import BLOCK, Checked
from phalanx.checkpointing.image import Box
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.pieces import LoadPieces, Part
from phalanx.spec.errors import RunFailed

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the name that safetensors gives them."""
WORDS = {dtype: word for word, dtype in DTYPES.items()}
_OPEN = 8  # files open for reading at once, each with a few blocks in memory


def laid_out(parts: list[Part]) -> list[Part]:
    """In the order in which they stand in a file: wide formats first, so that each begins where its format may."""
    return sorted(parts, key=lambda part: (-part.piece.tensor.dtype.itemsize, part.name))


def box(part: Part) -> Box:
    dtype = WORDS.get(part.piece.tensor.dtype)
    if dtype is None:
        raise RunFailed(
            f"{part.name} is in {part.piece.tensor.dtype}, which a checkpoint has no name for: keep it in {', '.join(DTYPES)}."
        )
    return Box(part.name, dtype, part.piece.whole, part.offset, part.shape)


def raw(values: Tensor) -> memoryview:
    """The memory of a tensor on the host, in one piece."""
    return values.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def live(parts: list[Part]) -> Iterator[memoryview]:
    """The bytes of parts as they are now, a block at a time where they are not in this machine's memory already."""
    for part in parts:
        found = part.piece.tensor
        values = part.of(found.detach() if isinstance(found, Tensor) else found.read())
        if values.is_cpu and values.is_contiguous():
            yield raw(values)
            continue
        rows = values if values.ndim else values.view(1)
        step = max(1, BLOCK // max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize))
        for first in range(0, len(rows), step):
            yield raw(rows[first : first + step].cpu())


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank says of the state beside its own file."""

    stage: int
    """Ranks with the same number hold parts of the same tensors."""
    names: Mapping[str, int] | None
    """Their names and the bytes of the whole, from one rank of each stage."""


class Writer(dcp.StorageWriter):
    """One rank's file and what tells about it. `chunks`: the bytes of the parts, in order."""

    def __init__(self, folder: Location, file: str, parts: list[Part], chunks: Iterable[memoryview], holding: Holding):
        self._folder, self._file, self._parts, self._chunks, self._holding = folder, file, parts, chunks, holding
        self.bytes = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        head = image.header([box(part) for part in self._parts])
        digests = blocks.write(self._folder / self._file, _after(head, self._chunks))
        written = sum(part.bytes for part in self._parts)
        self.bytes = len(head) + written
        about = image.about(self._file, self.bytes, written, digests) | {"stage": self._holding.stage}
        if self._holding.names is not None:
            about["names"] = dict(self._holding.names)
        blocks.write(self._folder / image.beside(self._file), [json.dumps(about).encode() + b"\n"])
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=item.index, size_in_bytes=0, storage_data=None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the files themselves tell what they hold, and the commit marker that all are there."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _after(head: bytes, chunks: Iterable[memoryview]) -> Iterator[memoryview | bytes]:
    yield head
    yield from chunks


class Reader(dcp.StorageReader):
    """A checkpoint's tensors, or those of the given names. DamagedCheckpoint where a byte that is read is not what was saved."""

    def __init__(self, path: Location, names: Iterable[str] | None = None):
        self.path, self.marker = path, disk.read_marker(path)
        self._names = None if names is None else set(names)
        self._open: OrderedDict[str, Checked] = OrderedDict()
        self.boxes: dict[MetadataIndex, tuple[str, Box]] = {}
        """By name and offset: the file, and where in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, TensorStorageMetadata] = {}
        for file, entry in self.marker["files"].items():
            if not file.endswith(image.SUFFIX) or not self._wanted(entry["stage"]):
                continue
            for one in self._boxes(file):
                if self._names is not None and one.name not in self._names:
                    continue
                tensor = found.get(one.name)
                if tensor is None:
                    properties = TensorProperties(dtype=DTYPES[one.dtype])
                    tensor = found[one.name] = TensorStorageMetadata(properties, torch.Size(one.whole), [])
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)))
                self.boxes[MetadataIndex(one.name, torch.Size(one.offset))] = (file, one)
        return Metadata(state_dict_metadata=dict(found), storage_data=self.boxes)

    def _wanted(self, stage: int) -> bool:
        return self._names is None or not self._names.isdisjoint(self.marker["names"][stage])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # File by file, each from its beginning to its end; but what is borrowed from elsewhere, one tensor after the other.
        apart = planner.elsewhere if isinstance(planner, LoadPieces) else lambda item: False
        for item in sorted((item for item in plan.items if not apart(item)), key=self._order):
            self._move(item, planner)
        for item in plan.items:
            if apart(item):
                self._move(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _order(self, item: ReadItem) -> tuple[str, int]:
        file, found = self._found(item)
        return file, found.begin

    def _found(self, item: ReadItem) -> tuple[str, Box]:
        index = item.storage_index
        return self.boxes[MetadataIndex(index.fqn, index.offset)]

    def _move(self, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item)
        self.read(item, target)
        planner.commit_tensor(item, target)

    def read(self, item: ReadItem, target: Tensor) -> None:
        """The values that an item names, into a tensor of that shape, in whatever format it has."""
        file, found = self._found(item)
        offsets, lengths = (tuple(item.storage_offsets), tuple(item.lengths)) if found.shape else ((0,), (1,))
        shape = found.shape or (1,)
        rows = target if found.shape else target.view(1)
        dtype = DTYPES[found.dtype]
        row = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, BLOCK // row)
        for first in range(0, lengths[0], step):
            count = min(step, lengths[0] - first)
            buffer = torch.empty(count * row, dtype=torch.uint8)
            with self._damage():
                self._checked(file).read(found.begin + (offsets[0] + first) * row, raw(buffer))
            values = buffer.view(dtype).view(count, *shape[1:])
            for dimension in range(1, len(shape)):
                values = values.narrow(dimension, offsets[dimension], lengths[dimension])
            rows.narrow(0, first, count).copy_(values)

    def _boxes(self, file: str) -> list[Box]:
        with self._damage():
            try:
                return image.boxes(self._checked(file), self.marker["files"][file]["bytes"])
            except (ValueError, KeyError, TypeError) as error:
                raise blocks.Damaged(f"its file {file} has a header that cannot be read ({error})") from None

    def _checked(self, file: str) -> Checked:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        beside = image.beside(file)
        text = (self.path / beside).read()
        if blocks.whole_of(text) != self.marker["files"][beside]["sha256"]:
            raise blocks.Damaged(f"its file {beside} does not have the contents that were saved")
        self._open[file] = Checked(self.path / file, self.marker["files"][file]["bytes"], json.loads(text)["sha256"])
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)[1].close()
        return self._open[file]

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except blocks.Damaged as error:
            raise disk.DamagedCheckpoint(str(self.path), str(error)) from None
        except OSError as error:
            raise disk.DamagedCheckpoint(str(self.path), f"it cannot be read ({error})") from error

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
