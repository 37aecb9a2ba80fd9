"""Dropout of the inputs of LoRA adapters, as a pure function of (seed, sample, position, layer, channel): every layout draws the same masks, a resumed
run repeats them, and a recomputed forward or a backward draws them again instead of storing them. `transforms/lora` uses it.

A micro-batch brings `mask_keys`, one number per token. A sample index belongs to one step only, so that no two steps share a mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BITS = 24
"""Random bits that are compared with the rate."""
_GOLDEN, _FIRST, _SECOND = (number - (1 << 32) for number in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))
"""Multipliers of MurmurHash3's finalizer and of the channels before it. Products wrap around."""


@dataclass(eq=False, slots=True)
class Dropout:
    """What all adapters of one rank share."""

    rate: float
    slices: tuple[int, int] = (0, 1)
    """Index and number of this rank's slice of the sequence, in modules that read slices."""
    keys: Tensor | None = None
    """Of the micro-batch in progress, [batch, position]."""

    def keys_of(self, x: Tensor) -> Tensor | None:
        """The keys of a layer's input; None: nothing is dropped, since nothing is trained."""
        if self.keys is None or not torch.is_grad_enabled():
            return None
        index, count = self.slices
        return self.keys if self.keys.shape[1] == x.shape[1] else self.keys.chunk(count, 1)[index]

    @contextmanager
    def recomputing(self, keys: Tensor | None) -> Iterator[None]:
        """Around a recomputed forward, which may belong to another micro-batch than the one in progress."""
        outer, self.keys = self.keys, keys
        try:
            yield
        finally:
            self.keys = outer


def mask_keys(seed: int, samples: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """A random number per token, [sample, position]. `positions` count from the beginning of a window."""
    base = np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}/dropout".encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        rows = _mixed(samples.astype(np.uint64) + base)
        return (_mixed(rows[:, None] + positions.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64."""
    bits = bits * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def layer_key(name: str, device: torch.device) -> Tensor:
    """A number of its own for each layer. A tensor, since a compiler would compile every block anew for another constant."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), dtype=torch.int32, device=device)


def dropped(x: Tensor, keys_BS: Tensor, layer: Tensor, first: int, rate: float) -> Tensor:
    """The input of a layer, [batch, position, channel], with some elements zeroed. `first`: this rank's first channel of the whole input."""
    channels = torch.arange(first, first + x.shape[-1], device=x.device, dtype=torch.int32) * _GOLDEN
    bits = (keys_BS ^ layer)[..., None] + channels
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * _FIRST
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * _SECOND
    keep = ((bits ^ (bits >> 16)) & ((1 << _BITS) - 1)) >= round(rate * (1 << _BITS))
    return torch.where(keep, x, 0) * (1 / (1 - rate))


class DroppedProduct(torch.autograd.Function):
    """dropped(x) · Aᵀ. Layers that read the same input store it once, and not each its masked copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, keys_BS: Tensor, layer: Tensor, how: tuple[int, float]) -> Tensor:
        """`how`: this rank's first channel, and the rate."""
        ctx.how = how
        ctx.save_for_backward(x, a, keys_BS, layer)
        return dropped(x, keys_BS, layer, *how) @ a.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, a, keys_BS, layer = ctx.saved_tensors
        gradient = gradients[0]
        a_gradient = gradient.flatten(0, -2).t() @ dropped(x, keys_BS, layer, *ctx.how).flatten(0, -2)
        return dropped(gradient @ a, keys_BS, layer, *ctx.how), a_gradient, None, None, None
