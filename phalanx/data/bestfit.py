"""Arrays on disk of which only what is asked for is read. `bestfit` keeps its plan of a large corpus in them."""

from __future__ import annotations

import bisect
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Corpus, OpenFile
from phalanx.data.pack import IGNORED, DocumentSpan, Window, pieces_between, places
from phalanx.data.shuffle import Intervals
from phalanx.spec.errors import RunError, RunFailed


class DiskArray:
    """The one-dimensional array of integers in an .npy file, read with explicit offsets.

    A map would count every page that was ever touched as this process' memory, which for a large plan is all of them.
    """

    def __init__(self, path: Path):
        header = np.load(path, mmap_mode="r")
        self._dtype, self._offset, self._length = header.dtype, header.offset, len(header)
        self._path, self._file = path, OpenFile(str(path))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> npt.NDArray[Any]: ...
    def __getitem__(self, at: int | slice) -> int | npt.NDArray[Any]:
        if not isinstance(at, slice):
            first = range(self._length)[at]
            return int(self._read(first, first + 1)[0])
        first, last, step = at.indices(self._length)
        return self._read(first, max(first, last))[::step]

    def _read(self, first: int, last: int) -> npt.NDArray[Any]:
        values = np.empty(last - first, dtype=self._dtype)
        try:
            whole = self._file.fill(values.view(np.uint8).data, self._offset + first * self._dtype.itemsize)
        except OSError as error:
            raise RunFailed(f"{self._path} can no longer be read ({error.strerror}): remove its folder and resume.") from error
        if not whole:
            raise RunFailed(f"{self._path} has shrunk since the run started: remove its folder and resume.")
        return values


_KEPT = 1 << 16
"""From so many documents on the plan is kept as a file: below, working it out takes a tenth of a second."""
_CHUNK = 1 << 20
_VERSION = 1
_I8 = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.integer[Any]] | DiskArray
"""In memory, or of a large corpus on disk."""


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """What stands in each window. Windows that one document fills come first, then those that were packed, those with the
    longest documents first: there is no order of the files to keep.

    Each array has one number more than it needs, so that none is empty: an empty file cannot be mapped.
    """

    full_starts: _Numbers
    """Of each document that fills windows: where in the corpus it begins."""
    full_firsts: _Numbers
    """And the first window it fills; at last the number of all such windows."""
    piece_starts: _Numbers
    """Of each piece in the packed windows, window after window: where in the corpus it begins."""
    piece_lengths: _Numbers
    piece_firsts: _Numbers
    """Of each packed window: its first piece; at last the number of pieces."""
    slots: _Numbers
    """[1]: places of all windows that hold a token."""


class BestFitPacking:
    """Windows of whole documents.

    A piece's inputs are doc[start:stop] and its targets doc[start+1:stop+1]: the end token is a target and need not be an
    input, and a piece of a document that was cut knows the token that follows it. What is left is padding: end tokens,
    ignored as targets, with a document number of their own.
    """

    def __init__(self, corpus: Corpus, intervals: Intervals, length: int, *, end: int, document_mask: bool, cache: Path):
        self.length = length
        self.tokens = int((intervals[:, 1] - intervals[:, 0]).sum())
        self._corpus, self._end, self._document_mask = corpus, end, document_mask
        self._plan = _plan(corpus, intervals, length, cache)
        self._full = int(self._plan.full_firsts[-1])
        self.count = self._full + len(self._plan.piece_firsts) - 1
        self.waste = 1.0 - int(self._plan.slots[0]) / (self.count * length) if self.count else 0.0

    def windows(self, numbers: npt.NDArray[np.int64]) -> Window:
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
        return Window(tokens, targets, *places(begins, self._document_mask))

    def window(self, number: int) -> Window:
        return Window(*(array[0] for array in self.windows(np.array([number]))))

    def trace(self, number: int) -> tuple[DocumentSpan, ...]:
        found = [pieces_between(self._corpus, start, start + length) for start, length in self._pieces(number)]
        return tuple(piece for pieces in found for piece in pieces)

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        """Where each piece of a window begins in the corpus, and its length."""
        plan = self._plan
        if number < self._full:
            document = bisect.bisect_right(plan.full_firsts, number) - 1
            return [(int(plan.full_starts[document]) + (number - int(plan.full_firsts[document])) * self.length, self.length)]
        first, last = plan.piece_firsts[number - self._full : number - self._full + 2].tolist()
        return list(zip(plan.piece_starts[first:last].tolist(), plan.piece_lengths[first:last].tolist(), strict=True))


def make_plan(corpus: Corpus, intervals: Intervals, length: int) -> PackingPlan:
    """Works out what stands in each window. Takes about forty bytes per document while it does."""
    starts, slots = _segments(corpus, intervals)
    total = slots.sum()
    full = slots // length
    long = full > 0
    full_starts, full_firsts = np.append(starts[long], 0), _from_zero(full[long])
    starts += full * length
    slots -= full * length
    del full, long  # there may be very many documents
    rests = slots > 0
    lengths: npt.NDArray[Any] = slots[rests].astype(np.uint16 if length < 1 << 16 else np.int32)
    starts = starts[rests]
    del slots, rests
    order = np.argsort(length - lengths, kind="stable")  # longest first; numbers of 16 bits are sorted by counting them
    starts, lengths = starts[order], lengths[order]
    del order
    window_of, count = best_fit(lengths, length)
    order = np.argsort(window_of, kind="stable")
    return PackingPlan(
        full_starts=full_starts,
        full_firsts=full_firsts,
        piece_starts=np.append(starts[order], 0),
        piece_lengths=np.append(lengths[order], 0).astype(np.int32),
        piece_firsts=_from_zero(np.bincount(window_of, minlength=count)),
        slots=np.array([total]),
    )


def best_fit(lengths: npt.NDArray[np.integer[Any]], room: int) -> tuple[_I8, int]:
    """The window that each piece goes into, for pieces sorted from the longest (at most `room`) to the shortest, and how
    many windows there are. The same as placing them one after the other, each into the window with the least sufficient room.

    Pieces of equal length go the same way: the window with the least sufficient room takes one after the other until it has
    too little, then the next one does. So all windows with equal room can be treated at once.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    pools: dict[int, list[_I8]] = {}  # windows by the room they have left
    rooms = 0  # bit r: there are windows with room r
    count = 0
    edges = np.flatnonzero(lengths[1:] != lengths[:-1]) + 1
    for at, end in zip([0, *edges.tolist()], [*edges.tolist(), len(lengths)], strict=True):
        while at < end:
            length = int(lengths[at])
            enough = rooms >> length
            if enough:
                left = length + (enough & -enough).bit_length() - 1
                pool = np.concatenate(pools.pop(left))
                rooms ^= 1 << left
            else:
                left = room
                pool = np.arange(count, count + -(-(end - at) // (room // length)))
                count += len(pool)
            each = left // length
            used = min(len(pool), -(-(end - at) // each))
            taken = min(used * each, end - at)
            window_of[at : at + taken] = np.repeat(pool[:used], each)[:taken]
            at += taken
            last = each - (used * each - taken)  # pieces that went into the last window used
            for windows, now in (
                (pool[: used - 1], left - each * length),
                (pool[used - 1 : used], left - last * length),
                (pool[used:], left),
            ):
                if len(windows) and now:
                    pools.setdefault(now, []).append(windows)
                    rooms |= 1 << now
    return window_of, count


def _segments(corpus: Corpus, intervals: Intervals) -> tuple[_I8, _I8]:
    """Documents, or what the intervals leave of them: where each begins, and the inputs it has: all tokens but its last."""
    starts, slots = [], []
    edges = intervals.ravel()
    for first in range(0, corpus.documents, _CHUNK):
        bounds = corpus.bounds(first, min(first + _CHUNK, corpus.documents))
        inside = edges[edges.searchsorted(bounds[0], "right") : edges.searchsorted(bounds[-1], "left")]
        at = bounds.searchsorted(inside)
        new = bounds[at] != inside
        cuts = np.insert(bounds, at[new], inside[new])
        begin, length = cuts[:-1], np.diff(cuts)
        kept = edges.searchsorted(begin, "right") % 2 == 1  # an odd number of edges up to it: inside an interval
        starts.append(begin[kept])
        slots.append(length[kept] - 1)
    return np.concatenate(starts), np.concatenate(slots)


def _from_zero(counts: _I8) -> _I8:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _plan(corpus: Corpus, intervals: Intervals, length: int, cache: Path) -> PackingPlan:
    """The plan, from the cache if it is there; put there where it is worth it."""
    if corpus.documents < _KEPT:
        return make_plan(corpus, intervals, length)
    digest = hashlib.sha256(f"{_VERSION} {corpus.fingerprint} {length} ".encode() + intervals.astype("<i8").tobytes())
    folder = cache / "packing" / digest.hexdigest()[:32]
    try:
        if not folder.is_dir():
            _store(make_plan(corpus, intervals, length), folder)
        return PackingPlan(**{field.name: DiskArray(folder / f"{field.name}.npy") for field in fields(PackingPlan)})
    except (OSError, ValueError) as error:
        raise RunError(
            [
                f"The packing of documents cannot be kept in {folder} ({error}); set data.cache to a folder with room, or remove it."
            ]
        ) from None


def _store(plan: PackingPlan, folder: Path) -> None:
    """Written beside and renamed when complete: whoever finds the folder finds all of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        for field in fields(PackingPlan):
            np.save(beside / f"{field.name}.npy", getattr(plan, field.name))
        try:
            os.rename(beside, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was quicker, with the same plan
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
