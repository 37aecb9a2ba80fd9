"""A run's progress, and what is reported of its steps. The trainer keeps the progress; every checkpoint holds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from phalanx.events.records import Step, StepSkipped
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.hooks.spikes import NO_LIMITS, Limits, RunningStats
from phalanx.training.step_totals import Outcome
from phalanx.transforms.precision import LossScale


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
    """See `hooks.spikes.RunningStats`. Empty unless spikes are skipped."""
    left_out: list[list[int]] = field(default_factory=list)
    """One entry per rollback: the first sample skipped, the first sample after them, and the step restored."""

    def advance(self, batch: int, good: bool, scale: LossScale, spike: bool = False) -> None:
        """Counts a step that was taken, or skipped if it was not good."""
        self.step += 1
        self.samples += batch
        self.loss_scale = scale.state()
        # While a loss scale is being lowered, skipped steps are normal; they count once it cannot be lowered further.
        self.skipped_in_a_row = 0 if good else self.skipped_in_a_row + (spike or scale.value <= 1)
        self.spikes_in_a_row = 0 if good else self.spikes_in_a_row + spike

    def take(self, outcome: Outcome, run: Run, scale: LossScale) -> None:
        """Counts a step with this outcome."""
        self.advance(run.batch, outcome.good, scale, outcome.spike)
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
            reason="spike" if outcome.spike else "not finite",
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
    )


def too_many_skipped(progress: Progress, run: Run) -> str:
    """Why a run ends after skipped steps in a row."""
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
        f"since step {progress.last_good}. Look at the step_skipped records in events.jsonl: {remedy}"
    )


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
