"""Log-likelihoods of texts under a model: how probable it finds one text after another.

Multiple choice (`evaluation/choices`) and the adapter for lm-evaluation-harness (`evaluation/harness`) ask it; both compare
numbers that other programs publish, so texts are cut into context and continuation as lm-evaluation-harness does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from phalanx.spec.errors import RunError
from phalanx.transforms.precision import computing

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer


class Request(NamedTuple):
    """Token ids whose probability is asked for, and those that stand before them (never none)."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The answer to a request."""

    logprob: float
    """Natural logarithm of the continuation's probability: the sum over its tokens."""
    greedy: bool
    """Each token is the likeliest at its place, so that greedy decoding would write the continuation."""
    dropped: int
    """Tokens of the context that were left out at its beginning, because the model's context is shorter."""


class Scorer:
    """A model that answers requests, several at a time."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, *, context: int, batch: int = 8, compute: str = "fp32"):
        self.model, self.tokenizer, self.context, self.batch = model, tokenizer, context, batch
        self._compute = compute
        self.device = next(model.parameters()).device
        self._front = _front(tokenizer)

    def encode(self, context: str, continuation: str) -> Request:
        """Both as ids. Spaces that end the context begin the continuation instead: tokenizers put them before a word."""
        if not continuation:
            return Request(self.prompt(context), [])
        kept = context.rstrip()
        continuation, context = context[len(kept) :] + continuation, kept
        if not context:  # a model needs something to go on from: the end of the document before
            return Request(self.prompt(""), self._ids(continuation))
        before, whole = self._ids(context), self._ids(context + continuation)
        cut = len(before)
        if cut >= len(whole):  # a token reaches across the boundary: then it belongs to the continuation
            cut = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole) - 1)
        return Request(self._begun(whole[:cut]), whole[cut:])

    def prompt(self, text: str) -> list[int]:
        """Ids to go on from, never none: what the tokenizer begins a text with, or the end of the document before."""
        return self._begun(self._ids(text))

    def rolling(self, text: str) -> list[Request]:
        """A whole text as requests that ask for each of its tokens once, each with as much before it as fits.

        The first token stands after what begins a text; a window goes on from the last token of the one before, and the last
        window reaches back as far as it can.
        """
        ids, size = self._ids(text), self.context
        stream = [self.prompt("")[-1], *ids]  # so that token i of the text is stream[i + 1]
        requests = []
        for begin in range(0, len(ids), size):
            end = min(begin + size, len(ids))
            requests.append(Request(stream[max(0, end - size) : begin + 1], ids[begin:end]))
        return requests

    @torch.inference_mode()
    def score(self, requests: Sequence[Request]) -> Iterator[tuple[int, Score]]:
        """(number of the request, its score), the longest first: a batch too large for the device fails at once, and
        requests of like length stand together."""
        for number, request in enumerate(requests):
            self._check(number, request)
        lengths = [len(request.context) + len(request.continuation) for request in requests]
        order = sorted((i for i in range(len(requests)) if requests[i].continuation), key=lambda i: -lengths[i])
        yield from ((i, Score(0.0, True, 0)) for i, request in enumerate(requests) if not request.continuation)
        for first in range(0, len(order), self.batch):
            chosen = order[first : first + self.batch]
            yield from zip(chosen, self._together([requests[i] for i in chosen]), strict=True)

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        """All scores, in the order of the requests."""
        found = dict(self.score(requests))
        return [found[i] for i in range(len(requests))]

    def _together(self, requests: Sequence[Request]) -> list[Score]:
        # The last token is predicted but never read, so one more than the context fits.
        rows = [[*request.context, *request.continuation][-self.context - 1 :] for request in requests]
        length = max(len(row) for row in rows) - 1
        # Padding stands on the right, where nothing that is asked for can see it.
        tokens_BS = torch.full((len(rows), length), self.tokenizer.end, device=self.device)
        for index, row in enumerate(rows):
            tokens_BS[index, : len(row) - 1] = torch.tensor(row[:-1], device=self.device)
        positions_BS = torch.arange(length, device=self.device).expand(len(rows), length)
        with computing(self._compute, self.device):
            logits_BSV = self.model(tokens_BS, positions_BS)
        found = []
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            asked = len(request.continuation)
            targets_T = torch.tensor(row[-asked:], device=self.device)
            logits_TV = logits_BSV[index, len(row) - 1 - asked : len(row) - 1].float()
            chosen_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])
            greedy = bool((logits_TV.argmax(-1) == targets_T).all())
            dropped = len(request.context) + asked - len(row)
            found.append(Score(float(chosen_T.double().sum()), greedy, dropped))
        return found

    def _begun(self, ids: list[int]) -> list[int]:
        front = [] if ids[: len(self._front)] == self._front else self._front  # a chat template may have written it already
        return [*front, *ids] or [self.tokenizer.end]

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, special=False)]

    def _check(self, number: int, request: Request) -> None:
        assert request.context, "a request has at least one token to go on from"
        if len(request.continuation) > self.context:
            raise RunError(
                [
                    f"Request {number} asks for {len(request.continuation)} tokens and the model's context holds "
                    f"{self.context}: ask for no more than that."
                ]
            )


def _front(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text. What it may put behind one is left out: there the continuation stands."""
    bare, full = tokenizer.encode("a", special=False).tolist(), tokenizer.encode("a").tolist()
    begin = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return [int(token) for token in full[:begin]]
