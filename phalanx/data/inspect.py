"""Looks at a corpus: how many documents of what length, which are there twice, what they say. `phalanx data inspect` calls it.

Everything is read once, in portions; memory is bounded whatever the corpus.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.bestfit import best_fit
from phalanx.data.corpus import Corpus
from phalanx.data.tokenizer import Tokenizer

_I8 = npt.NDArray[np.int64]
_MOST = 1 << 24
"""Documents that hashes and lengths are kept of, eight bytes each; of a larger corpus every n-th hash stands for n."""
_SHORT = 1 << 20
"""Lengths below are counted one by one, longer ones are listed: a corpus has few of those, or is made of little else."""
_PORTION = 1 << 22  # tokens read at a time
_PLAIN = np.dtype("<u4")
_SPEAKING = 64  # documents whose text is looked at to learn how many bytes a token stands for


@dataclass(slots=True)
class Lengths:
    """Tokens of documents, without their end tokens: exact counts in bounded memory."""

    counts: _I8 = field(default_factory=lambda: np.zeros(_SHORT, dtype=np.int64))
    long: list[int] = field(default_factory=list)

    def add(self, lengths: _I8) -> None:
        short = lengths[lengths < _SHORT]
        if len(short):
            found = np.bincount(short)
            self.counts[: len(found)] += found
        self.long += lengths[lengths >= _SHORT].tolist()

    def at(self, part: float) -> int:
        """The length that this part of all documents does not exceed."""
        place = max(0, int(np.ceil(part * self.documents)) - 1)
        short = int(self.counts.sum())
        if place < short:
            return int(np.searchsorted(np.cumsum(self.counts), place, side="right"))
        return sorted(self.long)[place - short]

    @property
    def documents(self) -> int:
        return int(self.counts.sum()) + len(self.long)

    def table(self) -> dict[str, float]:
        if not self.documents:
            return {}
        total = int((self.counts * np.arange(_SHORT)).sum()) + sum(self.long)
        return {
            "min": self.at(0.0),
            "median": self.at(0.5),
            "mean": total / self.documents,
            "p90": self.at(0.9),
            "p99": self.at(0.99),
            "max": self.at(1.0),
        }

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, to, documents): lengths from … to, both included; each range twice as wide as the one before."""
        values = np.flatnonzero(self.counts)
        bins: dict[int, int] = {}
        for length, count in [*zip(values.tolist(), self.counts[values].tolist(), strict=True), *((n, 1) for n in self.long)]:
            bins[length.bit_length()] = bins.get(length.bit_length(), 0) + count
        if not bins:
            return []
        return [((1 << b) >> 1, (1 << b) - 1, bins.get(b, 0)) for b in range(min(bins), max(bins) + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectReport:
    """What there is to say about one source."""

    documents: int
    tokens: int
    """End tokens included."""
    bytes: int | None
    """Of the text; None where no tokenizer says what the ids stand for."""
    bytes_estimated: bool
    """Reckoned from a few documents instead of all."""
    lengths: dict[str, float]
    """Tokens of a document without its end token: min, median, mean, p90, p99, max."""
    histogram: list[tuple[int, int, int]]
    duplicates: int
    """Documents whose tokens are those of an earlier one."""
    duplicates_of: int
    """Documents that were compared: all, or in a very large corpus those whose hash falls into a part of all hashes."""
    padding: float | None
    """Part of the windows that best-fit packing would leave empty."""
    sequence_length: int | None
    masked_tokens: int | None
    """Tokens that are not trained on; None where the corpus has no masks."""
    sample: list[dict[str, Any]]
    """A few documents: number, tokens, and the first characters."""

    @property
    def duplicate_share(self) -> float:
        return self.duplicates / max(self.duplicates_of, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    """What a person wants to see of a corpus."""

    sequence_length: int | None = None
    samples: int = 3
    characters: int = 200
    seed: int = 0


def inspect(
    corpus: Corpus, tokenizer: Tokenizer | None, wish: InspectOptions, progress: Callable[[int, int], None] | None = None
) -> InspectReport:
    """Reads all of the corpus. `progress` is told how many tokens of how many have been looked at."""
    lengths, masked, hashes = Lengths(), 0, _Hashes(corpus.documents)
    has_masks = corpus.tokens > 0 and corpus.mask(0, 1) is not None
    for bounds in _portions(corpus):
        lengths.add(np.diff(bounds) - 1)
        if len(bounds) == 2:
            hashes.add_one(_blocks(corpus, *bounds.tolist()))
        else:
            hashes.add(corpus.read(*bounds[[0, -1]].tolist()), bounds - bounds[0])
        for low in range(int(bounds[0]), int(bounds[-1]), _PORTION) if has_masks else ():
            trained = corpus.mask(low, min(low + _PORTION, int(bounds[-1])))
            masked += 0 if trained is None else int((~trained).sum())
        if progress is not None:
            progress(int(bounds[-1]), corpus.tokens)
    text, estimated = _text_bytes(corpus, tokenizer, wish.seed)
    return InspectReport(
        documents=corpus.documents,
        tokens=corpus.tokens,
        bytes=text,
        bytes_estimated=estimated,
        lengths=lengths.table(),
        histogram=lengths.histogram(),
        duplicates=hashes.duplicates,
        duplicates_of=hashes.compared,
        padding=None if wish.sequence_length is None else padding(corpus, wish.sequence_length),
        sequence_length=wish.sequence_length,
        masked_tokens=masked if has_masks else None,
        sample=[_shown(corpus, tokenizer, number, wish) for number in _some(corpus.documents, wish.samples, wish.seed)],
    )


class _Hashes:
    """64-bit hashes of documents, of all or of the n-th part, chosen by the hash itself so that equals stay together."""

    def __init__(self, documents: int):
        self._every = -(-documents // _MOST)
        self._kept: list[npt.NDArray[np.uint64]] = []

    def add(self, ids: npt.NDArray[np.integer[Any]], bounds: _I8) -> None:
        """Documents that begin at these bounds of the ids."""
        data, edges = _plain(ids).data.cast("B"), (bounds * _PLAIN.itemsize).tolist()
        pairs = itertools.pairwise(edges)
        self._keep(b"".join(hashlib.blake2b(data[a:b], digest_size=8).digest() for a, b in pairs))

    def add_one(self, blocks: Iterator[npt.NDArray[np.integer[Any]]]) -> None:
        """A document in blocks."""
        digest = hashlib.blake2b(digest_size=8)
        for block in blocks:
            digest.update(_plain(block).data)
        self._keep(digest.digest())

    def _keep(self, digests: bytes) -> None:
        found = np.frombuffer(digests, dtype="<u8")
        self._kept.append(found if self._every <= 1 else found[found % np.uint64(self._every) == 0])

    @property
    def compared(self) -> int:
        return sum(map(len, self._kept))

    @property
    def duplicates(self) -> int:
        if not self.compared:
            return 0
        self._kept = [np.sort(np.concatenate(self._kept))]
        return int((self._kept[0][1:] == self._kept[0][:-1]).sum())


def padding(corpus: Corpus, length: int) -> float:
    """Part of all windows that best-fit packing leaves empty; beyond _MOST documents, of the windows of the first so many."""
    inputs = np.diff(corpus.bounds(0, min(corpus.documents, _MOST))) - 1  # the end token is a target and need not be an input
    inputs = inputs[inputs > 0]
    full, rests = np.divmod(inputs, length)
    _, packed = best_fit(-np.sort(-rests[rests > 0]), length)
    windows = int(full.sum()) + packed
    return 1.0 - int(inputs.sum()) / (windows * length) if windows else 0.0


def _portions(corpus: Corpus) -> Iterator[_I8]:
    """Whole documents, a few million tokens of them: where each begins, and where the last ends.

    A document longer than that is a portion by itself.
    """
    first = 0
    while first < corpus.documents:
        begin = int(corpus.bounds(first, first + 1)[0])
        last = corpus.documents
        if begin + _PORTION < corpus.tokens:
            last = max(first + 1, corpus.find(begin + _PORTION))
        yield corpus.bounds(first, last)
        first = last


def _blocks(corpus: Corpus, low: int, high: int) -> Iterator[npt.NDArray[np.integer[Any]]]:
    for begin in range(low, high, _PORTION):
        yield corpus.read(begin, min(begin + _PORTION, high))


def _plain(ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    """In one format: a corpus may give the same ids in different ones."""
    return np.ascontiguousarray(ids, dtype=_PLAIN)


def _text_bytes(corpus: Corpus, tokenizer: Tokenizer | None, seed: int) -> tuple[int | None, bool]:
    """Bytes of the text, and whether that is an estimate."""
    if tokenizer is None:
        return None, False
    if tokenizer.name == "byte":
        return corpus.tokens - corpus.documents, False
    numbers = _some(corpus.documents, _SPEAKING, seed)
    ends = [corpus.bounds(number, number + 1).tolist() for number in numbers]
    tokens = sum(stop - start for start, stop in ends)
    text = sum(len(tokenizer.decode(corpus.read(start, min(stop, start + _PORTION))).encode()) for start, stop in ends)
    read = sum(min(stop - start, _PORTION) for start, stop in ends)
    everything = len(numbers) == corpus.documents and read == tokens
    return (text if everything else round(text / max(read, 1) * corpus.tokens)), not everything


def _some(documents: int, count: int, seed: int) -> list[int]:
    """A few documents, the same for the same seed."""
    return sorted(random.Random(seed).sample(range(documents), min(count, documents)))


def _shown(corpus: Corpus, tokenizer: Tokenizer | None, number: int, wish: InspectOptions) -> dict[str, Any]:
    start, stop = corpus.bounds(number, number + 1).tolist()
    ids = corpus.read(start, min(stop, start + 4 * wish.characters))  # no character takes more tokens than it has bytes
    text = None if tokenizer is None else tokenizer.decode(ids)[: wish.characters]
    return {"document": number, "tokens": stop - start - 1, "text": text, "ids": ids[:32].tolist()}
