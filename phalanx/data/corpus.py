"""What a run reads from: one flat stream of token ids in which every document is followed by the end token.

`data/corpus` (text read as it lies), `data/token_files` (token files) and Chain (several of them) are corpora; `data/shuffle`
divides one, `data/pack` and `data/bestfit` cut windows out of it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import RunFailed

BLOCKS = 1 << 17
"""Most blocks a corpus is divided into: what is kept in memory of its index, however many documents there are."""

Ids = npt.NDArray[np.integer[Any]]
Positions = npt.NDArray[np.int64]


class Corpus(Protocol):
    """A stream of documents that can be read anywhere, from any thread, without reading what stands before."""

    @property
    def fingerprint(self) -> str:
        """Changes when the text does; a resumed run compares it. May cost a look at the text."""

    @property
    def documents(self) -> int: ...

    @property
    def tokens(self) -> int:
        """End tokens included."""

    def read(self, start: int, stop: int) -> Ids:
        """Ids start … stop of the stream: exactly stop - start of them."""

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of these ids are trained on as targets; None: all of them."""

    def bounds(self, first: int, last: int) -> Positions:
        """Where the documents first … last begin, both included; `last` may be the number of documents: the stream's end."""

    def find(self, position: int) -> int:
        """The document that holds this id of the stream."""

    def starts(self, start: int, stop: int) -> Positions:
        """Where documents begin in start … stop, `stop` not included."""

    def blocks(self) -> Positions:
        """Where blocks of consecutive documents begin, and at last the stream's end: as few numbers for any corpus."""


class IndexedCorpus:
    """The part of a corpus that follows from where its documents begin, for those that know it by heart."""

    def __init__(self, begins: Positions):
        """`begins`: where each document begins, and at last the stream's end."""
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

    def blocks(self) -> Positions:
        return thinned(self._begins)


def thinned(begins: Positions) -> Positions:
    """At most BLOCKS blocks, as even in documents as can be, of the documents that begin at `begins[:-1]`."""
    stride = -(-(len(begins) - 1) // BLOCKS)
    return begins if stride <= 1 else np.append(begins[:-1:stride], begins[-1])


class OpenFile:
    """A descriptor that closes when its last reader lets go, so that no thread can close what another one is reading."""

    fd = -1

    def __init__(self, path: str):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def fill(self, view: memoryview, offset: int) -> bool:
        """Fill `view` with what stands from `offset` on; False: the file ends before."""
        filled = 0
        while filled < len(view):  # one call may give less than it was asked for
            got = os.preadv(self.fd, [view[filled:]], offset + filled)
            if got == 0:
                return False
            filled += got
        return True

    def __del__(self) -> None:
        if self.fd >= 0:  # opening may have failed
            os.close(self.fd)


class ChainedCorpus:
    """Several corpora one after the other."""

    def __init__(self, corpora: Sequence[Corpus]):
        self._corpora = list(corpora)
        self._tokens = _ends(corpus.tokens for corpus in corpora)
        self._documents = _ends(corpus.documents for corpus in corpora)
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
        found = [np.array([], dtype=np.int64)]
        for i, corpus in enumerate(self._corpora):
            base = int(self._documents[i])
            low, high = max(first - base, 0), min(last - base, corpus.documents)
            if low < high:
                found.append(corpus.bounds(low, high)[:-1] + self._tokens[i])
        return np.append(np.concatenate(found), self._begin(last))

    def find(self, position: int) -> int:
        i = int(self._tokens.searchsorted(position, "right")) - 1
        return int(self._documents[i]) + self._corpora[i].find(position - int(self._tokens[i]))

    def starts(self, start: int, stop: int) -> Positions:
        return np.concatenate([corpus.starts(a, b) + base for corpus, base, a, b in self._inside(start, stop)])

    def blocks(self) -> Positions:
        own = [corpus.blocks()[:-1] + base for corpus, base in zip(self._corpora, self._tokens.tolist(), strict=False)]
        return thinned(np.append(np.concatenate(own), self.tokens))

    def _begin(self, document: int) -> int:
        if document >= self.documents:
            return self.tokens
        i = int(self._documents.searchsorted(document, "right")) - 1
        own = document - int(self._documents[i])
        return int(self._corpora[i].bounds(own, own + 1)[0]) + int(self._tokens[i])

    def _inside(self, start: int, stop: int) -> list[tuple[Corpus, int, int, int]]:
        """The corpora that hold start … stop: each with the place where it begins, and start and stop within it."""
        first = int(self._tokens.searchsorted(start, "right")) - 1
        last = max(first + 1, int(self._tokens.searchsorted(stop, "left")))
        inside = []
        for i in range(first, min(last, len(self._corpora))):
            base, end = int(self._tokens[i]), int(self._tokens[i + 1])
            inside.append((self._corpora[i], base, max(start, base) - base, min(stop, end) - base))
        return inside


def _ends(counts: Any) -> Positions:
    return np.concatenate([[0], np.cumsum(list(counts))]).astype(np.int64)


END = 256
"""What follows the last byte of each document: the byte tokenizer's end token."""
_OPEN_FILES = 64
"""Descriptors kept open at once: enough that neighbouring windows share them, far below any process's limit."""
_HASHED_WHOLE = 64 << 20
"""Up to so many bytes the fingerprint looks at all of them, beyond that at _SAMPLES pieces, together as many."""
_SAMPLES = 4096


class TextFileCorpus(IndexedCorpus):
    """One document per file, read where and when a window needs it: the corpus may be far bigger than memory.

    Reads carry their own offset and there is no lock, so threads do not disturb each other and a forked child reads on.
    """

    def __init__(self, root: str, sizes: Mapping[str, int]):
        """`sizes`: the bytes of each file, none of them zero, by its path; all paths begin with `root`."""
        paths = sorted(sizes)
        self._root = os.path.join(root, "")
        self.names: Sequence[str] = [path.removeprefix(self._root) for path in paths]
        super().__init__(_begins([sizes[path] for path in paths]))
        self._open = functools.lru_cache(_OPEN_FILES)(OpenFile)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same names and texts in the same order, wherever the files lie."""
        digest = hashlib.sha256()
        for name, end in zip(self.names, self._begins[1:].tolist(), strict=True):
            digest.update(b"%s\0%d\0" % (os.fsencode(name), end))  # no name holds a zero byte
        length = _HASHED_WHOLE // _SAMPLES
        pieces = -(-self.tokens // length)
        for piece in range(min(pieces, _SAMPLES)):
            # Side by side where that covers the whole stream, else spread over it from its first token to its last.
            start = piece * length if pieces <= _SAMPLES else piece * (self.tokens - length) // (_SAMPLES - 1)
            digest.update(self.read(start, min(start + length, self.tokens)).astype("<u2").tobytes())
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        document = int(self._begins.searchsorted(start, "right")) - 1
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
        path = self._root + self.names[document]
        ids = np.empty(stop - start, dtype=np.uint8)
        try:
            file = self._open(path)
            if not file.fill(ids.data, start):
                raise RunFailed(
                    f"{path} has shrunk: it held {self._size(document)} bytes when the run started "
                    f"and holds {os.fstat(file.fd).st_size} now; put the former text back and resume."
                )
        except OSError as error:
            raise RunFailed(
                f"{path} can no longer be read ({error.strerror}): it held {self._size(document)} bytes "
                "when the run started; make it readable again and resume."
            ) from error
        return ids

    def _size(self, document: int) -> int:
        return int(self._begins[document + 1] - self._begins[document]) - 1


class MemoryCorpus(IndexedCorpus):
    """Documents given as strings; empty ones are left out."""

    def __init__(self, texts: Sequence[str]):
        encoded = [text.encode() for text in texts if text]
        super().__init__(_begins([len(text) for text in encoded]))
        self._ids = np.full(self.tokens, END, dtype=np.uint16)
        for begin, text in zip(self._begins.tolist(), encoded, strict=False):
            self._ids[begin : begin + len(text)] = np.frombuffer(text, dtype=np.uint8)

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._ids.astype("<u2").tobytes()).hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        return self._ids[start:stop]


def _begins(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each document begins in the stream, and where that ends: each is followed by one end token."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64) + 1)]).astype(np.int64)
