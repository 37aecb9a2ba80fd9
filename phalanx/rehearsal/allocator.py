"""torch's caching allocator of a GPU, on sizes alone: what the allocations of a program reserve, including fragmentation, and which
allocation would be the first to fail. `rehearsal/ledger` runs the allocations of a rehearsal through it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings. Memory of CUDA itself is not included.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_LEAST = 512
_SMALL = 1 << 20
"""Blocks up to this size are cut from segments of 2 MiB."""
_SMALL_SEGMENT, _SEGMENT = 2 << 20, 20 << 20
_LARGE = 10 << 20
"""Blocks from this size on get a new segment of their own size."""
_STEP = 2 << 20


def rounded(size: int) -> int:
    """Bytes of an allocation, rounded up."""
    return max(_LEAST, -(-size // _LEAST) * _LEAST)


class NoRoom(Exception):
    """The device has no memory, even after all cached blocks are returned to CUDA."""

    def __init__(self, wanted: int, reserved: int, allocated: int):
        super().__init__(f"{wanted} bytes wanted, {reserved} reserved, {allocated} allocated")
        self.wanted, self.reserved, self.allocated = wanted, reserved, allocated


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    place: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class _Pool:
    """Free blocks of one kind and stream, sorted by size and then by address."""

    __slots__ = ("blocks", "keys", "small")

    def __init__(self, small: bool):
        self.small = small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        block.free = True
        insort(self.keys, (block.size, block.place))
        self.blocks[block.place] = block

    def drop(self, block: Block) -> None:
        block.free = False
        del self.keys[bisect_left(self.keys, (block.size, block.place))]
        del self.blocks[block.place]

    def fitting(self, size: int) -> Block | None:
        at = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[at][1]] if at < len(self.keys) else None


class Allocator:
    """The allocator of one GPU. `limit`: bytes that it may reserve; None: no limit."""

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._next = 0
        self.reserved = self.allocated = self.most_reserved = self.most_allocated = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((small, stream), _Pool(small))
        block = pool.fitting(size)
        if block is None:
            block = self._segment(size, pool)
        else:
            pool.drop(block)
        rest = block.size - size
        if rest >= _LEAST if small else rest > _SMALL:
            after = Block(block.place + size, rest, pool, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.after, block.size = after, size
            pool.put(after)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        pool = block.pool
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            pool.drop(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        pool.put(block)

    def _segment(self, size: int, pool: _Pool) -> Block:
        wanted = _SMALL_SEGMENT if size <= _SMALL else _SEGMENT if size < _LARGE else -(-size // _STEP) * _STEP
        if self._limit is not None and self.reserved + wanted > self._limit:
            self._release()
            if self.reserved + wanted > self._limit:
                raise NoRoom(size, self.reserved, self.allocated)
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._next += 2 * wanted  # segments are never adjacent
        return Block(self._next - wanted, wanted, pool)

    def _release(self) -> None:
        """Return all unused segments."""
        for pool in self._pools.values():
            for block in [block for block in pool.blocks.values() if block.before is None and block.after is None]:
                pool.drop(block)
                self.reserved -= block.size
