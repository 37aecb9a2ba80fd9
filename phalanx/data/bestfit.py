"""Packs whole documents into windows (best fit, longest document first). The plan is computed once, by counting equal lengths instead of
placing documents one by one; that of a large corpus is stored in data.cache, where every rank only opens it."""

from __future__ import annotations

import bisect
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Corpus, OpenFile, offsets
from phalanx.data.pack import IGNORED, Batch, DocumentSpan, Intervals, positions_and_documents, spans_between
from phalanx.spec.errors import RunError


class DiskArray:
    """The one-dimensional integer array of an .npy file, of which only the requested elements are read.

    A memory map would count every page ever touched as memory of this process, for a large plan all of them.
    """

    def __init__(self, path: Path):
        header = np.load(path, mmap_mode="r")
        self._dtype, self._offset, self._length = header.dtype, header.offset, len(header)
        self._file = OpenFile(str(path), remedy="remove its folder")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int | slice) -> Any:
        if not isinstance(at, slice):
            first = range(self._length)[at]
            return int(self[first : first + 1][0])
        first, last, step = at.indices(self._length)
        return self._file.read(self._dtype, first, max(first, last), header=self._offset)[::step]


_STORED = 1 << 16
"""Number of documents from which on the plan is stored in a file. Below, computing it takes a tenth of a second."""
_CHUNK = 1 << 20
_VERSION = 1
_I8 = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.integer[Any]] | DiskArray
"""In memory, or on disk for a large corpus."""


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """The content of each window: first the windows that one document fills, then the packed ones, longest documents first.

    Each array has one extra number, so that none is empty: an empty file cannot be mapped.
    """

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

    A piece's inputs are doc[start:stop] and its targets doc[start+1:stop+1]: the end token is a target but not an input, and
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


def best_fit(lengths: npt.NDArray[np.integer[Any]], capacity: int) -> tuple[_I8, int]:
    """The window of each piece, and the number of windows, for pieces sorted from the longest (at most `capacity`) to the
    shortest. Equal to placing them one by one, each into the window with the least sufficient free space.

    Pieces of equal length fill the window with the least sufficient space until it has too little left, then the next one. So
    all windows with equal free space are handled at once.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    pools: dict[int, list[_I8]] = {}  # windows by their free space
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


def _segments(corpus: Corpus, intervals: Intervals) -> tuple[_I8, _I8]:
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
