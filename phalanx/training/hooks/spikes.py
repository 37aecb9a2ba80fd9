"""Loss spikes: whether the loss or gradient norm of a step lies far above those of recent steps.

The running statistics are part of a run's progress, so that a resumed run judges alike. They are plain numbers, the same on all
ranks. The limits of a step are known before it is computed, so the comparison runs on the device without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.parallel.sharded_model import ShardedModel
from phalanx.training.hooks import StepHook

_MIN_STEPS = 20
"""Good steps that must be seen before a step is judged."""
_WINDOW = 100
"""Steps over which the statistics average, exponentially weighted; all steps of a shorter run have the same weight."""
_MIN_LOSS_DEVIATION, _MIN_NORM_DEVIATION = 0.01, 0.05
"""Lower bounds of the standard deviations, for very even runs: of the loss, relative to it, and of the logarithm of the norm."""


@dataclass(slots=True)
class RunningStats:
    """Running mean and variance of the loss and of the logarithm of the gradient norm, over good steps."""

    steps: int = 0
    loss: float = 0.0
    loss_variance: float = 0.0
    norm: float = 0.0
    norm_variance: float = 0.0

    def add(self, loss: float, norm: float) -> None:
        """Adds a good step."""
        self.steps += 1
        weight = max(1 / self.steps, 1 / _WINDOW)
        self.loss, self.loss_variance = _update(self.loss, self.loss_variance, loss, weight)
        self.norm, self.norm_variance = _update(self.norm, self.norm_variance, math.log(max(norm, 1e-30)), weight)

    def limits(self, deviations: float) -> Limits:
        """What the next step must not exceed."""
        if self.steps < _MIN_STEPS:
            return NO_LIMITS
        loss = max(math.sqrt(self.loss_variance), _MIN_LOSS_DEVIATION * abs(self.loss))
        norm = self.norm + deviations * max(math.sqrt(self.norm_variance), _MIN_NORM_DEVIATION)
        return Limits(self.loss + deviations * loss, math.exp(min(norm, 700.0)))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest loss and gradient norm of one step."""

    loss: float = math.inf
    norm: float = math.inf

    def exceeded(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """On the device; NaN exceeds nothing. `norm`: None with local SGD, where every replica has a norm of its own."""
        high = loss > self.loss
        return high if norm is None else torch.logical_or(high, norm > self.norm)


NO_LIMITS = Limits()


class SpikeGuard(StepHook):
    """Skips steps that exceed the limits."""

    def __init__(self, limits: Callable[[], Limits], model: ShardedModel):
        """`limits` returns those of the step in progress."""
        self._limits, self._has_local_norms = limits, model.is_local_sgd

    def exceeds_limits(self, loss: Tensor, norm: Tensor) -> Tensor | None:
        limits = self._limits()
        return None if limits == NO_LIMITS else limits.exceeded(loss, None if self._has_local_norms else norm)


def _update(mean: float, variance: float, value: float, weight: float) -> tuple[float, float]:
    distance = value - mean
    return mean + weight * distance, (1 - weight) * (variance + weight * distance * distance)
