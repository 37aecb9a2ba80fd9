"""How well a model predicts text: loss, perplexity and bits per byte, on held-out text sample for sample as in training (`measure`); and
log-likelihoods of continuations, comparable with published ones of lm-evaluation-harness (`Scorer`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.data.corpus import Corpus
from phalanx.data.dataset import pack
from phalanx.data.pack import IGNORED, Batch, StreamPacking
from phalanx.data.samples import Samples
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data
from phalanx.transforms.precision import computing


class Request(NamedTuple):
    """Token ids to score (`continuation`), and the token ids before them, at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The score of a request."""

    logprob: float
    """Log-probability of the continuation: the sum over its tokens, in nats."""
    greedy: bool
    """Whether greedy decoding would produce the continuation."""
    dropped: int
    """Tokens dropped from the beginning of the context because the model's context is shorter."""


class Scorer:
    """Scores requests in batches."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, *, context: int, batch: int = 8, compute: str = "fp32"):
        self.model, self.tokenizer, self.context, self.batch = model, tokenizer, context, batch
        self._compute = compute
        self.device = next(model.parameters()).device
        self._prefix = _prefix_of(tokenizer)

    def encode(self, context: str, continuation: str) -> Request:
        """Both texts as ids. Trailing spaces of the context move to the continuation, because tokenizers attach them to the next word."""
        if not continuation:
            return Request(self.prompt(context), [])
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:  # a model needs a preceding token: the end of the previous document
            return Request(self.prompt(""), self._ids(continuation))
        before, whole = self._ids(context), self._ids(context + continuation)
        cut = len(before)
        if cut >= len(whole):  # a token across the boundary belongs to the continuation
            cut = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole) - 1)
        return Request(self._with_prefix(whole[:cut]), whole[cut:])

    def prompt(self, text: str) -> list[int]:
        """The text as ids, at least one: with the tokenizer's beginning of a text, or the end of the previous document."""
        return self._with_prefix(self._ids(text))

    def rolling(self, text: str) -> list[Request]:
        """A whole text as requests that score each of its tokens once, each with as much context as fits. The first token follows the
        beginning of a text; each window starts from the last token of the previous one, and the last window extends back."""
        ids, size = self._ids(text), self.context
        stream = [self.prompt("")[-1], *ids]  # so that token i of the text is stream[i + 1]
        requests = []
        for begin in range(0, len(ids), size):
            end = min(begin + size, len(ids))
            requests.append(Request(stream[max(0, end - size) : begin + 1], ids[begin:end]))
        return requests

    @torch.inference_mode()
    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """All scores, in the order of the requests. The longest are computed first: a batch too large for the device fails at once, and
        requests of similar length share a batch."""
        for number, request in enumerate(requests):
            self._check(number, request)
        scores = [Score(0.0, True, 0)] * len(requests)  # of an empty continuation
        lengths = [len(request.context) + len(request.continuation) for request in requests]
        order = sorted((i for i in range(len(requests)) if requests[i].continuation), key=lambda i: -lengths[i])
        for first in range(0, len(order), self.batch):
            chosen = order[first : first + self.batch]
            for i, score in zip(chosen, self._score_batch([requests[i] for i in chosen]), strict=True):
                scores[i] = score
        return scores

    def _score_batch(self, requests: Sequence[Request]) -> list[Score]:
        # The last token is predicted but not read, so that one more than the context fits.
        rows = [[*request.context, *request.continuation][-self.context - 1 :] for request in requests]
        length = max(len(row) for row in rows) - 1
        # Padding is on the right, where no scored token can attend to it.
        tokens_BS = torch.full((len(rows), length), self.tokenizer.end, device=self.device)
        for index, row in enumerate(rows):
            tokens_BS[index, : len(row) - 1] = torch.tensor(row[:-1], device=self.device)
        positions_BS = torch.arange(length, device=self.device).expand(len(rows), length)
        with computing(self._compute, self.device):
            logits_BSV = self.model(tokens_BS, positions_BS)
        scores = []
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            count = len(request.continuation)
            targets_T = torch.tensor(row[-count:], device=self.device)
            logits_TV = logits_BSV[index, len(row) - 1 - count : len(row) - 1].float()
            chosen_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])
            greedy = bool((logits_TV.argmax(-1) == targets_T).all())
            dropped = len(request.context) + count - len(row)
            scores.append(Score(float(chosen_T.double().sum()), greedy, dropped))
        return scores

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = [] if ids[: len(self._prefix)] == self._prefix else self._prefix  # a chat template may have added it already
        return [*prefix, *ids] or [self.tokenizer.end]

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, special=False)]

    def _check(self, number: int, request: Request) -> None:
        assert request.context, "a request has at least one token of context"
        if len(request.continuation) > self.context:
            raise RunError(
                f"Request {number} has a continuation of {len(request.continuation)} tokens, but the model's context holds "
                f"{self.context}: shorten it."
            )


def _prefix_of(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text; those after a text are not wanted, because the continuation follows."""
    bare, full = tokenizer.encode("a", special=False).tolist(), tokenizer.encode("a").tolist()
    begin = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return [int(token) for token in full[:begin]]


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


def measure(model: nn.Module, tokenizer: Tokenizer, batches: Iterable[Batch], *, compute: str, document_mask: bool) -> Measured:
    """The losses of a model on these batches, with the same kernels as in training."""
    device, total = next(model.parameters()).device, Measured()
    for batch in batches:
        masked = document_mask and (batch.has_boundaries or device.type == "cpu")
        tokens_BS, targets_BS, positions_BS, documents_BS = (torch.from_numpy(array).to(device) for array in batch[:4])
        with torch.inference_mode():
            with computing(compute, device):
                logits_BSV = model(tokens_BS, positions_BS, documents_BS if masked else None)
            logits_NV, targets_N = logits_BSV.flatten(0, 1).float(), targets_BS.flatten()
            nats = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
        total += Measured(float(nats.double()), int((batch.targets >= 0).sum()), text_bytes(batch, tokenizer))
    return total


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
    packing = pack(corpus, np.array([[0, corpus.tokens]]), length, tokenizer, replace(data, packing="best-fit"))
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
