"""A rank's file of a checkpoint: a safetensors file whose tensors are boxes, with their places in its header as torch's
distributed checkpoint writes them for such files (its HuggingFaceStorageReader reads them). Knows no tensors.

    state-00003-of-00008.safetensors    this rank's boxes
    state-00003-of-00008.json           checksums of the file's blocks; the names that the rank's stage holds, where it speaks for it
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from phalanx.checkpointing.location import Local, Location
from phalanx.spec.safetensors_index import SIZES

SUFFIX = ".safetensors"
_PLACES = "DCP_SHARDING_INFO"
_ALIGNED = 4096  # a page: where it stands, and where the values behind it begin, a disk can take them directly


def file_name(rank: int, ranks: int) -> str:
    return f"state-{rank:05d}-of-{ranks:05d}{SUFFIX}"


def beside(file: str) -> str:
    """The name of what tells about a file of boxes."""
    return file.removesuffix(SUFFIX) + ".json"


def about(file: str, size: int, tensors: int, sums: list[int], boxes: Sequence[Box] | None = None) -> dict[str, Any]:
    """What is told about a file of boxes: its bytes, those of them that are values, its blocks' checksums and, in short, its boxes."""
    found = {"file": file, "bytes": size, "tensors": tensors, "block": BLOCK, "crc32": sums}
    if boxes is None:
        return found
    found["header"] = zlib.crc32(header(boxes))  # so that whoever looks for boxes need not read a block to trust its first page
    # As one string: whoever reads thousands of these for their checksums has no need to take it apart.
    return found | {"boxes": ";".join(" ".join(map(str, (mark(box.name), *box.offset, *box.shape))) for box in boxes)}


def mark(name: str) -> int:
    """A short sign for a tensor. Two may have the same: then a file is looked into in vain."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor in a file."""

    name: str
    dtype: str
    """As safetensors writes it."""
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int = 0
    """Its first byte in the file."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def header(boxes: Sequence[Box]) -> bytes:
    """What stands before the boxes, which follow in this order without a gap. One box of a tensor, at most."""
    table: dict[str, object] = {}
    places, begin = {}, 0
    for box in boxes:
        assert box.name not in table, f"two boxes of {box.name} in one file"
        table[box.name] = {"dtype": box.dtype, "shape": box.shape, "data_offsets": [begin, begin + box.bytes]}
        places[box.name] = {"saved_offsets": box.offset, "whole": box.whole}
        begin += box.bytes
    table["__metadata__"] = {_PLACES: json.dumps(places), "format": "pt"}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def boxes(file: Checked, size: int) -> list[Box]:
    """The boxes of a file, in order; ValueError where its header is not one of these."""
    start = bytearray(8)
    file.read(0, memoryview(start), ahead=False)
    length = int.from_bytes(start, "little")
    if length > size - 8:
        raise ValueError(f"a header of {length} bytes does not fit into {size}")
    text = bytearray(8 + length)
    file.read(0, memoryview(text), ahead=False)  # perhaps nothing else of this file is needed
    return parsed(text)


def parsed(head: bytes | bytearray) -> list[Box]:
    """The boxes that a header tells of, in order; ValueError, KeyError or TypeError where it is not one of these."""
    length = len(head) - 8
    if int.from_bytes(head[:8], "little") != length:
        raise ValueError(f"it announces another length than {length} bytes")
    table = json.loads(head[8:])
    places = json.loads(table.pop("__metadata__")[_PLACES])
    found = []
    for name, entry in table.items():
        place = places[name]
        whole, offset, shape = tuple(place["whole"]), tuple(place["saved_offsets"]), tuple(entry["shape"])
        found.append(Box(name, entry["dtype"], whole, offset, shape, 8 + length + entry["data_offsets"][0]))
    return sorted(found, key=lambda box: box.begin)


BLOCK = 16 << 20
_KEPT = 4  # blocks of a file that is being read: neighbours share them


def whole(sums: Sequence[int]) -> str:
    """A file's checksum from its blocks'."""
    return hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in sums)).hexdigest()


def whole_of(contents: bytes) -> str:
    """The checksum that a file of these contents has."""
    sums = Sums()
    sums.add(contents)
    return whole(sums.all())


def digest(file: Location) -> str:
    """A file's checksum, its blocks read one after the other."""
    size = file.size() or 0
    return whole([zlib.crc32(file.read(begin, min(BLOCK, size - begin))) for begin in range(0, max(size, 1), BLOCK)])


class Sums:
    """The blocks' checksums of a file that comes in pieces of any length."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._open, self._filled = 0, 0

    def add(self, chunk: memoryview | bytes) -> None:
        left = memoryview(chunk).cast("B")
        while left:
            part = left[: BLOCK - self._filled]
            self._open = zlib.crc32(part, self._open)
            left, self._filled = left[len(part) :], self._filled + len(part)
            if self._filled == BLOCK:
                self._found.append(self._open)
                self._open, self._filled = 0, 0

    def all(self) -> list[int]:
        return [*self._found, self._open] if self._filled or not self._found else self._found


def write(file: Location, chunks: Iterable[memoryview | bytes]) -> list[int]:
    """Write a file from pieces of any length; returns its blocks' checksums.

    Of a list, which stays as it is, they are taken by a thread of its own from beginning to end; of anything else, whose chunks
    may change as soon as the next is asked for, beside the writing of each.
    """
    sums, sink = Sums(), file.sink()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside:
            summed = beside.submit(_sum, sums, chunks) if isinstance(chunks, list) else None
            for part in _parts(chunks):
                waiting = None if summed else beside.submit(sums.add, part)
                sink.write(part)
                if waiting is not None:
                    waiting.result()
            sink.close()
    except BaseException:
        sink.abandon()
        raise
    return sums.all()


def _parts(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        yield from (view[begin : begin + BLOCK] for begin in range(0, len(view), BLOCK))


def _sum(sums: Sums, chunks: Iterable[memoryview | bytes]) -> None:
    for chunk in chunks:
        sums.add(chunk)


class Damaged(Exception):
    """A file does not have the contents that were saved."""


class Checked:
    """A file of which any bytes can be read, each block compared with its checksum. Not for several threads at once."""

    def __init__(self, file: Location, size: int, sums: Sequence[int]):
        self._file, self._size, self._sums = file, size, sums
        if len(sums) != max(1, math.ceil(size / BLOCK)):
            raise Damaged(f"its file {file.name} has checksums of {len(sums)} blocks for {size} bytes")
        self._blocks: OrderedDict[int, Future[bytes | memoryview]] = OrderedDict()
        self._ahead = ThreadPoolExecutor(2)

    def read(self, begin: int, into: memoryview, *, ahead: bool = True) -> None:
        """Bytes that lie in the file, as many as `into` takes. `ahead`: those that follow are likely to be asked for next."""
        end = begin + len(into)
        if begin < 0 or end > self._size:
            raise Damaged(f"its file {self._file.name} has {self._size} bytes, of which {begin} to {end} were asked for")
        first, last = begin // BLOCK, (max(end - 1, begin)) // BLOCK
        for number in range(first, last + 1):
            waiting = self._fetch(number)
            if number < last or (ahead and number + 1 < len(self._sums)):
                self._fetch(number + 1)
            block = waiting.result()
            part = memoryview(block)[max(0, begin - number * BLOCK) : end - number * BLOCK]
            into[: len(part)] = part
            into = into[len(part) :]

    def _fetch(self, number: int) -> Future[bytes | memoryview]:
        if number in self._blocks:
            self._blocks.move_to_end(number)
        else:
            self._blocks[number] = self._ahead.submit(self._block, number)
            while len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[number]

    def _block(self, number: int) -> bytes | memoryview:
        begin = number * BLOCK
        wanted = min(BLOCK, self._size - begin)
        block = self._file.block(begin, wanted) if isinstance(self._file, Local) else self._file.read(begin, wanted)
        if len(block) != wanted or zlib.crc32(block) != self._sums[number]:
            raise Damaged(
                f"its file {self._file.name} does not have the contents that were saved (bytes {begin} to {begin + wanted})"
            )
        return block

    def close(self) -> None:
        self._ahead.shutdown(wait=False, cancel_futures=True)
