"""Boxes of tensors in a checkpoint's files, as storage for torch's distributed checkpoint: its planners decide what is moved,
these move it. Each rank writes one file and reads, of any files, the rows it needs, with their blocks checked on the way."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.format import BLOCK, Box, Checked
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.state_tensor import LoadPieces, Part, StateTensor
from phalanx.checkpointing.storage import Unreachable, retry
from phalanx.spec.errors import RunFailed
from phalanx.spec.fields import current_tensor, has_own_module, original_tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By the name that safetensors gives them."""
WORDS = {dtype: word for word, dtype in DTYPES.items()}
_READERS = 16  # small files read at once
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
    """The bytes of parts as they are now, gathered into full blocks of the same memory: each is to be used before the next is asked
    for. Whole pages, so that a disk can take them directly."""
    pinned = any(isinstance(part.piece.tensor, Tensor) and part.piece.tensor.is_cuda for part in parts)
    block = (
        torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        if pinned
        else torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8)
    )
    filled = 0
    for part in parts:
        found = part.piece.tensor
        values = part.of(found.detach() if isinstance(found, Tensor) else found.read())
        left = values.contiguous().view(-1).view(torch.uint8)
        while len(left):
            taken = min(len(left), BLOCK - filled)
            block[filled : filled + taken].copy_(left[:taken])
            left, filled = left[taken:], filled + taken
            if filled == BLOCK:
                yield raw(block)
                filled = 0
    if filled:
        yield raw(block[:filled])


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank says of the state beside its own file."""

    stage: int
    """Ranks with the same number hold parts of the same tensors."""
    names: Mapping[str, int] | None
    """Their names and the bytes of the whole, from one rank of each stage."""


Chunks = Callable[[], Iterable[memoryview]]
"""A list, where the bytes stay as they are."""


class Writer(dcp.StorageWriter):
    """One rank's file and what tells about it. `chunks` gives the bytes of the parts, in order."""

    def __init__(self, folder: Location, file: str, parts: list[Part], chunks: Chunks, holding: Holding):
        self._folder, self._file, self._parts, self._chunks, self._holding = folder, file, parts, chunks, holding
        self.bytes = 0
        self.begun = time.perf_counter()
        """When the first byte could be written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        boxes = [box(part) for part in self._parts]
        head = format.header(boxes)
        chunks = self._chunks()
        self.begun = time.perf_counter()
        try:
            sums = format.write(self._folder / self._file, _after(head, chunks))
        except ConnectionError:  # of a store: the bytes are still here, to be sent once more from the first
            file = self._folder / self._file
            sums = retry(f"{file} cannot be written", lambda: format.write(file, _after(head, self._chunks())))
        written = sum(part.bytes for part in self._parts)
        self.bytes = len(head) + written
        about = format.about(self._file, self.bytes, written, sums, boxes) | {"stage": self._holding.stage}
        if self._holding.names is not None:
            about["names"] = dict(self._holding.names)
        format.write(self._folder / format.beside(self._file), [json.dumps(about).encode() + b"\n"])
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


def _after(head: bytes, chunks: Iterable[memoryview]) -> Iterable[memoryview | bytes]:
    return [head, *chunks] if isinstance(chunks, list) else itertools.chain([head], chunks)


def overlap(offset: Sequence[int], shape: Sequence[int], piece: StateTensor) -> bool:
    """Whether a box and a piece of the same tensor have numbers in common."""
    if len(offset) != len(piece.offset):
        return True  # of another tensor with this name, then: whoever plans the reading says so
    places = zip(offset, shape, piece.offset, piece.shape, strict=True)
    return all(first < begin + length and begin < first + count for first, count, begin, length in places)


class Reader(dcp.StorageReader):
    """A checkpoint's tensors, or those of the given names, or those boxes of them that the given pieces need (of a tensor of which
    nothing is needed, one, as it tells the shape). DamagedCheckpoint where a byte that is read is not what was saved."""

    def __init__(self, path: Location, names: Iterable[str] | Mapping[str, StateTensor] | None = None):
        self.path, self.marker = path, directory.read_marker(path)
        self._names = None if names is None else set(names)
        self._translates = not has_own_module(self.marker.get("run", ""))
        self._pieces = names if isinstance(names, Mapping) else None
        self._open: OrderedDict[str, Checked] = OrderedDict()
        self.boxes: dict[MetadataIndex, tuple[str, Box]] = {}
        """By name and offset: the file, and where in it."""
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is; read once."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> Metadata:
        found: dict[str, TensorStorageMetadata] = {}
        for file in self._holders(found):
            for one in self._boxes(file):
                if self._translates:
                    one = replace(one, name=current_tensor(one.name))
                if self._names is not None and one.name not in self._names:
                    continue
                tensor = found.get(one.name)
                if (
                    tensor is not None
                    and self._pieces is not None
                    and not overlap(one.offset, one.shape, self._pieces[one.name])
                ):
                    continue
                if tensor is None:
                    properties = TensorProperties(dtype=DTYPES[one.dtype])
                    tensor = found[one.name] = TensorStorageMetadata(properties, torch.Size(one.whole), [])
                tensor.chunks.append(ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)))
                self.boxes[MetadataIndex(one.name, torch.Size(one.offset))] = (file, one)
        return Metadata(state_dict_metadata=dict(found), storage_data=self.boxes)

    def _holders(self, found: Mapping[str, Any]) -> Iterator[str]:
        """The files with something of what is wanted. Of thousands a rank needs a few, so their headers are not all read: what is
        told beside them is. `found`: names of which a box is known."""
        named = [n for n, e in self.marker["files"].items() if n.endswith(format.SUFFIX) and self._wanted(e["stage"])]
        if self._pieces is None:
            yield from named
            return
        marked: dict[int, list[tuple[str, StateTensor]]] = {}
        for name, piece in self._pieces.items():
            for saved in {name, original_tensor(name)}:
                marked.setdefault(format.mark(saved), []).append((name, piece))

        def useful(entry: str) -> bool:
            mark, *place = map(int, entry.split())
            half = len(place) // 2
            return any(name not in found or overlap(place[:half], place[half:], piece) for name, piece in marked.get(mark, ()))

        with ThreadPoolExecutor(_READERS) as pool:  # far away, a small file takes long
            for file, text in zip(named, pool.map(self._beside, named), strict=True):
                boxes = json.loads(text).get("boxes")
                if boxes is None or any(map(useful, filter(None, boxes.split(";")))):
                    yield file

    def _wanted(self, stage: int) -> bool:
        saved = self.marker["names"][stage]
        return self._names is None or not self._names.isdisjoint(map(current_tensor, saved) if self._translates else saved)

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
            buffer = torch.frombuffer(
                mmap.mmap(-1, count * row), dtype=torch.uint8
            )  # not from the allocator, which would keep it
            with self._damage():
                self._checked(file).read(found.begin + (offsets[0] + first) * row, raw(buffer))
            values = buffer.view(dtype).view(count, *shape[1:])
            for dimension in range(1, len(shape)):
                values = values.narrow(dimension, offsets[dimension], lengths[dimension])
            rows.narrow(0, first, count).copy_(values)

    def _boxes(self, file: str) -> list[Box]:
        told, size = json.loads(self._beside(file)), self.marker["files"][file]["bytes"]
        with self._damage():
            try:
                if "header" not in told:
                    return format.boxes(self._checked(file), size)
                head = (self.path / file).read(0, size - told["tensors"])
                if zlib.crc32(head) != told["header"]:
                    raise format.Damaged(f"its file {file} does not have the contents that were saved (its header)")
                return format.parsed(head)
            except (ValueError, KeyError, TypeError) as error:
                raise format.Damaged(f"its file {file} has a header that cannot be read ({error})") from None

    def _checked(self, file: str) -> Checked:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        sums = json.loads(self._beside(file))["crc32"]
        self._open[file] = Checked(self.path / file, self.marker["files"][file]["bytes"], sums)
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)[1].close()
        return self._open[file]

    def _beside(self, file: str) -> bytes:
        """What tells about it."""
        beside = format.beside(file)
        with self._damage():
            text = (self.path / beside).read()
            if format.whole_of(text) != self.marker["files"][beside]["checksum"]:
                raise format.Damaged(f"its file {beside} does not have the contents that were saved")
        return text

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except format.Damaged as error:
            raise directory.DamagedCheckpoint(str(self.path), str(error)) from None
        except Unreachable:
            raise  # which says nothing of what lies there
        except OSError as error:
            raise directory.DamagedCheckpoint(str(self.path), f"it cannot be read ({error})") from error

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
