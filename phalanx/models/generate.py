"""Text from a trained model, token by token, with the keys and values of earlier positions remembered. Called by the CLI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.models.attention import KeyValues
from phalanx.models.dense import Decoder


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
def generate(model: Decoder, prompt: Sequence[int], count: int, end: int, sampling: Sampling) -> Iterator[int]:
    """Up to `count` tokens that follow the prompt; stops after the end token, or where learned positions run out."""
    device = model.embed.weight.device
    dice = torch.Generator(device=device).manual_seed(sampling.seed)
    memory = [KeyValues() for _ in model.blocks]
    tokens = torch.tensor([list(prompt)], device=device)
    position = 0
    for _ in range(count):
        length = tokens.shape[1]
        if model.spec.positions == "learned" and position + length > model.spec.context:
            return
        positions = torch.arange(position, position + length, device=device)[None]
        logits = model(tokens, positions, memory=memory)[0, -1].float()
        position += length
        token = draw(logits, sampling, dice)
        yield token
        if token == end:
            return
        tokens = torch.tensor([[token]], device=device)


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
