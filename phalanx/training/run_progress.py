"""A run's progress, what is reported of its steps, and what counts as a loss spike. Every checkpoint holds the progress, with the statistics
of recent steps, so that a resumed run judges alike."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.events.records import Step, StepSkipped
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.step_totals import GOOD, SPIKE, Outcome
from phalanx.transforms.precision import LossScale

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
    """The largest loss and gradient norm of one step: known before it is computed, so that the device compares without the host."""

    loss: float = math.inf
    norm: float = math.inf

    def exceeded(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """On the device; NaN exceeds nothing. `norm`: None with local SGD, where every replica has a norm of its own."""
        high = loss > self.loss
        return high if norm is None else torch.logical_or(high, norm > self.norm)


NO_LIMITS = Limits()


def _update(mean: float, variance: float, value: float, weight: float) -> tuple[float, float]:
    distance = value - mean
    return mean + weight * distance, (1 - weight) * (variance + weight * distance * distance)


@dataclass(slots=True)
class Progress:
    """How far a run has come: with the tensors, everything that a checkpoint restores."""

    step: int = 0
    """Optimizer steps taken or skipped."""
    samples: int = 0
    """Position in the data: sequences consumed."""
    skipped_in_a_row: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)
    """fp16: see `transforms.precision.LossScale`."""
    spikes_in_a_row: int = 0
    """Spikes among the steps skipped in a row."""
    usual: dict[str, float] = field(default_factory=dict)
    """See `RunningStats`. Empty unless spikes are skipped."""
    left_out: list[list[int]] = field(default_factory=list)
    """One entry per rollback: the first sample skipped, the first sample after them, and the step restored."""

    def advance(self, batch: int, verdict: int, scale: LossScale) -> None:
        """Counts a step that was taken, or skipped if it was not good."""
        good, spike = verdict == GOOD, verdict == SPIKE
        self.step += 1
        self.samples += batch
        self.loss_scale = scale.state()
        # While a loss scale is being lowered, skipped steps are normal; they count once it cannot be lowered further.
        self.skipped_in_a_row = 0 if good else self.skipped_in_a_row + (spike or scale.value <= 1)
        self.spikes_in_a_row = 0 if good else self.spikes_in_a_row + spike

    def take(self, outcome: Outcome, run: Run, scale: LossScale) -> None:
        """Counts a step with this outcome."""
        self.advance(run.batch, outcome.verdict, scale)
        if outcome.good and run.resilience.spike is not None:
            stats = self._stats
            stats.add(outcome.loss, outcome.grad_norm)
            self.usual = asdict(stats)

    @property
    def last_good(self) -> int:
        """The last step before the skipped ones."""
        return self.step - self.skipped_in_a_row

    def limits(self, deviations: float | None) -> Limits:
        """The limits of the next step's loss and norm: this many standard deviations above the running mean."""
        return NO_LIMITS if deviations is None else self._stats.limits(deviations)

    @property
    def _stats(self) -> RunningStats:
        return RunningStats(**self.usual)  # type: ignore[arg-type]  # the number of steps is an integer

    def back_to(self, earlier: Progress) -> Progress:
        """The progress after a rollback to an earlier state, which continues with data not seen yet."""
        left_out = [*self.left_out, [earlier.samples, self.samples, earlier.step]]
        return replace(earlier, samples=self.samples, skipped_in_a_row=0, spikes_in_a_row=0, left_out=left_out)


def step_record(progress: Progress, outcome: Outcome, rate: float, seconds: float, run: Run, plan: Plan) -> Step | StepSkipped:
    """The record of a step that was taken or skipped."""
    if not outcome.good:
        return StepSkipped(
            step=progress.step,
            samples=progress.samples,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            in_a_row=progress.skipped_in_a_row,
            reason="spike" if outcome.verdict == SPIKE else "not finite",
        )
    speed = run.batch_tokens / seconds
    flops = speed * plan.flops_per_token
    return Step(
        step=progress.step,
        loss=outcome.loss,
        tokens=outcome.tokens,
        samples=progress.samples,
        batch_digest=outcome.digest,
        learning_rate=rate,
        grad_norm=outcome.grad_norm,
        seconds=seconds,
        tokens_per_second=speed,
        flops_per_second=flops,
        mfu=flops / plan.peak_flops if plan.peak_flops else None,
        memory=outcome.memory,
        expert_load=outcome.expert_load,
        preferred=outcome.preferred,
        reward=outcome.reward,
    )


def too_many_skipped(progress: Progress, run: Run, run_file: Path) -> str:
    """Why a run ends after skipped steps in a row. `run_file`: the resolved one, in the run directory."""
    skipped, spikes = progress.skipped_in_a_row, progress.spikes_in_a_row
    spike = (
        f"a loss or gradient norm more than resilience.spike = {run.resilience.spike or 0:g} standard deviations above the mean"
    )
    if spikes == skipped:
        had = spike
        remedy = (
            "if the values are the new normal, as after a change of the data, raise resilience.spike or remove it; if they "
            f"keep growing, lower optimizer.learning_rate ({run.optimizer.learning_rate:g})."
        )
    else:
        had = "a loss or gradient that is not finite" + (f" ({skipped - spikes}), or {spike} ({spikes})" if spikes else "")
        remedy = (
            f"if the loss itself is not finite, lower optimizer.learning_rate ({run.optimizer.learning_rate:g}) or lengthen "
            f"optimizer.warmup_steps ({run.optimizer.warmup_steps}); if only the gradient is, lower train.clip ({run.train.clip:g})."
        )
    return (
        f"{skipped} steps in a row had {had}, more than resilience.max_skipped = {run.resilience.max_skipped}; nothing was applied "
        f"since step {progress.last_good}. Look at the step_skipped records in events.jsonl: {remedy}{_look_at_data(progress, run_file)}"
    )


def _look_at_data(progress: Progress, run_file: Path) -> str:
    if progress.left_out:  # after a rollback, steps read other samples than a preview shows
        return ""
    return f" `phalanx data preview {shlex.quote(str(run_file))} --step {progress.last_good + 1}` shows what the first of them read."


def too_many_rollbacks(progress: Progress, step: int, run: Run) -> str:
    """Why a run ends that has rolled back to one step again and again."""
    skipped = [(first, beyond) for first, beyond, to in progress.left_out if to == step]
    ranges = ", ".join(f"{first} to {beyond - 1}" for first, beyond in skipped)
    return (
        f"{progress.skipped_in_a_row} steps in a row were bad again, although the run rolled back to step {step} "
        f"{len(skipped)} times (resilience.rollback_after = {run.resilience.rollback_after}) and skipped samples {ranges}: the data is not the "
        f"cause. The state of step {step} itself may be bad: go back further by removing its checkpoint, or lower "
        f"optimizer.learning_rate ({run.optimizer.learning_rate:g})."
    )
