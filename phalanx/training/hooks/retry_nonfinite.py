"""A step whose loss or gradient is not finite is traced, and then taken once more: what one device got wrong once costs no data and no
update. Called by the trainer on all ranks together, for the first bad step in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.events.records import NotFinite
from phalanx.training.hooks.nonfinite_trace import trace
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import Outcome, Stepper


def once_more(stepper: Stepper, batches: Sequence[MicroBatch], work: Callable[[], Outcome]) -> tuple[Outcome, NotFinite]:
    """How it went this time, and where it first went wrong."""
    found = trace(stepper, batches)
    stepper.begin(stepper.number, stepper.seed)
    outcome = work()
    if outcome.good:
        found = replace(found, message=f"{found.message} Taken once more it was finite, and was applied: the fault has passed.")
    return outcome, found
