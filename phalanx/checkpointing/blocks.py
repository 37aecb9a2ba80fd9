"""Checksums of files in blocks, so that they can be written, and read in part, with every byte checked on its way.

A file's checksum is the SHA-256 over the SHA-256 of each of its blocks; a file of one block has that block's own, which is what
`sha256sum` prints. Knows no tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from phalanx.checkpointing.location import Location

BLOCK = 16 << 20
_KEPT = 4  # blocks of a file that is being read: neighbours share them


def whole(digests: Sequence[str]) -> str:
    """A file's checksum from its blocks'."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def whole_of(contents: bytes) -> str:
    """The checksum that a file of these contents has."""
    starts = range(0, max(len(contents), 1), BLOCK)
    return whole([hashlib.sha256(memoryview(contents)[begin : begin + BLOCK]).hexdigest() for begin in starts])


def digest(file: Location) -> str:
    """A file's checksum, its blocks read one after the other."""
    size = file.size() or 0
    blocks = (file.read(begin, min(BLOCK, size - begin)) for begin in range(0, max(size, 1), BLOCK))
    return whole([hashlib.sha256(block).hexdigest() for block in blocks])


def write(file: Location, chunks: Iterable[memoryview | bytes]) -> list[str]:
    """Write a file from pieces of any length; returns its blocks' checksums, which are taken while the next block is written.

    A chunk may be changed by its owner as soon as the next is asked for.
    """
    sink = file.sink()
    hashing = hashlib.sha256()
    filled, found = 0, []
    try:
        with ThreadPoolExecutor(1) as aside:
            for chunk in chunks:
                left = memoryview(chunk).cast("B")
                while left:
                    part = left[: BLOCK - filled]
                    taken = aside.submit(hashing.update, part)
                    sink.write(part)
                    taken.result()
                    left, filled = left[len(part) :], filled + len(part)
                    if filled == BLOCK:
                        found.append(hashing.hexdigest())
                        hashing, filled = hashlib.sha256(), 0
        if filled or not found:
            found.append(hashing.hexdigest())
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    return found


class Damaged(Exception):
    """A file does not have the contents that were saved."""


class Checked:
    """A file of which any bytes can be read, each block compared with its checksum. Not for several threads at once."""

    def __init__(self, file: Location, size: int, digests: Sequence[str]):
        self._file, self._size, self._digests = file, size, digests
        if len(digests) != max(1, math.ceil(size / BLOCK)):
            raise Damaged(f"its file {file.name} has checksums of {len(digests)} blocks for {size} bytes")
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._ahead = ThreadPoolExecutor(2)

    def read(self, begin: int, into: memoryview) -> None:
        """Bytes that lie in the file, as many as `into` takes."""
        end = begin + len(into)
        if begin < 0 or end > self._size:
            raise Damaged(f"its file {self._file.name} has {self._size} bytes, of which {begin} to {end} were asked for")
        first, last = begin // BLOCK, (max(end - 1, begin)) // BLOCK
        for number in range(first, last + 1):
            waiting = self._fetch(number)
            if number + 1 < len(self._digests):
                self._fetch(number + 1)  # the next is likely to be asked for
            block = waiting.result()
            part = memoryview(block)[max(0, begin - number * BLOCK) : end - number * BLOCK]
            into[: len(part)] = part
            into = into[len(part) :]

    def _fetch(self, number: int) -> Future[bytes]:
        if number in self._blocks:
            self._blocks.move_to_end(number)
        else:
            self._blocks[number] = self._ahead.submit(self._block, number)
            while len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[number]

    def _block(self, number: int) -> bytes:
        begin = number * BLOCK
        wanted = min(BLOCK, self._size - begin)
        block = self._file.read(begin, wanted)
        if len(block) != wanted or hashlib.sha256(block).hexdigest() != self._digests[number]:
            raise Damaged(
                f"its file {self._file.name} does not have the contents that were saved (bytes {begin} to {begin + wanted})"
            )
        return block

    def close(self) -> None:
        self._ahead.shutdown(wait=False, cancel_futures=True)
