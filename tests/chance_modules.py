"""Modules whose forward draws random numbers or hides its backward, each in another way, and one that does not. Imported by tests as `chance_modules`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec


class Plain(nn.Module):
    """Scales by a buffer that no checkpoint holds. Its embedding is the head, and one of its rows is padding."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.embed = nn.Embedding(spec.rows, spec.dim, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(spec.dim, spec.dim) for _ in range(spec.layers))
        self.register_buffer("scale", torch.empty(spec.dim), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        with torch.no_grad():
            self.scale.copy_(torch.linspace(0.5, 1.5, len(self.scale)))

    def between(self, x_BSD: Tensor) -> Tensor:
        return x_BSD

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x_BSD = self.embed(tokens_BS) * self.scale
        for block in self.blocks:
            x_BSD = x_BSD + torch.tanh(self.between(block(x_BSD)))
        return F.linear(x_BSD, self.embed.weight)


class Dropped(Plain):
    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self.drop = nn.Dropout(0.25)

    def between(self, x_BSD: Tensor) -> Tensor:
        return self.drop(x_BSD)


class Drops(Plain):
    def between(self, x_BSD: Tensor) -> Tensor:
        return F.dropout(x_BSD, 0.25)


class Noisy(Plain):
    def between(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + torch.randn_like(x_BSD)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-1e-3, 1e-3)


class Clipped(Plain):
    def between(self, x_BSD: Tensor) -> Tensor:
        return _Clipped.apply(x_BSD)
