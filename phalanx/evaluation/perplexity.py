"""Loss, perplexity and bits per byte of a model on text: on a run's held-out text, or on all of another source.

`phalanx eval` calls it. On held-out text it computes the same as the evaluation in training, sample for sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.data.bestfit import BestFitPacking
from phalanx.data.corpus import Corpus
from phalanx.data.pack import IGNORED, Batch, Samples, StreamPacking
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.run import Data
from phalanx.transforms.precision import computing


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums over the tokens that were predicted."""

    nats: float = 0.0
    """Sum of their losses."""
    tokens: int = 0
    bytes: int = 0
    """Bytes of their text; an end token has none."""

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def loss(self) -> float:
        """Mean per token, in nats."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers, unlike loss per token."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    def table(self) -> dict[str, float | str | None]:
        """The values for JSON; non-finite numbers become text, as in events.jsonl."""
        names = ("loss", "perplexity", "tokens", "bits_per_byte")
        values = {name: getattr(self, name) for name in names}
        return {key: value if value is None or math.isfinite(value) else str(value) for key, value in values.items()}


class Meter:
    """Measures batches with a model."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, *, compute: str, document_mask: bool):
        self._model, self._tokenizer, self._compute, self._document_mask = model, tokenizer, compute, document_mask
        self._device = next(model.parameters()).device

    def measure(self, batches: Iterable[Batch]) -> Measured:
        total = Measured()
        for batch in batches:
            counted = int((batch.targets >= 0).sum())
            total += Measured(float(self._loss(batch).double()), counted, text_bytes(batch, self._tokenizer))
        return total

    @torch.inference_mode()
    def _loss(self, batch: Batch) -> Tensor:
        """The sum of losses, with the same kernels as in training."""
        masked = self._document_mask and (batch.has_boundaries or self._device.type == "cpu")
        tokens_BS, targets_BS, positions_BS = (
            torch.from_numpy(array).to(self._device) for array in (batch.tokens, batch.targets, batch.positions)
        )
        documents_BS = torch.from_numpy(batch.documents).to(self._device) if masked else None
        with computing(self._compute, self._device):
            logits_BSV = self._model(tokens_BS, positions_BS, documents_BS)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def held_out(samples: Samples, sequences: int, batch: int) -> Iterator[Batch]:
    """The first N samples in batches, as the evaluation in training takes them."""
    count = min(sequences, samples.count)
    for first in range(0, count, batch):
        yield samples.batch(np.arange(first, min(first + batch, count)))


def whole(corpus: Corpus, length: int, batch: int, *, document_mask: bool, sequences: int | None = None) -> Iterator[Batch]:
    """All of a corpus in order, in windows of which the last may be shorter. Every token is predicted once, except the first of each
    document."""
    full, rest = divmod(max(corpus.tokens - 1, 0), length)
    most = full + 1 if sequences is None else sequences
    for first, size, count in ((0, length, min(full, most)), (full * length, rest, 1 if rest > 0 and most > full else 0)):
        if count:
            windows = StreamPacking(corpus, np.array([[first, corpus.tokens]]), size, document_mask=document_mask)
            yield from held_out(Samples(windows, seed=0, shuffle=False), count, batch)


def documents(corpus: Corpus, length: int, tokenizer: Tokenizer, data: Data) -> Samples:
    """All of a corpus with best-fit packing, as in training."""
    everything = np.array([[0, corpus.tokens]])
    cache = Path(data.cache).expanduser()
    packing = BestFitPacking(corpus, everything, length, end=tokenizer.end, document_mask=data.document_mask, cache=cache)
    return Samples(packing, seed=0, shuffle=False)


def text_bytes(batch: Batch, tokenizer: Tokenizer) -> int:
    """Bytes of the text of the predicted tokens."""
    if tokenizer.name == "byte":
        return int(((batch.targets >= 0) & (batch.targets < tokenizer.end)).sum())
    # Decoded run by run, since a token may be a part of a character; runs may begin or end inside one at the edge of a window.
    total = 0
    for targets, documents in zip(batch.targets, batch.documents, strict=True):
        edges = np.flatnonzero(np.diff(documents) | np.diff(targets >= 0)) + 1
        for run in np.split(targets, edges):
            if run[0] >= 0:
                total += len(tokenizer.decode(run[run != tokenizer.end]).encode())
    return total
