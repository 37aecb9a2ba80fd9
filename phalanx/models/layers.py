"""The parts a block is made of besides attention: norms, rotary positions, feed-forward. Used by `models/dense`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec, RopeScaling

# Shapes: B batch, S sequence, D model width, H heads, K key/value heads, E head width, V vocabulary.


def norm(spec: ModelSpec, width: int) -> nn.Module:
    """The normalisation that the model asks for."""
    if spec.norm == "layer":
        return nn.LayerNorm(width, eps=spec.norm_eps)
    return nn.RMSNorm(width, eps=spec.norm_eps)


class HeadNorm(nn.RMSNorm):
    """RMS norm of each head. What comes here is a matrix product's result, in bf16 perhaps; like every norm it is taken in fp32."""

    def forward(self, x_BHSE: Tensor) -> Tensor:
        return super().forward(x_BHSE.to(self.weight.dtype))


def rotary_frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """Radians per position for each pair of a head's channels, [E/2], in fp32 whatever the model computes in."""
    exponents = torch.arange(0, spec.head, 2, dtype=torch.float32, device=device) / spec.head
    frequencies = spec.rope_theta**-exponents
    return frequencies if spec.rope_scaling is None else _stretch(frequencies, spec.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama-3 scaling: long waves are slowed by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotary(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [B, 1, S, E/2] each: computed once per forward, shared by all blocks."""
    angles = positions[:, None, :, None].float() * rotary_frequencies(spec, positions.device)
    return angles.cos(), angles.sin()


def rotate(x_BHSE: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (channel i, channel i + E/2) by its angle: the pairing of Hugging Face's checkpoints."""
    cos, sin = (part.to(x_BHSE.dtype) for part in rotation)
    first, second = x_BHSE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.hidden, bias=spec.bias)
        self.up = nn.Linear(spec.dim, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, spec.dim, bias=spec.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class GELU(nn.Module):
    """GPT's feed-forward: down(gelu(up(x)))."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.up = nn.Linear(spec.dim, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, spec.dim, bias=spec.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
