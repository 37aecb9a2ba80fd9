"""Shows what the model will see at a step: samples split into documents and spans of text. `phalanx data preview` calls it.

It reads the same samples from the same dataset as training does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.data.dataset import Dataset
from phalanx.data.pack import Batch
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject

_PORTION = 256  # samples in memory at a time


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
    documents: tuple[PieceView, ...]
    trained: int
    """Number of targets with a loss."""
    masked: int
    """Number of targets without a loss: in masked text, and where the next document begins."""
    padding: int

    def table(self) -> JsonObject:
        return {
            "sample": self.sample,
            "source": self.source,
            "epoch": self.epoch,
            "window": self.window,
            "trained": self.trained,
            "masked": self.masked,
            "padding": self.padding,
            "pieces": [
                {"document": piece.document, "start": piece.start, "stop": piece.stop, "first": piece.first}
                for piece in self.documents
            ],
        }


def batches(dataset: Dataset, step: int, batch: int) -> Iterator[Batch]:
    """The global batch of a step (the first is 1), in portions."""
    first, last = (step - 1) * batch, step * batch
    if dataset.train.limit is not None and last > dataset.train.limit:
        raise RunError(
            f"--step {step} ends with sample {last} and the sources give {dataset.train.limit} within their epochs, enough "
            f"for {dataset.train.limit // batch} steps of {batch}: choose an earlier step or raise `epochs`."
        )
    for begin in range(first, last, _PORTION):
        yield dataset.train.batch(np.arange(begin, min(begin + _PORTION, last)))


def split_samples(dataset: Dataset, batch: Batch) -> Iterator[SampleView]:
    """Splits each sample of a batch into documents and text."""
    for row, index in enumerate(batch.samples.tolist()):
        trace = dataset.train.trace(index)
        tokens, targets = batch.tokens[row], batch.targets[row]
        pieces, column = [], 0
        for document, start, stop in trace.spans:
            until = column + stop - start
            texts = _text_spans(tokens[column:until], targets[column:until], dataset.tokenizer)
            pieces.append(PieceView(document, start, stop, column, texts))
            column = until
        count = int((targets >= 0).sum())
        padding = len(tokens) - column
        yield SampleView(
            sample=index,
            source=trace.source,
            epoch=trace.epoch,
            window=trace.window,
            documents=tuple(pieces),
            trained=count,
            masked=len(tokens) - padding - count,
            padding=padding,
        )


def _text_spans(tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], tokenizer: Tokenizer) -> tuple[TextSpan, ...]:
    """The text of a span. A character of several tokens belongs to the token that completes it."""
    # A token is the target of the position before it; the first token of a span is the target of none.
    trained = [False, *(targets[:-1] >= 0).tolist()]
    shown = list(zip(tokens.tolist(), trained, strict=True))
    if targets[-1] == tokenizer.end:  # a target but not an input, because nothing follows it
        shown.append((tokenizer.end, True))
    spans: list[TextSpan] = []
    stream = tokenizer.stream()
    for token, counted in shown:
        text = tokenizer.marks.get(token) or stream.push(token)
        if not text:
            continue
        if spans and spans[-1].trained == counted:
            text = spans.pop().text + text
        spans.append(TextSpan(text, counted))
    return tuple(spans)
