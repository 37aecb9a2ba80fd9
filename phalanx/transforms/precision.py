"""Which number format the forward and backward compute in, and the scale that keeps fp16's gradients from vanishing. Weights stay
in fp32; training opens the context around a forward and carries the scale from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_LARGEST = 2.0**24
_LEAST = 2.0**-14
"""Between these a scale helps: fp16's own numbers reach from 2^-24 to 2^16."""


def computing(compute: str, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bf16 or fp16, sums and norms in fp32; or everything in fp32.

    fp8 is bf16 around the layers that `transforms/fp8` has changed: they take care of themselves.
    """
    if compute == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if compute == "fp16" else torch.bfloat16)


@dataclass(slots=True)
class LossScale:
    """What the loss is multiplied by before the backward, and gradients are divided by after it.

    Whether a step was good is told by the norm of the whole gradient, which is the same on all ranks: so are their scales,
    without a message.
    """

    value: float = 1.0
    growth_after: int | None = None
    """Good steps in a row after which it doubles; None: it is constant."""
    good_steps: int = 0
    """In a row, since it last changed."""

    @classmethod
    def of(cls, compute: str, first: float, growth_after: int = 2000) -> LossScale:
        """The scale for a number format: only fp16 has numbers so few that it needs one."""
        return cls(first, growth_after) if compute == "fp16" else cls()

    def update(self, good: bool) -> None:
        """After each step: half of it if the gradient was not finite, which may have been its fault."""
        if self.growth_after is None:
            return
        self.good_steps = self.good_steps + 1 if good else 0
        if not good:
            self.value = max(self.value / 2, _LEAST)
        elif self.good_steps >= self.growth_after:
            self.value, self.good_steps = min(self.value * 2, _LARGEST), 0

    def state(self) -> dict[str, float]:
        """For a checkpoint; nothing where there is no scale."""
        if self.growth_after is None:
            return {}
        return {"value": self.value, "good_steps": float(self.good_steps)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint. One written in another number format has nothing to say to this one."""
        if self.growth_after is not None and "value" in state:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])
