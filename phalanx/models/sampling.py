"""Text generation, token by token, with a KV cache. Called by the CLI and `evaluation/harness`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Up to `count` tokens after the prompt; stops after the end token, or at the end of learned positions.

    For custom modules without a KV cache, the whole text is computed again for each token.
    """
    spec = model.spec
    assert isinstance(spec, ModelSpec)
    caching = "kv_cache" in signature(model.forward).parameters
    options = {"kv_cache": [KVCache(spec.window_of(layer)) for layer in range(spec.layers)]} if caching else {}
    text = torch.tensor([prompt], device=next(model.parameters()).device)
    generator = torch.Generator(device=text.device).manual_seed(sampling.seed)
    known = 0  # tokens in the KV cache
    for _ in range(count):
        length = text.shape[1]
        if caching and spec.positions == "learned" and length > spec.context:
            return
        positions = torch.arange(known, length, device=text.device)[None]
        logits_V = model(text[:, known:], positions, **options)[0, -1].float()
        known = length if caching else 0
        token = draw(logits_V, sampling, generator)
        yield token
        if token == end:
            return
        text = torch.cat((text, text.new_tensor([[token]])), dim=1)


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
