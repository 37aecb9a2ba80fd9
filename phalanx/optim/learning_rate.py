"""The learning rate as a pure function of the step: nothing to save, nothing to restore. Called once per step."""

from __future__ import annotations

import math

from phalanx.spec.run import Optimizer


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Learning rate of step `step` (counted from 0) of `steps`: linear warm-up, then the schedule down to the final part."""
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    done, whole = step - optimizer.warmup_steps, max(1, steps - optimizer.warmup_steps)
    if optimizer.schedule == "wsd":
        decay = optimizer.decay_steps if optimizer.decay_steps is not None else max(1, min(whole, steps // 5))
        done, whole = max(0, done - (whole - decay)), decay
    progress = min(1.0, done / whole)
    match optimizer.schedule:
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            left = 1 - progress
        case "constant":
            left = 1.0
    return optimizer.learning_rate * (optimizer.final_fraction + (1 - optimizer.final_fraction) * left)
