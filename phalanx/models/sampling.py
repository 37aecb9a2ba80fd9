"""Text from a trained model, token by token, with the keys and values of earlier positions remembered. Called by the CLI."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn

from phalanx.models.attention import KeyValues
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0: always the likeliest."""
    top_k: int | None = None
    """Draw among this many likeliest only."""
    top_p: float = 1.0
    """Draw among the likeliest that together have this probability."""
    seed: int = 0


@torch.inference_mode()
def generate(model: nn.Module, prompt: Sequence[int], count: int, end: int, sampling: Sampling) -> Iterator[int]:
    """Up to `count` tokens that follow the prompt; stops after the end token, or where learned positions run out."""
    device = next(model.parameters()).device
    dice = torch.Generator(device=device).manual_seed(sampling.seed)
    reader = _remembering(model) if "memory" in signature(model.forward).parameters else _reading_again(model)
    next(reader)
    tokens = list(prompt)
    for _ in range(count):
        logits = reader.send(torch.tensor([tokens], device=device))
        if logits is None:
            return
        token = draw(logits, sampling, dice)
        yield token
        if token == end:
            return
        tokens = [token]


Reader = Generator[Tensor | None, Tensor, None]
"""Takes the tokens that are new, [1, S], and gives the logits of what follows them, [V]; None: there is no more room."""


def _remembering(model: nn.Module) -> Reader:
    """Each block keeps what it knows of earlier positions; only new tokens are computed."""
    spec = model.spec
    assert isinstance(spec, ModelSpec)
    memory = [KeyValues() for _ in range(spec.layers)]
    position = 0
    tokens = yield None
    while spec.positions != "learned" or position + tokens.shape[1] <= spec.context:
        positions = torch.arange(position, position + tokens.shape[1], device=tokens.device)[None]
        position += tokens.shape[1]
        tokens = yield model(tokens, positions, memory=memory)[0, -1].float()
    yield None


def _reading_again(model: nn.Module) -> Reader:
    """A module of your own that cannot remember reads the whole text anew for each token."""
    text = yield None
    while True:
        positions = torch.arange(text.shape[1], device=text.device)[None]
        tokens = yield model(text, positions)[0, -1].float()
        text = torch.cat((text, tokens), dim=1)


def draw(logits_V: Tensor, sampling: Sampling, dice: torch.Generator) -> int:
    """One token by the given rules."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_V.numel():
        smallest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_V.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = before < sampling.top_p
        kept[0] = True  # the likeliest one always stays
        logits_V = logits_V.index_fill(0, order[~kept], -torch.inf)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=dice))
