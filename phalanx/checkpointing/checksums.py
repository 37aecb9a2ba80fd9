"""Checksums of files in blocks, so that they can be written, and read in part, with every byte checked on its way.

Each block has its CRC-32, as fast as disks are; the checksum of a file is the SHA-256 over those of its blocks. They find damage,
not forgery. Knows no tensors.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from phalanx.checkpointing.location import Local, Location

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
