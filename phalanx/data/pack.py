"""Cuts a corpus into windows of one length, numbers them as samples, and decides which documents are held out for evaluation. The order
of samples and the choice of documents are computed, never stored. `data/dataset` builds them, `data/loader` reads batches."""

from __future__ import annotations

import functools
import hashlib
import zlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Corpus, offsets

IGNORED = -100
"""The target without a loss: cross entropy's default ignore_index."""

_BLOCK, _BLOCKS = 1024, 16
"""The order of samples is computed in blocks of 1024 neighbors; the last 16 blocks are cached."""

Intervals = npt.NDArray[np.int64]
"""[n, 2]: start and stop in a corpus' stream, sorted, none empty, no two adjacent."""

_ROUNDS = 8
"""Four rounds make a Feistel network with wide halves pseudo-random; small n has narrow halves and gets twice as many."""

DocumentSpan = tuple[int, int, int]
"""Document number, first token and end (exclusive) of a span within that document."""


class Batch(NamedTuple):
    """Several samples; all arrays but the last are [sample, token]."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """The next token at each position; IGNORED where the next token begins another document and where the corpus masks it."""
    positions: npt.NDArray[np.int64]
    """Counted from the start of the document, or of the window if the document began before it."""
    documents: npt.NDArray[np.int32]
    """Index of the document within the window: 0, 1, 2 …"""
    samples: npt.NDArray[np.int64]
    """[sample]: global sample indices; window numbers in the batch of a packing."""

    @property
    def has_boundaries(self) -> bool:
        """Whether attention has to respect document boundaries; without any, plain causal attention is equal and faster."""
        return bool((self.documents > 0).any())

    @property
    def digest(self) -> int:
        """Sum of the samples' checksums over index and token ids, so that the digests of the parts of a batch add up to that of
        the whole."""
        rows = zip(self.tokens, self.samples.tolist(), strict=True)
        return sum(zlib.crc32(row.tobytes(), sample & 0xFFFFFFFF) for row, sample in rows)

    def rows(self, first: int, last: int) -> Batch:
        """Samples first … last (exclusive) of this batch."""
        return Batch._make(array[first:last] for array in self)


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of a sample."""

    source: str
    epoch: int
    window: int
    spans: tuple[DocumentSpan, ...]


class Packing(Protocol):
    """Windows of one length, cut out of a corpus."""

    length: int
    count: int
    tokens: int
    """Tokens of the corpus that the windows cover."""
    padding_ratio: float
    """Fraction of all window positions that is padding."""

    def batch(self, numbers: npt.NDArray[np.int64]) -> Batch:
        """The windows of these numbers."""

    def trace(self, number: int) -> tuple[DocumentSpan, ...]:
        """The document spans in a window, in order."""


class StreamPacking:
    """Consecutive windows over the concatenation of all intervals, regardless of document boundaries.

    Window k takes tokens k·length … (k+1)·length, both included: one more than its length, for the last target.
    """

    padding_ratio = 0.0

    def __init__(self, corpus: Corpus, intervals: Intervals, length: int, *, document_mask: bool = True):
        self.length = length
        self._corpus = corpus
        self._document_mask = document_mask
        # Start of each interval in the concatenation, then its end.
        self._offsets = offsets(intervals[:, 1] - intervals[:, 0])
        self._shifts = intervals[:, 0] - self._offsets[:-1]  # from a position there to the one in the corpus
        self.tokens = int(self._offsets[-1])
        self.count = max(0, self.tokens - 1) // length

    def batch(self, numbers: npt.NDArray[np.int64]) -> Batch:
        if numbers.min() < 0 or numbers.max() >= self.count:
            raise IndexError(f"windows {numbers.min()} … {numbers.max()} of {self.count}")
        shape = len(numbers), self.length + 1
        stream, begins = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
        trained = None
        low = numbers * self.length
        for row, column, start, stop in self._spans(low, low + self.length + 1):
            until = column + stop - start
            stream[row, column:until] = self._corpus.read(start, stop)
            starts = self._corpus.starts(start, stop)
            if len(starts):
                begins[row, starts - (start - column)] = True
            if column:  # an interval that does not begin with a document
                begins[row, column] = True
            mask = self._corpus.mask(start, stop)
            if mask is not None:
                trained = np.ones(shape, dtype=np.bool_) if trained is None else trained
                trained[row, column:until] = mask
        targets = stream[:, 1:].copy()
        targets[begins[:, 1:] if trained is None else begins[:, 1:] | ~trained[:, 1:]] = IGNORED
        return Batch(stream[:, :-1].copy(), targets, *positions_and_documents(begins[:, :-1], self._document_mask), numbers)

    def trace(self, number: int) -> tuple[DocumentSpan, ...]:
        low = np.array([number * self.length])
        spans = [(start, stop) for _, _, start, stop in self._spans(low, low + self.length)]
        return tuple(span for start, stop in spans for span in spans_between(self._corpus, start, stop))

    def _spans(self, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
        """The corpus spans that make up low … high of each row: row, first column, start and stop in the corpus."""
        first = self._offsets.searchsorted(low, "right") - 1
        counts = self._offsets.searchsorted(high, "left") - first
        row = np.repeat(np.arange(len(low)), counts)
        interval = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        begin = np.maximum(low[row], self._offsets[interval])
        end = np.minimum(high[row], self._offsets[interval + 1])
        shift = self._shifts[interval]
        columns = (row, begin - low[row], begin + shift, end + shift)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def positions_and_documents(
    begins: npt.NDArray[np.bool_], document_mask: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Positions and document indices of windows, from a mask of the positions where documents begin; all [sample, token]."""
    along = np.arange(begins.shape[1], dtype=np.int64)
    begins[:, 0] = False  # the first document of a window has index 0 wherever it began
    if not document_mask or not begins.any():
        return np.tile(along, (len(begins), 1)), np.zeros(begins.shape, dtype=np.int32)
    last_begin = np.maximum.accumulate(np.where(begins, along, 0), axis=1)
    return along - last_begin, np.cumsum(begins, axis=1, dtype=np.int32)


def spans_between(corpus: Corpus, start: int, stop: int) -> list[DocumentSpan]:
    """The document spans in start … stop of the corpus."""
    spans = []
    document = corpus.find(start)
    while start < stop:
        begin, end = corpus.bounds(document, document + 1).tolist()
        until = min(stop, end)
        spans.append((document, start - begin, until - begin))
        start, document = until, document + 1
    return spans


class Samples:
    """The endless samples of one source: its windows, epoch after epoch, each epoch in an order of its own.

    A sample is a pure function of (seed, index). There is no state, so a run that starts at any index on any number of ranks
    reads the same samples as a run that never stopped.
    """

    def __init__(self, packing: Packing, seed: int, shuffle: bool, name: str = ""):
        """`name`: the name of the source."""
        self.packing = packing
        self.name = name
        self._shuffle = shuffle
        self._seed = seed
        self._block = functools.lru_cache(_BLOCKS)(self._permuted)

    @property
    def count(self) -> int:
        """Samples in one epoch."""
        return self.packing.count

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        return self.packing.batch(self.order(indices))._replace(samples=np.array(indices, dtype=np.int64))

    def trace(self, index: int) -> Trace:
        window = int(self.order(np.array([index]))[0])
        return Trace(self.name, index // self.count, window, self.packing.trace(window))

    def order(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The window number of each sample."""
        if indices.min() < 0:
            raise IndexError(f"sample {indices.min()}; samples are counted from 0")
        if not self._shuffle:
            return indices % self.count
        windows = np.empty(len(indices), dtype=np.int64)
        blocks = indices // self.count * self._blocks + indices % self.count // _BLOCK
        within = indices % self.count % _BLOCK
        for block in set(blocks.tolist()):
            now = blocks == block
            windows[now] = self._block(block)[within[now]]
        return windows

    @property
    def _blocks(self) -> int:
        return -(-self.count // _BLOCK)

    def _permuted(self, block: int) -> npt.NDArray[np.int64]:
        """One block of an epoch's order. Indices of a batch are neighbors, and a block costs little more than one index."""
        epoch, first = divmod(block, self._blocks)
        permutation = Permutation(self.count, key("epoch", self._seed, epoch))
        return permutation(np.arange(first * _BLOCK, min((first + 1) * _BLOCK, self.count)))


def key(purpose: str, seed: int, index: int = 0) -> int:
    """64 bits that depend on the arguments alone: the same in every process, on every machine, in every version."""
    return int.from_bytes(hashlib.blake2b(f"{purpose}/{seed}/{index}".encode(), digest_size=8).digest(), "little")


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """MurmurHash3's finalizer: a bijection of 64 bits in which every input bit flips half the output bits on average."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


class Permutation:
    """A pseudo-random bijection of range(n) that takes no memory and can be evaluated at any point.

    A Feistel network permutes the smallest power of two that is not below n: each round adds a function of one half of the
    bits to the other half, which can be undone. A value outside range(n) passes through the network again until it is inside
    ("cycle walking"). That takes fewer than two passes on average and is still a bijection, because a cycle that starts
    inside range(n) returns to it.
    """

    def __init__(self, n: int, key: int):
        assert 1 <= n <= 2**62, n
        self.n = n
        bits = (n - 1).bit_length()
        self._shift = np.uint64(bits // 2)
        self._low = np.uint64((1 << bits // 2) - 1)
        self._high = np.uint64((1 << (bits - bits // 2)) - 1)
        digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8 * _ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.n), (positions, self.n)
        x = self._network(positions.ravel().astype(np.uint64))
        while (outside := x >= np.uint64(self.n)).any():
            x[outside] = self._network(x[outside])
        return x.astype(np.int64).reshape(positions.shape)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        low, high = x & self._low, x >> self._shift
        for even, odd in self._round_keys.reshape(-1, 2):
            high ^= mix(low + even) & self._high
            low ^= mix(high + odd) & self._low
        return (high << self._shift) | low


def split(blocks: npt.NDArray[np.int64], fraction: float, seed: int, least: int = 1) -> tuple[Intervals, Intervals]:
    """Intervals to train on and intervals to evaluate on: disjoint, and together the whole corpus.

    `blocks`: start positions of the corpus' blocks, then its end; a block is one document unless there are very many.
    Whole blocks are held out, so that evaluation never continues a text that was trained on. The one exception is the last
    block drawn: only its tail is held out, which meets the fraction exactly and splits even a single document.
    `least`: tokens to hold out even if the fraction gives fewer, provided that as many remain.
    """
    begins, ends = blocks[:-1], blocks[1:]
    cuts = ends.copy()  # where the held-out part of each block begins; for most blocks at the end
    total = int(blocks[-1])
    held_out = max(least if 2 * least <= total else 1, round(fraction * total)) if fraction > 0 else 0
    if held_out and len(begins):
        # Sorting by a hash of the index, instead of a shuffle: added documents hardly change which others are drawn.
        order = np.argsort(mix(np.arange(len(begins), dtype=np.uint64) + np.uint64(key("held out", seed))))
        drawn = np.cumsum((ends - begins)[order])
        last = int(np.searchsorted(drawn, held_out))
        cuts[order[:last]] = begins[order[:last]]
        cuts[order[last]] = begins[order[last]] + drawn[last] - held_out
    return _merged(begins, cuts), _merged(cuts, ends)


def _merged(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Intervals:
    """Drops empty intervals and joins adjacent ones."""
    nonempty = starts < stops
    starts, stops = starts[nonempty], stops[nonempty]
    apart = starts[1:] != stops[:-1]
    return np.stack([starts[np.append(True, apart)[: len(starts)]], stops[np.append(apart, True)[: len(stops)]]], axis=1)
