"""The parts of a block besides attention: norms, rotary positions, feed-forward. Used by `models/decoder`, `attention` and `moe`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels import rms_norm
from phalanx.spec.model import ModelSpec, RopeScaling

# Shapes: B batch, S sequence, D model width, H heads, K key/value heads, E head width, V vocabulary.

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position, [B, 1, S, E/2] each."""


def norm(spec: ModelSpec, width: int) -> nn.Module:
    """The model's kind of norm."""
    if spec.norm == "layer":
        return nn.LayerNorm(width, eps=spec.norm_eps)  # autocast computes it in fp32
    return rms(spec, width)


def rms(spec: ModelSpec, width: int) -> RMSNorm:
    """The model's kind of root-mean-square norm."""
    return (ZeroCenteredRMSNorm if spec.norm_zero_centered else RMSNorm)(width, eps=spec.norm_eps)


class RMSNorm(nn.RMSNorm):
    """Computes in the dtype of its weight, fp32 in training; its input may be bf16."""

    in_one_pass = False
    """Whether GPUs that compute in bf16 normalize a bf16 input in one pass, with a bf16 result; the same for fp16. For norms that no compiler
    fuses with what reads their result."""

    def forward(self, x: Tensor) -> Tensor:
        if self.in_one_pass and _computes_in(x.dtype, "cuda") and rms_norm.supports(x, self.weight):
            return rms_norm.rms_norm(x, self.weight, self.eps or torch.finfo(torch.float32).eps)
        return super().forward(x.to(self.weight.dtype))


class ZeroCenteredRMSNorm(RMSNorm):
    """Multiplies by 1 + weight. The sum is in fp32 even where weights are in 16 bits, which would round it."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps)
        return normed.to(self.weight.dtype)


def _computes_in(dtype: torch.dtype, kind: str) -> bool:
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype


def rotary_frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """Radians per position for each pair of a head's rotated channels, [E/2], always in fp32."""
    exponents = torch.arange(0, spec.rotated, 2, dtype=torch.float32, device=device) / spec.rotated
    frequencies = spec.rope_theta**-exponents
    if spec.rope_scaling is None:
        return frequencies
    if spec.rope_scaling.kind == "linear":
        return frequencies / spec.rope_scaling.factor
    if spec.rope_scaling.kind == "yarn":
        return _yarn_scaling(frequencies, spec.rope_theta, spec.rope_scaling)
    return _llama3_scaling(frequencies, spec.rope_scaling)


def _llama3_scaling(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3 scaling: divides the frequencies of long waves by the factor, keeps short waves, and interpolates between."""
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_context / wavelengths
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = blend.clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _yarn_scaling(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN scaling: the same three ranges, interpolated linearly over the channel pairs between them."""
    pairs = frequencies.numel()

    def pair(rotations: float) -> float:
        """The pair, as a real number, with this many rotations in the original context."""
        return pairs * math.log(scaling.original_context / (rotations * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), 2 * pairs - 1)
    width = high - low or 0.001  # as published: a sharp step if both ends coincide
    scaled = ((torch.arange(pairs, dtype=torch.float32, device=frequencies.device) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * scaled + frequencies * (1 - scaled)


def rotary(spec: ModelSpec, positions: Tensor) -> Rotation:
    """The rotation of every position; computed once per forward and shared by all blocks."""
    angles = positions[:, None, :, None].float() * rotary_frequencies(spec, positions.device)
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return angles.cos(), angles.sin()
    return angles.cos() * scaling.rotation_size, angles.sin() * scaling.rotation_size


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Between -cap and cap, and nearly x where x is small."""
    return cap * torch.tanh(x / cap)


def rotate(x_BHSE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (channel i, channel i + E/2) by its angle; Hugging Face checkpoints use the same pairing. Channels beyond those that have
    angles stay as they are."""
    cos, sin = (part.to(x_BHSE.dtype) for part in rotation)
    if (rotated := 2 * cos.shape[-1]) < x_BHSE.shape[-1]:
        return torch.cat((rotate(x_BHSE[..., :rotated], rotation), x_BHSE[..., rotated:]), dim=-1)
    first, second = x_BHSE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SwiGLU(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, dim: int, width: int, bias: bool):
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=bias)
        self.up = nn.Linear(dim, width, bias=bias)
        self.down = nn.Linear(width, dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class GeGLU(SwiGLU):
    """The same with GELU in place of SiLU."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x_BSD), approximate="tanh") * self.up(x_BSD))


class GELU(nn.Module):
    """GPT's feed-forward: down(gelu(up(x)))."""

    def __init__(self, dim: int, width: int, bias: bool):
        super().__init__()
        self.up = nn.Linear(dim, width, bias=bias)
        self.down = nn.Linear(width, dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
