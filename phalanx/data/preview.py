"""What the model will see at a step: samples taken apart into documents and stretches of text. `phalanx data preview` shows it.

It asks the same dataset for the same samples as training does, so what it says is what happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.dataset import Dataset
from phalanx.data.pack import Batch
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError

_PORTION = 256  # samples in memory at a time


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Neighbouring tokens of a document that are all trained on, or all not."""

    text: str
    trained: bool
    """The tokens are predicted and their loss counts. False: they are only read."""


@dataclass(frozen=True, slots=True)
class PieceView:
    """A piece of a document in a window."""

    document: int
    """Its number in the source."""
    start: int
    """The piece is tokens start … stop of the document."""
    stop: int
    first: int
    """Where in the window it begins."""
    stretches: tuple[TextSpan, ...]


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of a global batch, taken apart."""

    sample: int
    """Its index among all samples of the run."""
    source: str
    epoch: int
    window: int
    documents: tuple[PieceView, ...]
    trained: int
    """Targets whose loss counts."""
    masked: int
    """Targets whose loss does not: in masked text, and where the next document begins."""
    padding: int

    def table(self) -> dict[str, Any]:
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
    """The global batch of a step, counted from 1, in portions."""
    first, last = (step - 1) * batch, step * batch
    if dataset.train.limit is not None and last > dataset.train.limit:
        raise RunError(
            [
                f"--step {step} ends with sample {last} and the sources give {dataset.train.limit} within their epochs, enough "
                f"for {dataset.train.limit // batch} steps of {batch}: choose an earlier step or raise `epochs`."
            ]
        )
    for begin in range(first, last, _PORTION):
        yield dataset.train.batch(np.arange(begin, min(begin + _PORTION, last)))


def samples(dataset: Dataset, batch: Batch) -> Iterator[SampleView]:
    """Each sample of a batch, taken apart."""
    for row, index in enumerate(batch.samples.tolist()):
        trace = dataset.train.trace(index)
        tokens, targets = batch.tokens[row], batch.targets[row]
        pieces, column = [], 0
        for document, start, stop in trace.pieces:
            until = column + stop - start
            stretches = _stretches(tokens[column:until], targets[column:until], dataset.tokenizer)
            pieces.append(PieceView(document, start, stop, column, stretches))
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


def _stretches(tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], tokenizer: Tokenizer) -> tuple[TextSpan, ...]:
    """Text of a piece. A character of several tokens counts with the token that completes it."""
    # A token is the target of the place before it; the first of a piece is the target of none.
    trained = [False, *(targets[:-1] >= 0).tolist()]
    shown = list(zip(tokens.tolist(), trained, strict=True))
    if targets[-1] == tokenizer.end:  # foretold but not read, since nothing follows it
        shown.append((tokenizer.end, True))
    found: list[TextSpan] = []
    stream = tokenizer.stream()
    for token, counted in shown:
        text = tokenizer.marks.get(token) or stream.push(token)
        if not text:
            continue
        if found and found[-1].trained == counted:
            text = found.pop().text + text
        found.append(TextSpan(text, counted))
    return tuple(found)
