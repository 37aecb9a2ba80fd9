"""How far a run has come, and what is said about a step. The trainer keeps the one and tells the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.events.records import Step, StepSkipped
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.step import Outcome
from phalanx.transforms.precision import LossScale


@dataclass(slots=True)
class Progress:
    """How far the run has come: with the tensors, everything that a checkpoint holds."""

    step: int = 0
    """Optimizer steps taken or skipped."""
    samples: int = 0
    """Position in the data: sequences consumed."""
    skipped_in_a_row: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)
    """fp16: see `transforms.precision.LossScale`."""

    def advance(self, batch: int, good: bool, scale: LossScale) -> None:
        """A step was taken, or skipped if it was not good."""
        self.step += 1
        self.samples += batch
        self.loss_scale = scale.state()
        # A loss scale that is being lowered skips steps by nature; they count once it has nothing left to give.
        self.skipped_in_a_row = 0 if good else self.skipped_in_a_row + (scale.value <= 1)


def report(progress: Progress, outcome: Outcome, rate: float, seconds: float, job: tuple[Run, Plan]) -> Step | StepSkipped:
    """The record of a step that was taken or skipped."""
    run, plan = job
    if not outcome.good:
        return StepSkipped(
            step=progress.step,
            samples=progress.samples,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            in_a_row=progress.skipped_in_a_row,
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
    """Why a run of skipped steps ends."""
    return (
        f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite, more than "
        f"resilience.max_skipped = {run.resilience.max_skipped}; nothing was applied since step "
        f"{progress.step - progress.skipped_in_a_row}. Look at the step_skipped records in events.jsonl: if the loss itself "
        f"is not finite, lower optimizer.learning_rate ({run.optimizer.learning_rate:g}) or lengthen optimizer.warmup_steps "
        f"({run.optimizer.warmup_steps}); if only the gradient is, lower train.clip ({run.train.clip:g})."
    )
