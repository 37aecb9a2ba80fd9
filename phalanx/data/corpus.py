"""What a run reads from: one flat stream of token ids in which every document is followed by the end token.

`data/source` (text read as it lies), `data/tokenfile` (token files) and Chain (several of them) are corpora; `data/holdout`
divides one, `data/pack` and `data/bestfit` cut windows out of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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


class Indexed:
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


class Chain:
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
