"""A decoder as people write it, with nothing of Phalanx in it: for tests of models that were not written for parallelism. It can be named in a
run file as `plain_gpt:GPT`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AXES = {
    "words.weight": ("vocab", "model"),
    "places.weight": ("position", "model"),
    "inner.layers.*.qkv.weight": ("fused", "model"),
    "inner.layers.*.out.weight": ("model", "inner"),
    "inner.layers.*.up.weight": ("wide", "model"),
    "inner.layers.*.up.bias": ("wide",),
    "inner.layers.*.down.weight": ("model", "wide"),
    "inner.layers.*.down.bias": ("model",),
    "*norm.weight": ("model",),
    "*norm.bias": ("model",),
    "out.weight": ("vocab", "model"),
}


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, number: int):
        super().__init__()
        self.heads, self.scale = heads, 1.0 + number
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, *, mask: Tensor | None) -> tuple[Tensor, None]:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.first_norm(x)).chunk(3, -1))
        causal = mask is None
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x)))), None


class Inner(nn.Module):
    def __init__(self, dim: int, heads: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, number) for number in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=None if mask is None else mask & (layer.scale > 0))[0]
        return x


class GPT(nn.Module):
    def __init__(self, spec: Any):
        super().__init__()
        self.words, self.places = nn.Embedding(spec.rows, spec.dim), nn.Embedding(spec.context, spec.dim)
        self.first_norm = nn.LayerNorm(spec.dim)
        self.inner = Inner(spec.dim, spec.heads, spec.layers)
        self.last_norm = nn.LayerNorm(spec.dim)
        self.out = nn.Linear(spec.dim, spec.rows, bias=False)
        self.masked = spec.option("masked", False)
        if spec.option("tied", False):
            self.out.weight = self.words.weight

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        length, mask = tokens.shape[1], None
        if self.masked or documents is not None:
            mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if documents is not None:
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        x = self.first_norm(self.words(tokens) + self.places(positions))
        return self.out(self.last_norm(self.inner(x, mask)))
