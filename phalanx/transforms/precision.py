"""The number format of forward and backward, and the loss scale that keeps fp16 gradients from underflowing. Weights stay in fp32;
training enters the context around a forward and keeps the scale from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_MAX_SCALE = 2.0**24
_MIN_SCALE = 2.0**-14
"""Useful range of a loss scale: fp16 represents 2^-24 to 2^16."""


def computing(compute: str, device: torch.device, *, cache: bool = True) -> AbstractContextManager[Any]:
    """Matrix products in bf16 or fp16, sums and norms in fp32; or everything in fp32. `cache`: weights are converted once where they are used
    several times.

    With fp8, everything around the layers that `transforms/fp8` changed is bf16.
    """
    if compute == "fp32":
        return nullcontext()
    dtype = torch.float16 if compute == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, cache_enabled=cache)


@dataclass(slots=True)
class LossScale:
    """The factor of the loss before the backward, by which gradients are divided afterwards.

    The norm of the whole gradient decides whether a step was good. It is the same on all ranks, and so are their scales, without
    communication.
    """

    value: float = 1.0
    growth_after: int | None = None
    """Consecutive good steps after which the scale doubles; None: the scale is constant."""
    good_steps: int = 0
    """Consecutive good steps since the scale last changed."""

    @classmethod
    def of(cls, compute: str, first: float, growth_after: int = 2000) -> LossScale:
        """The scale for a number format; only fp16 needs one."""
        return cls(first, growth_after) if compute == "fp16" else cls()

    def update(self, good: bool) -> None:
        """After each step: halve the scale if the gradient was not finite, double it after enough good steps."""
        if self.growth_after is None:
            return
        self.good_steps = self.good_steps + 1 if good else 0
        if not good:
            self.value = max(self.value / 2, _MIN_SCALE)
        elif self.good_steps >= self.growth_after:
            self.value, self.good_steps = min(self.value * 2, _MAX_SCALE), 0

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; empty if the scale is constant."""
        if self.growth_after is None:
            return {}
        return {"value": self.value, "good_steps": float(self.good_steps)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint; one of another number format has no scale."""
        if self.growth_after is not None and "value" in state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
