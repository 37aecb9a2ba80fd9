"""Cuts a corpus into windows of one length and numbers them as samples. `data/dataset` builds them, `data/loader` reads batches."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Corpus
from phalanx.data.shuffle import Intervals, Permutation, key

IGNORED = -100
"""The target without a loss: cross entropy's default ignore_index."""

_BLOCK, _BLOCKS = 1024, 16
"""The order of samples is computed in blocks of 1024 neighbors; the last 16 blocks are cached."""

DocumentSpan = tuple[int, int, int]
"""Document number, first token and end (exclusive) of a span within that document."""


class Window(NamedTuple):
    """One sample, with arrays of the window's length; or several samples as [sample, token]."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """The next token at each position; IGNORED where the next token begins another document and where the corpus masks it."""
    positions: npt.NDArray[np.int64]
    """Counted from the start of the document, or of the window if the document began before it."""
    documents: npt.NDArray[np.int32]
    """Index of the document within the window: 0, 1, 2 …"""


class Batch(NamedTuple):
    """Several samples; the fields of a window as [sample, token]."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    samples: npt.NDArray[np.int64]
    """[sample]: global sample indices."""

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

    def windows(self, numbers: npt.NDArray[np.int64]) -> Window:
        """The windows of these numbers, as [sample, token]."""

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
        self._offsets = np.concatenate([[0], np.cumsum(intervals[:, 1] - intervals[:, 0])]).astype(np.int64)
        self._shifts = intervals[:, 0] - self._offsets[:-1]  # from a position there to the one in the corpus
        self.tokens = int(self._offsets[-1])
        self.count = max(0, self.tokens - 1) // length

    def windows(self, numbers: npt.NDArray[np.int64]) -> Window:
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
        return Window(stream[:, :-1].copy(), targets, *positions_and_documents(begins[:, :-1], self._document_mask))

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

    def windows(self, indices: npt.NDArray[np.int64]) -> Window:
        return self.packing.windows(self.order(indices))

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        return Batch(*self.windows(indices), np.array(indices, dtype=np.int64))

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
