"""Text generation, token by token, with a KV cache. Called by the CLI and `evaluation/harness`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn

from phalanx.models.attention import KVCache
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 1.0
    """0: greedy decoding."""
    top_k: int | None = None
    """Sample among the K likeliest tokens."""
    top_p: float = 1.0
    """Sample among the likeliest tokens whose total probability reaches this."""
    seed: int = 0


@torch.inference_mode()
def generate(model: nn.Module, prompt: Sequence[int], count: int, end: int, sampling: Sampling) -> Iterator[int]:
    """Up to `count` tokens after the prompt; stops after the end token, or at the end of learned positions."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    reader = _with_kv_cache(model) if "kv_cache" in signature(model.forward).parameters else _without_cache(model)
    next(reader)
    tokens = list(prompt)
    for _ in range(count):
        logits = reader.send(torch.tensor([tokens], device=device))
        if logits is None:
            return
        token = draw(logits, sampling, generator)
        yield token
        if token == end:
            return
        tokens = [token]


Reader = Generator[Tensor | None, Tensor, None]
"""Takes the new tokens, [1, S], and returns the logits of the next token, [V]; None: no position is left."""


def _with_kv_cache(model: nn.Module) -> Reader:
    """Computes only the new tokens."""
    spec = model.spec
    assert isinstance(spec, ModelSpec)
    kv_cache = [KVCache() for _ in range(spec.layers)]
    position = 0
    tokens = yield None
    while spec.positions != "learned" or position + tokens.shape[1] <= spec.context:
        positions = torch.arange(position, position + tokens.shape[1], device=tokens.device)[None]
        position += tokens.shape[1]
        tokens = yield model(tokens, positions, kv_cache=kv_cache)[0, -1].float()
    yield None


def _without_cache(model: nn.Module) -> Reader:
    """Computes the whole text again for each token, for custom modules without a KV cache."""
    text = yield None
    while True:
        positions = torch.arange(text.shape[1], device=text.device)[None]
        tokens = yield model(text, positions)[0, -1].float()
        text = torch.cat((text, tokens), dim=1)


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_V.numel():
        smallest = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_V.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        nucleus = before < sampling.top_p
        nucleus[0] = True  # the likeliest token always stays
        logits_V = logits_V.index_fill(0, order[~nucleus], -torch.inf)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))
