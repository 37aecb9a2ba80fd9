"""A corpus: one flat stream of token ids in which an end token follows every document. Text files, strings (here) and token files
(`data/token_files`) are corpora; `data/pack` cuts windows out of them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import RunFailed

BLOCKS = 1 << 17
"""Upper limit for the number of blocks of a corpus, so that the index in memory stays small for any number of documents."""
END = 256
"""The byte tokenizer's end token, which follows the last byte of each text document."""
OPEN_FILES = 64
"""File descriptors a corpus keeps open: enough for neighboring windows to share them, far below the limit of a process."""
_HASHED_WHOLE = 64 << 20
"""Up to this many bytes the fingerprint covers the whole text; beyond, it covers _SAMPLES pieces of the same total size."""
_SAMPLES = 4096

Ids = npt.NDArray[np.integer[Any]]
Positions = npt.NDArray[np.int64]


class Corpus(Protocol):
    """A stream of documents with random access from any thread."""

    @property
    def fingerprint(self) -> str:
        """Changes when the text changes; a resumed run compares it. May read part of the text."""

    @property
    def documents(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Number of tokens, end tokens included."""

    def read(self, start: int, stop: int) -> Ids:
        """Ids start … stop of the stream: exactly stop - start of them."""

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of these ids are training targets; None: all of them."""

    def bounds(self, first: int, last: int) -> Positions:
        """Start positions of documents first … last, both included; `last` may be the number of documents: the end of the
        stream."""

    def find(self, position: int) -> int:
        """The document that contains this position of the stream."""

    def starts(self, start: int, stop: int) -> Positions:
        """Positions in start … stop (exclusive) where documents begin."""

    @property
    def blocks(self) -> Positions:
        """Start positions of blocks of consecutive documents, then the end of the stream: at most BLOCKS + 1 numbers."""


class IndexedCorpus:
    """The part of a corpus that follows from its document positions, for corpora that hold them all in memory."""

    def __init__(self, begins: Positions):
        """`begins`: start position of each document, then the end of the stream."""
        self._begins = begins
        self.documents = len(begins) - 1
        self.tokens = int(begins[-1])

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        return None

    def bounds(self, first: int, last: int) -> Positions:
        return self._begins[first : last + 1]

    def find(self, position: int) -> int:
        return int(self._begins.searchsorted(position, "right")) - 1

    def starts(self, start: int, stop: int) -> Positions:
        low, high = self._begins.searchsorted((start, stop)).tolist()
        return self._begins[low:high]

    @property
    def blocks(self) -> Positions:
        return every_nth(self._begins)


def every_nth(begins: Positions) -> Positions:
    """At most BLOCKS blocks with equal numbers of documents, for documents that begin at `begins[:-1]`."""
    stride = -(-(len(begins) - 1) // BLOCKS)
    return begins if stride <= 1 else np.append(begins[:-1:stride], begins[-1])


def offsets(lengths: Iterable[int]) -> Positions:
    """Where each of consecutive stretches begins, then where the last one ends."""
    lengths = lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, dtype=np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class OpenFile:
    """A file to read arrays from, at any offset and from any thread. Closed with its last reference, so that no thread closes a file
    that another one reads. Raises RunFailed if the file has changed since the run started."""

    _fd = -1

    def __init__(self, path: str, remedy: str = "restore the former file"):
        self._path, self._remedy = path, remedy
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error

    def read(self, dtype: npt.DTypeLike, first: int, last: int, header: int = 0) -> npt.NDArray[Any]:
        """Elements first … last (exclusive) of an array that begins after `header` bytes."""
        values = np.empty(last - first, dtype=dtype)
        view, offset = values.view(np.uint8).data, header + first * values.itemsize
        while view:  # one call may return less than requested
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                size = os.fstat(self._fd).st_size
                raise RunFailed(f"{self._path} has shrunk to {size} bytes since the run started: {self._remedy} and resume.")
            view, offset = view[count:], offset + count
        return values

    def _unreadable(self, error: OSError) -> RunFailed:
        return RunFailed(f"{self._path} can no longer be read ({error.strerror}): {self._remedy} and resume.")

    def __del__(self) -> None:
        if self._fd >= 0:  # opening may have failed
            os.close(self._fd)


class ChainedCorpus:
    """Several corpora, one after the other."""

    def __init__(self, corpora: Sequence[Corpus]):
        self._corpora = list(corpora)
        self._tokens = offsets(corpus.tokens for corpus in corpora)
        self._documents = offsets(corpus.documents for corpus in corpora)
        self.tokens, self.documents = int(self._tokens[-1]), int(self._documents[-1])

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(corpus.fingerprint for corpus in self._corpora).encode()).hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        return np.concatenate([corpus.read(a, b) for corpus, _, a, b in self._inside(start, stop)])

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        parts = [(corpus.mask(a, b), b - a) for corpus, _, a, b in self._inside(start, stop)]
        if all(mask is None for mask, _ in parts):
            return None
        return np.concatenate([np.ones(length, dtype=np.bool_) if mask is None else mask for mask, length in parts])

    def bounds(self, first: int, last: int) -> Positions:
        bounds = [
            corpus.bounds(max(first - base, 0), min(last - base, corpus.documents)) + start
            for corpus, base, start in zip(self._corpora, self._documents.tolist(), self._tokens.tolist(), strict=False)
            if base <= last and first <= base + corpus.documents
        ]
        return np.concatenate([*(part[:-1] for part in bounds), bounds[-1][-1:]])

    def find(self, position: int) -> int:
        i = int(self._tokens.searchsorted(position, "right")) - 1
        return int(self._documents[i]) + self._corpora[i].find(position - int(self._tokens[i]))

    def starts(self, start: int, stop: int) -> Positions:
        return np.concatenate([corpus.starts(a, b) + base for corpus, base, a, b in self._inside(start, stop)])

    @property
    def blocks(self) -> Positions:
        own = [corpus.blocks[:-1] + base for corpus, base in zip(self._corpora, self._tokens.tolist(), strict=False)]
        return every_nth(np.append(np.concatenate(own), self.tokens))

    def _inside(self, start: int, stop: int) -> list[tuple[Corpus, int, int, int]]:
        """The corpora that overlap start … stop: corpus, its first position, and start and stop relative to that."""
        first = int(self._tokens.searchsorted(start, "right")) - 1
        last = max(first + 1, int(self._tokens.searchsorted(stop, "left")))
        inside = []
        for i in range(first, min(last, len(self._corpora))):
            base, end = int(self._tokens[i]), int(self._tokens[i + 1])
            inside.append((self._corpora[i], base, max(start, base) - base, min(stop, end) - base))
        return inside


class TextFileCorpus(IndexedCorpus):
    """Text files as bytes, one document per file. A file is read when a window needs it, so the corpus may exceed memory. Reads carry
    their own offset and take no lock, so threads do not disturb each other and a forked child keeps working."""

    def __init__(self, sizes: Mapping[str, int]):
        """`sizes`: bytes of each file, none of them zero, by absolute path."""
        paths = sorted(sizes)
        self._root = os.path.join(os.path.commonpath([os.path.dirname(path) for path in paths]), "")
        self.names: Sequence[str] = [path.removeprefix(self._root) for path in paths]
        super().__init__(offsets(sizes[path] + 1 for path in paths))
        self._open = functools.lru_cache(OPEN_FILES)(OpenFile)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of relative names and texts in order; independent of the folder the files are in."""
        digest = hashlib.sha256()
        for name, end in zip(self.names, self._begins[1:].tolist(), strict=True):
            digest.update(b"%s\0%d\0" % (os.fsencode(name), end))  # no name contains a zero byte
        length = _HASHED_WHOLE // _SAMPLES
        pieces = -(-self.tokens // length)
        for piece in range(min(pieces, _SAMPLES)):
            # Consecutive pieces if they cover the whole stream, else pieces spread from the first token to the last.
            start = piece * length if pieces <= _SAMPLES else piece * (self.tokens - length) // (_SAMPLES - 1)
            digest.update(self.read(start, min(start + length, self.tokens)).astype("<u2").tobytes())
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        document = self.find(start)
        begin, end = int(self._begins[document]), int(self._begins[document + 1]) - 1
        if stop <= end:  # inside one file: the usual case
            return self._bytes(document, start - begin, stop - begin)
        ids = np.full(stop - start, END, dtype=np.uint16)  # what no document overwrites is an end token
        at = start
        while at < stop:
            begin, end = int(self._begins[document]), int(self._begins[document + 1]) - 1
            until = min(stop, end)
            if at < until:
                ids[at - start : until - start] = self._bytes(document, at - begin, until - begin)
            at, document = end + 1, document + 1
        return ids

    def _bytes(self, document: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return self._open(self._root + self.names[document]).read(np.uint8, start, stop)


class MemoryCorpus(IndexedCorpus):
    """Documents given as strings. Empty strings are dropped."""

    def __init__(self, texts: Sequence[str]):
        encoded = [text.encode() for text in texts if text]
        super().__init__(offsets(len(text) + 1 for text in encoded))
        self._ids = np.full(self.tokens, END, dtype=np.uint16)
        for begin, text in zip(self._begins.tolist(), encoded, strict=False):
            self._ids[begin : begin + len(text)] = np.frombuffer(text, dtype=np.uint8)

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._ids.astype("<u2").tobytes()).hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        return self._ids[start:stop]
