"""Cuts a corpus into windows of one length: `StreamPacking` regardless of documents, `BestFitPacking` into windows of whole documents,
longest first. The plan of the latter is computed once; that of a large corpus is stored in data.cache, where every rank only opens it."""

from __future__ import annotations

import bisect
import hashlib
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Corpus, OpenFile, offsets
from phalanx.spec.errors import RunError

IGNORED = -100
"""The target without a loss: cross entropy's default ignore_index."""

Intervals = npt.NDArray[np.int64]
"""[n, 2]: start and stop in a corpus' stream, sorted, none empty, no two adjacent."""

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
    """Consecutive windows over the concatenation of all intervals, regardless of document boundaries. Window k takes tokens
    k·length … (k+1)·length, both included: one more than its length, for the last target."""

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


class DiskArray:
    """The one-dimensional integer array of an .npy file, of which only the requested elements are read. A memory map would count every
    page ever touched as memory of this process, for a large plan all of them."""

    def __init__(self, path: Path):
        header = np.load(path, mmap_mode="r")
        self._dtype, self._offset, self._length = header.dtype, header.offset, len(header)
        self._file = OpenFile(str(path), remedy="remove its folder")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int | slice) -> Any:
        if not isinstance(at, slice):
            first = range(self._length)[at]
            return int(self._file.read(self._dtype, first, first + 1, header=self._offset)[0])
        first, last, step = at.indices(self._length)
        return self._file.read(self._dtype, first, max(first, last), header=self._offset)[::step]


_STORED = 1 << 16
"""Number of documents from which on the plan is stored in a file. Below, computing it takes a tenth of a second."""
_CHUNK = 1 << 20
_VERSION = 1
_Numbers = npt.NDArray[np.integer[Any]] | DiskArray
"""In memory, or on disk for a large corpus."""


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """The content of each window: first the windows that one document fills, then the packed ones, longest documents first. Each array
    has one extra number, so that none is empty: an empty file cannot be mapped."""

    full_starts: _Numbers
    """Corpus position of each document that fills windows."""
    full_firsts: _Numbers
    """First window of each of these documents, then the number of all such windows."""
    piece_starts: _Numbers
    """Corpus position of each piece in the packed windows, window by window."""
    piece_lengths: _Numbers
    piece_firsts: _Numbers
    """First piece of each packed window, then the number of pieces."""
    slots: _Numbers
    """[1]: window positions that hold a token, in total."""

    @property
    def windows(self) -> int:
        return int(self.full_firsts[-1]) + len(self.piece_firsts) - 1

    def padding_ratio(self, length: int) -> float:
        return 1.0 - int(self.slots[0]) / (self.windows * length) if self.windows else 0.0


class BestFitPacking:
    """Windows of whole documents. A document longer than a window fills windows of its own first, and its rest is packed.

    The inputs of a piece are doc[start:stop] and its targets doc[start+1:stop+1]: the end token is a target but not an input, and
    a piece of a longer document knows the token that follows it. The rest of a window is padding: end tokens with a document
    index of their own, ignored as targets.
    """

    def __init__(self, corpus: Corpus, intervals: Intervals, length: int, *, end: int, document_mask: bool, cache: Path):
        self.length = length
        self.tokens = int((intervals[:, 1] - intervals[:, 0]).sum())
        self._corpus, self._end, self._document_mask = corpus, end, document_mask
        self._plan = _plan(corpus, intervals, length, cache)
        self._full = int(self._plan.full_firsts[-1])
        self.count, self.padding_ratio = self._plan.windows, self._plan.padding_ratio(length)

    def batch(self, numbers: npt.NDArray[np.int64]) -> Batch:
        if numbers.min() < 0 or numbers.max() >= self.count:
            raise IndexError(f"windows {numbers.min()} … {numbers.max()} of {self.count}")
        shape = len(numbers), self.length
        tokens = np.full(shape, self._end, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        begins = np.zeros(shape, dtype=np.bool_)
        for row, number in enumerate(numbers.tolist()):
            column = 0
            for start, length in self._pieces(number):
                until = column + length
                ids = self._corpus.read(start, start + length + 1)
                tokens[row, column:until] = ids[:-1]
                mask = self._corpus.mask(start + 1, start + length + 1)
                targets[row, column:until] = ids[1:]
                if mask is not None:
                    targets[row, column:until][~mask] = IGNORED
                begins[row, column] = True
                column = until
            if column < self.length:
                begins[row, column] = True
        return Batch(tokens, targets, *positions_and_documents(begins, self._document_mask), numbers)

    def trace(self, number: int) -> tuple[DocumentSpan, ...]:
        pieces = self._pieces(number)
        return tuple(span for start, length in pieces for span in spans_between(self._corpus, start, start + length))

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        """Corpus position and length of each piece of a window."""
        plan = self._plan
        if number < self._full:
            document = bisect.bisect_right(plan.full_firsts, number) - 1
            return [(int(plan.full_starts[document]) + (number - int(plan.full_firsts[document])) * self.length, self.length)]
        first, last = plan.piece_firsts[number - self._full : number - self._full + 2].tolist()
        return list(zip(plan.piece_starts[first:last].tolist(), plan.piece_lengths[first:last].tolist(), strict=True))


def make_plan(corpus: Corpus, intervals: Intervals, length: int) -> PackingPlan:
    """Computes the content of each window. Takes about forty bytes of memory per document."""
    starts, slots = _segments(corpus, intervals)
    total = slots.sum()
    full = slots // length
    long = full > 0
    full_starts, full_firsts = np.append(starts[long], 0), offsets(full[long])
    starts += full * length
    slots -= full * length
    del full, long  # there may be very many documents
    rests = slots > 0
    lengths: npt.NDArray[Any] = slots[rests].astype(np.uint16 if length < 1 << 16 else np.int32)
    starts = starts[rests]
    del slots, rests
    order = np.argsort(length - lengths, kind="stable")  # longest first; 16-bit numbers are radix-sorted
    starts, lengths = starts[order], lengths[order]
    del order
    window_of, count = best_fit(lengths, length)
    order = np.argsort(window_of, kind="stable")
    return PackingPlan(
        full_starts=full_starts,
        full_firsts=full_firsts,
        piece_starts=np.append(starts[order], 0),
        piece_lengths=np.append(lengths[order], 0).astype(np.int32),
        piece_firsts=offsets(np.bincount(window_of, minlength=count)),
        slots=np.array([total]),
    )


def best_fit(lengths: npt.NDArray[np.integer[Any]], capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """The window of each piece, and the number of windows, for pieces sorted from the longest (at most `capacity`) to the
    shortest. Equal to placing them one by one, each into the window with the least sufficient free space.

    Pieces of equal length fill the window with the least sufficient space until it has too little left, then the next one. So
    all windows with equal free space are handled at once.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    pools: dict[int, list[npt.NDArray[np.int64]]] = {}  # windows by their free space
    spaces = 0  # bit s: there are windows with free space s
    count = 0
    edges = np.flatnonzero(lengths[1:] != lengths[:-1]) + 1
    for at, end in zip([0, *edges.tolist()], [*edges.tolist(), len(lengths)], strict=True):
        while at < end:
            length = int(lengths[at])
            enough = spaces >> length
            if enough:
                space = length + (enough & -enough).bit_length() - 1
                pool = np.concatenate(pools.pop(space))
                spaces ^= 1 << space
            else:
                space = capacity
                pool = np.arange(count, count + -(-(end - at) // (capacity // length)))
                count += len(pool)
            each = space // length
            used = min(len(pool), -(-(end - at) // each))
            taken = min(used * each, end - at)
            window_of[at : at + taken] = np.repeat(pool[:used], each)[:taken]
            at += taken
            last = each - (used * each - taken)  # pieces in the last window used
            for windows, now in (
                (pool[: used - 1], space - each * length),
                (pool[used - 1 : used], space - last * length),
                (pool[used:], space),
            ):
                if len(windows) and now:
                    pools.setdefault(now, []).append(windows)
                    spaces |= 1 << now
    return window_of, count


def _segments(corpus: Corpus, intervals: Intervals) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Position and number of inputs (all tokens but the last) of each document, or of its parts inside the intervals."""
    starts, slots = [], []
    edges = intervals.ravel()
    for first in range(0, corpus.documents, _CHUNK):
        bounds = corpus.bounds(first, min(first + _CHUNK, corpus.documents))
        near = edges[edges.searchsorted(bounds[0], "right") : edges.searchsorted(bounds[-1], "left")]
        at = bounds.searchsorted(near)
        new = bounds[at] != near
        cuts = np.insert(bounds, at[new], near[new])
        begin, length = cuts[:-1], np.diff(cuts)
        inside = edges.searchsorted(begin, "right") % 2 == 1  # an odd number of edges up to it
        starts.append(begin[inside])
        slots.append(length[inside] - 1)
    return np.concatenate(starts), np.concatenate(slots)


def _plan(corpus: Corpus, intervals: Intervals, length: int, cache: Path) -> PackingPlan:
    """The plan, read from the cache or computed; the plan of a large corpus is stored there."""
    if corpus.documents < _STORED:
        return make_plan(corpus, intervals, length)
    digest = hashlib.sha256(f"{_VERSION} {corpus.fingerprint} {length} ".encode() + intervals.astype("<i8").tobytes())
    folder = cache / "packing" / digest.hexdigest()[:32]
    try:
        if not folder.is_dir():
            _store(make_plan(corpus, intervals, length), folder)
        return PackingPlan(**{field.name: DiskArray(folder / f"{field.name}.npy") for field in fields(PackingPlan)})
    except (OSError, ValueError) as error:
        raise RunError(
            f"The packing of documents cannot be stored in {folder} ({error}); set data.cache to a folder with free space, or remove it."
        ) from None


def _store(plan: PackingPlan, folder: Path) -> None:
    """Writes to a temporary folder and renames it: a folder that exists is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        for field in fields(PackingPlan):
            np.save(temporary / f"{field.name}.npy", getattr(plan, field.name))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another process stored the same plan first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
