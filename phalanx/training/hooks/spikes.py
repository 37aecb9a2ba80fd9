"""Loss spikes: whether a step's loss or gradient norm lies far above what is usual. `training/step` asks before it applies a step;
what is usual is a part of a run's progress, so that a resumed run judges alike.

Plain numbers that are the same on all ranks. The limits of a step are known before it is computed, so that comparing them needs no
word from the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_FIRST = 20
"""Good steps that have to be seen before any is judged."""
_WINDOW = 100
"""Steps that the usual reaches back, each counting less than the next; of a shorter run all count alike."""
_LEAST_LOSS, _LEAST_NORM = 0.01, 0.05
"""Deviations of the loss, as a part of it, and of the norm's logarithm that are always usual: some runs are very even."""


@dataclass(slots=True)
class Usual:
    """Running mean and variance of the good steps' loss and of the logarithm of their gradient norm."""

    steps: int = 0
    loss: float = 0.0
    loss_variance: float = 0.0
    norm: float = 0.0
    norm_variance: float = 0.0

    def enter(self, loss: float, norm: float) -> None:
        """A step was good."""
        self.steps += 1
        share = max(1 / self.steps, 1 / _WINDOW)
        self.loss, self.loss_variance = _moved(self.loss, self.loss_variance, loss, share)
        self.norm, self.norm_variance = _moved(self.norm, self.norm_variance, math.log(max(norm, 1e-30)), share)

    def limits(self, deviations: float) -> Limits:
        """What the next step may not exceed."""
        if self.steps < _FIRST:
            return NONE
        loss = max(math.sqrt(self.loss_variance), _LEAST_LOSS * abs(self.loss))
        norm = self.norm + deviations * max(math.sqrt(self.norm_variance), _LEAST_NORM)
        return Limits(self.loss + deviations * loss, math.exp(min(norm, 700.0)))


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one step."""

    loss: float = field(default=math.inf)
    norm: float = field(default=math.inf)

    @property
    def any(self) -> bool:
        return self.loss < math.inf

    def exceeded(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """True on the device; what is not a number exceeds nothing. `norm`: None where replicas have norms of their own."""
        high = loss > self.loss
        return high if norm is None else torch.logical_or(high, norm > self.norm)


NONE = Limits()


def _moved(mean: float, variance: float, value: float, share: float) -> tuple[float, float]:
    away = value - mean
    return mean + share * away, (1 - share) * (variance + share * away * away)
