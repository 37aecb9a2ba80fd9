"""The hook protocol of a step: `Trainer` and `Stepper` call these methods on every rank, at the same places of the same step. Each rare
concern (heartbeat, injected faults, replica checks, retries of non-finite steps, timing, accounting) is one hook in this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partialmethod

from torch import Tensor

from phalanx.events.heartbeat import Phase
from phalanx.events.records import Event, Step, StepSkipped
from phalanx.optim.optimizer import Optimizer
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.errors import RunFailed
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step_totals import Outcome


class StepRefused(RunFailed):
    """A hook refuses the step on all ranks before the update: nothing has changed, and no step is left pending."""

    events: Sequence[Event] = ()
    """What is reported before the error ends the run."""


@dataclass(slots=True)
class StepContext:
    """The step in progress, as hooks see it."""

    number: int
    model: ShardedModel
    optimizer: Optimizer
    repeat: Callable[[], None]
    """Computes the gradients of the step again; all ranks call it together."""
    finite: Tensor | None = None
    """On the device: whether loss and gradient are finite on all ranks. Known from `before_update` on."""


class StepHook:
    """Every method does nothing here; a hook overrides those it needs. The methods stand in the order in which they are called."""

    allows_ahead = True
    """Whether the first forward of a step may be launched at the end of the step before. False: the hook changes what that forward computes."""

    def on_state_replaced(self) -> None:
        """Parameters were written by something other than the optimizer: a checkpoint, initial weights, an outer step."""

    def on_phase(self, phase: Phase) -> None:
        """The trainer enters a phase outside of a step, such as "restoring"."""

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Entered around a whole step, from its batch to what replicas exchange after the update."""
        return nullcontext()

    def before_batch(self, step: int) -> None:
        """The batch of the step is read next."""

    def around_compute(self, step: int) -> AbstractContextManager[None]:
        """Entered around forward, backward and update."""
        return nullcontext()

    def before_forward(self, context: StepContext) -> None:
        """The first forward of the step, or of its repetition, is next."""

    def before_program(self, step: int) -> None:
        """A step that is one compiled program is called next, with its update: nothing has changed yet."""

    def on_loss(self, loss: Tensor) -> None:
        """The summed loss of one micro-batch, on ranks of the last pipeline stage."""

    def before_reduce(self, step: int, busy_seconds: float) -> None:
        """This rank's backwards are done, after that many seconds of its own work. The gradients are not reduced yet."""

    def after_backward(self, context: StepContext) -> None:
        """All gradients are complete, reduced over all ranks."""

    def before_update(self, context: StepContext) -> None:
        """The update is next; nothing has changed yet. May raise `StepRefused`, on all ranks alike."""

    def on_update(self, step: int) -> None:
        """The update begins: from here to `after_update` the state belongs to no step."""

    def after_update(self, step: int) -> None:
        """The update is complete, or the step was skipped."""

    def on_outcome(self, outcome: Outcome, batches: Sequence[MicroBatch], retry: Callable[[], Outcome]) -> Outcome:
        """May replace the outcome of a step that was skipped by that of a `retry`."""
        return outcome

    def on_step_taken(self, step: int, outcome: Outcome) -> None:
        """The step was taken or skipped, and will not be repeated."""

    def on_step_end(self, record: Step | StepSkipped) -> None:
        """The step and what replicas exchange after it are complete."""

    def before_evaluate(self, step: int) -> None:
        """An evaluation is next."""

    def before_save(self, step: int) -> None:
        """A checkpoint of the state after `step` is next."""

    def around_repeat(self) -> AbstractContextManager[None]:
        """Entered while a step is repeated to find out what went wrong in it."""
        return nullcontext()

    def on_roll_forward(self) -> None:
        """Other ranks are gone; this rank applies its pending step alone."""

    def take_events(self) -> list[Event]:
        """What the hook found out about the last step, the same on all ranks. Returned once."""
        return []

    def take_measurement(self) -> Event | None:
        """What the hook measured on this rank. Returned once."""
        return None


class Hooks(StepHook):
    """Several hooks as one, called in the order in which they were added. The methods that only pass a call on are made below."""

    def __init__(self, *hooks: StepHook):
        self._hooks = list(hooks)

    def add(self, *hooks: StepHook) -> None:
        self._hooks += hooks

    def remove(self, hook: StepHook) -> None:
        self._hooks.remove(hook)

    @property
    def all_allow_ahead(self) -> bool:
        return all(hook.allows_ahead for hook in self._hooks)

    @contextmanager
    def with_hook(self, hook: StepHook) -> Iterator[None]:
        """Adds a hook for a while."""
        self._hooks.append(hook)
        try:
            yield
        finally:
            self._hooks.remove(hook)

    def on_outcome(self, outcome: Outcome, batches: Sequence[MicroBatch], retry: Callable[[], Outcome]) -> Outcome:
        for hook in self._hooks:
            outcome = hook.on_outcome(outcome, batches, retry)
        return outcome

    def take_events(self) -> list[Event]:
        return [event for hook in self._hooks for event in hook.take_events()]

    def take_measurement(self) -> Event | None:
        return next((event for hook in self._hooks if (event := hook.take_measurement()) is not None), None)

    def _call_each(self, method: str, *args: object) -> None:
        for hook in self._hooks:
            getattr(hook, method)(*args)

    @contextmanager
    def _enter_each(self, method: str, *args: object) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(getattr(hook, method)(*args))
            yield


for _name, _method in vars(StepHook).items():
    if callable(_method) and _name not in vars(Hooks):
        _pass_on = Hooks._enter_each if _name.startswith("around_") else Hooks._call_each
        setattr(Hooks, _name, partialmethod(_pass_on, _name))
