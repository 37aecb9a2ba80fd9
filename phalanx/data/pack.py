"""Cuts documents into windows of one length and numbers them as samples. `dataset` builds them, `loader` asks for batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.data.shuffle import Permutation, key
from phalanx.data.source import Documents
from phalanx.data.split import Spans
from phalanx.spec.errors import RunError

IGNORED = -100
"""The target that no loss is computed for; what cross entropy ignores by default."""

Part = Literal["train", "eval"]
_TOO_SHORT: dict[Part, tuple[str, str]] = {
    "train": ("training", "more text"),
    "eval": ("held-out", "a larger data.eval_fraction (0 holds out none)"),
}
"""What the text of each part is called, and what else makes it long enough."""


class Window(NamedTuple):
    """One sample; each array has the window's length."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """The token that follows each; IGNORED where that begins another document, which nothing before it foretells."""
    positions: npt.NDArray[np.int64]
    """Counted from the beginning of the document, or of the window where the document began before it."""
    documents: npt.NDArray[np.int32]
    """0, 1, 2 …: which document of this window."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples stacked; the fields of a window as [sample, token]."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    samples: npt.NDArray[np.int64]
    """[sample]: their global indices."""

    @property
    def has_boundaries(self) -> bool:
        """Whether attention has a boundary to respect; where there is none, plain causal attention is the same and faster."""
        return bool((self.documents > 0).any())


class Windows:
    """Fixed windows over all spans laid end to end, each followed by the end token.

    Window k takes tokens k·length … (k+1)·length, both included: one more than its length, for the last target.
    """

    def __init__(
        self,
        documents: Documents,
        spans: Spans,
        length: int,
        *,
        end: int,
        document_mask: bool = True,
        part: Part = "train",
    ):
        self.length = length
        self._documents = documents
        self._spans = spans
        self._end = end
        self._document_mask = document_mask
        # Where each span begins in the stream, and where the stream ends.
        self._offsets = np.concatenate([[0], np.cumsum(spans[:, 2] - spans[:, 1] + 1)]).astype(np.int64)
        self.tokens = int(self._offsets[-1])
        self.count = max(0, self.tokens - 1) // length
        if self.count == 0:
            text, remedy = _TOO_SHORT[part]
            raise RunError(
                [
                    f"The {text} text has {self.tokens} tokens, fewer than the {length + 1} that one window of "
                    f"train.sequence_length = {length} needs; use a shorter train.sequence_length or {remedy}."
                ]
            )

    def window(self, k: int) -> Window:
        if not 0 <= k < self.count:
            raise IndexError(f"window {k} of {self.count}")
        low, high = k * self.length, (k + 1) * self.length + 1
        first = int(np.searchsorted(self._offsets, low, side="right")) - 1
        last = int(np.searchsorted(self._offsets, high, side="left"))
        stream = np.full(self.length + 1, self._end, dtype=np.int64)  # what no document overwrites is an end token
        for span in range(first, last):
            document, start, stop = self._spans[span].tolist()
            shift = start - int(self._offsets[span])  # from a place in the stream to one in the document
            begin, until = max(start, low + shift), min(stop, high + shift)
            if begin < until:
                stream[begin - shift - low : until - shift - low] = self._documents.read(document, begin, until)
        return self._window(stream, np.maximum(self._offsets[first:last] - low, 0))

    def _window(self, stream: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]) -> Window:
        """`begins`: where in the stream each document begins; always 0 first, and the last may be the last target."""
        tokens, targets = stream[:-1], stream[1:].copy()  # a copy: targets are masked, tokens are not
        targets[begins[1:] - 1] = IGNORED
        positions = np.arange(self.length, dtype=np.int64)
        documents = np.zeros(self.length, dtype=np.int32)
        if self._document_mask:
            inner = begins[1:][begins[1:] < self.length]
            documents[inner] = 1
            np.cumsum(documents, out=documents)
            positions -= begins[documents]
        return Window(tokens, targets, positions, documents)


class Samples:
    """All samples there will ever be: windows, epoch after epoch, each epoch in an order of its own.

    A sample is a pure function of (seed, index). There is no state, so a run may begin at any index, on any number of ranks,
    and sees what a run that never stopped would have seen.
    """

    def __init__(self, windows: Windows, seed: int, shuffle: bool):
        self.windows = windows
        self._seed = seed
        self._shuffle = shuffle

    @property
    def count(self) -> int:
        """Samples in one epoch."""
        return self.windows.count

    def sample(self, index: int) -> Window:
        return self.windows.window(int(self.order(np.array([index]))[0]))

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        rows = [self.windows.window(k) for k in self.order(indices).tolist()]
        tokens, targets, positions, documents = (np.stack(column) for column in zip(*rows, strict=True))
        return Batch(tokens, targets, positions, documents, np.array(indices, dtype=np.int64))

    def order(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The window that each sample is."""
        if indices.min() < 0:
            raise IndexError(f"sample {indices.min()}; samples are counted from 0")
        epochs, windows = np.divmod(indices, self.count)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                windows[now] = Permutation(self.count, key("epoch", self._seed, epoch))(windows[now])
        return windows
