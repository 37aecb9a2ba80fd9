"""For `phalanx data`: statistics of a corpus, read once in portions, in bounded memory (`inspect`); and the text that the model sees at
a step, from the same samples as in training (`batches`, `split_samples`)."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Corpus
from phalanx.data.dataset import Dataset
from phalanx.data.pack import Batch, make_plan
from phalanx.data.token_files import TokenFiles
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject

T = TypeVar("T")
_I8 = npt.NDArray[np.int64]
_MAX_DOCUMENTS = 1 << 24
"""Maximum number of hashes and lengths in memory, eight bytes each; a larger corpus is sampled by hash."""
_PORTION = 1 << 22  # tokens read at a time
_SAMPLES = 256  # samples of a preview in memory at a time
_HASHED_DTYPE = np.dtype("<u4")
_DECODED = 64  # documents that are decoded to estimate the bytes per token


class Lengths(Counter[int]):
    """Document lengths without end token, counted exactly: even a corpus of 10¹² tokens has only a million different lengths."""

    def add(self, lengths: _I8) -> None:
        values, counts = np.unique(lengths, return_counts=True)
        self.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def table(self) -> dict[str, float]:
        documents = self.total()
        if not documents:
            return {}
        lengths = sorted(self)
        until = np.cumsum([self[length] for length in lengths])

        def quantile(fraction: float) -> int:
            """The length that this fraction of all documents does not exceed."""
            return lengths[int(until.searchsorted(max(0, int(np.ceil(fraction * documents)) - 1), "right"))]

        mean = sum(length * count for length, count in self.items()) / documents
        table = {"min": quantile(0.0), "median": quantile(0.5), "mean": mean}
        return table | {"p90": quantile(0.9), "p99": quantile(0.99), "max": quantile(1.0)}

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, to, documents) for lengths from … to, both included; each range is twice as wide as the one before."""
        bins: Counter[int] = Counter()
        for length, count in self.items():
            bins[length.bit_length()] += count
        return [((1 << b) >> 1, (1 << b) - 1, bins[b]) for b in range(min(bins), max(bins) + 1)] if bins else []


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentExcerpt:
    """The beginning of one document."""

    document: int
    tokens: int
    text: str | None
    """None without a tokenizer."""
    ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectReport:
    """Statistics of one source."""

    documents: int
    tokens: int
    """End tokens included."""
    bytes: int | None
    """Bytes of the text; None without a tokenizer to decode it."""
    bytes_estimated: bool
    """Whether `bytes` is estimated from a few documents."""
    lengths: dict[str, float]
    """Document length: min, median, mean, p90, p99, max. An end token behind the document does not count."""
    histogram: list[tuple[int, int, int]]
    duplicates: int
    """Documents with the same tokens as an earlier one."""
    duplicates_of: int
    """Documents that were compared: all, or a sample by hash of a very large corpus."""
    padding: float | None
    """Padding ratio of best-fit packing."""
    sequence_length: int | None
    masked_tokens: int | None
    """Tokens that are not trained on; None if the corpus has no masks."""
    sample: list[DocumentExcerpt]
    """A few documents."""

    @property
    def duplicate_share(self) -> float:
        return self.duplicates / max(self.duplicates_of, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectOptions:
    """What `inspect` computes and shows."""

    sequence_length: int | None = None
    samples: int = 3
    characters: int = 200
    seed: int = 0


def inspect(
    corpus: Corpus, tokenizer: Tokenizer | None, options: InspectOptions, progress: Callable[[int], None] = lambda tokens: None
) -> InspectReport:
    """Reads the whole corpus. `progress` receives the number of tokens of each portion."""
    lengths, parts, end = Lengths(), [np.array([], dtype="<u8")], _end_token(corpus, tokenizer)
    stride = np.uint64(max(1, -(-corpus.documents // _MAX_DOCUMENTS)))
    for bounds in _portions(corpus):
        hashes, last = _hashes(corpus, bounds)
        # Most documents have an end token behind them. A conversation has what its template ends with.
        lengths.add(np.diff(bounds) - (last == end))
        # Of a very large corpus every n-th value, so that equal documents stay together.
        parts.append(hashes[hashes % stride == 0])
        progress(int(bounds[-1] - bounds[0]))
    compared = np.sort(np.concatenate(parts))
    masks = [int((~trained).sum()) for trained in _blocks(corpus.mask, 0, corpus.tokens) if trained is not None]
    text, estimated = _text_bytes(corpus, tokenizer, lengths, options.seed)
    return InspectReport(
        documents=corpus.documents,
        tokens=corpus.tokens,
        bytes=text,
        bytes_estimated=estimated,
        lengths=lengths.table(),
        histogram=lengths.histogram(),
        duplicates=int((compared[1:] == compared[:-1]).sum()),
        duplicates_of=len(compared),
        padding=None if options.sequence_length is None else padding(corpus, options.sequence_length),
        sequence_length=options.sequence_length,
        masked_tokens=sum(masks) if masks else None,
        sample=[
            _excerpt(corpus, tokenizer, number, options) for number in _draw(corpus.documents, options.samples, options.seed)
        ],
    )


def _end_token(corpus: Corpus, tokenizer: Tokenizer | None) -> int:
    """The end token of a corpus: as its meta file says, because `data.end_token` may have named another one than the tokenizer's own."""
    if isinstance(corpus, TokenFiles):
        return corpus.meta.end
    assert tokenizer is not None, "only token files can be read without their tokenizer"
    return tokenizer.end


def _hashes(corpus: Corpus, bounds: _I8) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """64-bit hashes of the documents between these bounds, and their last ids. Ids are hashed in one dtype: corpora with equal ids may have
    different ones."""
    if len(bounds) == 2:  # may be longer than memory
        digest, ids = hashlib.blake2b(digest_size=8), np.zeros(1, dtype=_HASHED_DTYPE)
        for block in _blocks(corpus.read, *bounds.tolist()):
            ids = np.ascontiguousarray(block, dtype=_HASHED_DTYPE)
            digest.update(ids.data)
        return np.frombuffer(digest.digest(), dtype="<u8"), ids[-1:]
    ids = np.ascontiguousarray(corpus.read(*bounds[[0, -1]].tolist()), dtype=_HASHED_DTYPE)
    data = ids.data.cast("B")
    pairs = itertools.pairwise(((bounds - bounds[0]) * _HASHED_DTYPE.itemsize).tolist())
    hashes = b"".join(hashlib.blake2b(data[a:b], digest_size=8).digest() for a, b in pairs)
    return np.frombuffer(hashes, dtype="<u8"), ids[bounds[1:] - bounds[0] - 1]


def padding(corpus: Corpus, length: int) -> float:
    """Padding ratio of best-fit packing, computed from the first _MAX_DOCUMENTS documents."""
    if not corpus.documents:
        return 0.0
    count = min(corpus.documents, _MAX_DOCUMENTS)
    return make_plan(corpus, np.array([[0, corpus.bounds(count, count)[0]]]), length).padding_ratio(length)


def _portions(corpus: Corpus) -> Iterator[_I8]:
    """Yields portions of whole documents with a few million tokens, as start positions and the end of the last one. A longer document
    is a portion by itself."""
    first = 0
    while first < corpus.documents:
        begin = int(corpus.bounds(first, first + 1)[0])
        last = corpus.documents
        if begin + _PORTION < corpus.tokens:
            last = max(first + 1, corpus.find(begin + _PORTION))
        yield corpus.bounds(first, last)
        first = last


def _blocks(read: Callable[[int, int], T], low: int, high: int) -> Iterator[T]:
    """What `read` returns for low … high, a few million tokens at a time."""
    return (read(begin, min(begin + _PORTION, high)) for begin in range(low, high, _PORTION))


def _text_bytes(corpus: Corpus, tokenizer: Tokenizer | None, lengths: Lengths, seed: int) -> tuple[int | None, bool]:
    """Bytes of the text, and whether that is an estimate."""
    if tokenizer is None:
        return None, False
    if tokenizer.name == "byte":
        return sum(length * count for length, count in lengths.items()), False
    numbers = _draw(corpus.documents, _DECODED, seed)
    ends = [corpus.bounds(number, number + 1).tolist() for number in numbers]
    tokens = sum(stop - start for start, stop in ends)
    text = sum(len(tokenizer.decode(corpus.read(start, min(stop, start + _PORTION))).encode()) for start, stop in ends)
    read = sum(min(stop - start, _PORTION) for start, stop in ends)
    everything = len(numbers) == corpus.documents and read == tokens
    return (text if everything else round(text / max(read, 1) * corpus.tokens)), not everything


def _draw(documents: int, count: int, seed: int) -> list[int]:
    """Document numbers, drawn with this seed."""
    return sorted(random.Random(seed).sample(range(documents), min(count, documents)))


def _excerpt(corpus: Corpus, tokenizer: Tokenizer | None, number: int, options: InspectOptions) -> DocumentExcerpt:
    start, stop = corpus.bounds(number, number + 1).tolist()
    ids = corpus.read(start, min(stop, start + 4 * options.characters))  # no character has more tokens than bytes
    text = None if tokenizer is None else tokenizer.decode(ids)[: options.characters]
    ended = int(corpus.read(stop - 1, stop)[0]) == _end_token(corpus, tokenizer)
    return DocumentExcerpt(document=number, tokens=stop - start - ended, text=text, ids=ids[:32].tolist())


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Consecutive tokens of a document that are all trained on, or all not."""

    text: str
    trained: bool
    """Whether the tokens are targets with a loss; False: they are only inputs."""


@dataclass(frozen=True, slots=True)
class PieceView:
    """A span of a document in a window."""

    document: int
    """Document number in the source."""
    start: int
    """The span is tokens start … stop of the document."""
    stop: int
    first: int
    """First position in the window."""
    texts: tuple[TextSpan, ...]


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of a global batch."""

    sample: int
    """Global sample index."""
    source: str
    epoch: int
    window: int
    pieces: tuple[PieceView, ...]
    trained: int
    """Number of targets with a loss."""
    masked: int
    """Number of targets without a loss: in masked text, and where the next document begins."""
    padding: int

    def table(self) -> JsonObject:
        """The values for JSON, without the texts."""
        table = asdict(self)
        for piece in table["pieces"]:
            del piece["texts"]
        return table


def batches(dataset: Dataset, step: int, batch: int) -> Iterator[Batch]:
    """The global batch of a step (the first is 1), in portions."""
    first, last = (step - 1) * batch, step * batch
    if dataset.train.limit is not None and last > dataset.train.limit:
        raise RunError(
            f"--step {step} ends with sample {last} and the sources give {dataset.train.limit} within their epochs, enough "
            f"for {dataset.train.limit // batch} steps of {batch}: choose an earlier step or raise `epochs`."
        )
    for begin in range(first, last, _SAMPLES):
        yield dataset.train.batch(np.arange(begin, min(begin + _SAMPLES, last)))


def split_samples(dataset: Dataset, batch: Batch) -> Iterator[SampleView]:
    """Splits each sample of a batch into documents and text."""
    for row, index in enumerate(batch.samples.tolist()):
        trace = dataset.train.trace(index)
        tokens, targets = batch.tokens[row], batch.targets[row]
        pieces, column = [], 0
        for document, start, stop in trace.spans:
            until = column + stop - start
            texts = _text_spans(tokens[column:until], targets[column:until], dataset.tokenizer, inside=until < len(tokens))
            pieces.append(PieceView(document, start, stop, column, texts))
            column = until
        trained = int((targets >= 0).sum())
        counts = {"trained": trained, "masked": column - trained, "padding": len(tokens) - column}
        yield SampleView(index, trace.source, trace.epoch, trace.window, tuple(pieces), **counts)


def _text_spans(
    tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], tokenizer: Tokenizer, *, inside: bool
) -> tuple[TextSpan, ...]:
    """The text of a span. A character of several tokens belongs to the token that completes it. `inside`: the window goes on behind it."""
    # A token is the target of the position before it; the first token of a span is the target of none.
    trained = [False, *(targets[:-1] >= 0).tolist()]
    shown = list(zip(tokens.tolist(), trained, strict=True))
    # The last token of a packed document is a target but not an input, because nothing follows it.
    if targets[-1] == tokenizer.end or (inside and targets[-1] >= 0):
        shown.append((int(targets[-1]), True))
    spans: list[TextSpan] = []
    push = tokenizer.stream()
    for token, counted in shown:
        text = tokenizer.marks.get(token) or push(token)
        if not text:
            continue
        if spans and spans[-1].trained == counted:
            text = spans.pop().text + text
        spans.append(TextSpan(text, counted))
    return tuple(spans)
