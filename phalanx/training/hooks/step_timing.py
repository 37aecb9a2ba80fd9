"""What a few early steps of a launch are made of on each rank: computing, waiting for others and for what, the update, the batch. The
trainer takes its steps through it, and `phalanx plan --compare` sets them beside what the plan promised.

The methods that a step goes through are wrapped for these steps and unwrapped again: all others know nothing of it. A profiler would see
every kernel, but it doubles the time of a small step, and of waiting on CPUs it sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.events.records import Step, StepTimed
from phalanx.observe.comm_timer import WAITED
from phalanx.observe.step_clock import Clock

if TYPE_CHECKING:
    from phalanx.training.trainer import Trainer

Result = TypeVar("Result")

_TIMED = (3, 4, 5)
"""Of a launch: the first warms up, the second is counted operation by operation. Of several, a reader can leave out the one in which
something came between."""


class Timing:
    """Times a few steps, once."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        layout = trainer.plan.layout
        # Inside compiled blocks nobody is asked what is waited for.
        apart = layout.tensor * layout.context * layout.expert * layout.expert_tensor == 1
        self._on = apart or not trainer.run.memory.compile
        self._taken = 0
        self._found: StepTimed | None = None

    def around(self, work: Callable[[], Result]) -> Result:
        """Take the next step."""
        self._taken += 1
        if not self._on or self._taken not in _TIMED:
            return work()
        clock = Clock(self._trainer.mesh.device)
        with ExitStack() as stack:
            for owner, name, part in self._seams():
                stack.enter_context(_wrapped(owner, name, clock, part))
            stack.enter_context(_running(clock))
            result = work()
        if isinstance(result, Step):
            self._found = StepTimed(step=result.step, rank=self._trainer.mesh.rank, seconds=clock.seconds, parts=clock.parts)
        return result

    def take(self) -> StepTimed | None:
        """What was timed, once."""
        found, self._found = self._found, None
        return found

    def _seams(self) -> Iterator[tuple[Any, str, str]]:
        """Methods of a step, and what it is doing in them; within one it may come to another."""
        trainer = self._trainer
        yield trainer.feed, "next", "loading"
        yield trainer.stepper, "step", "optimizer"  # the gradient's norm, and the update …
        yield trainer.stepper, "accumulate", "compute"
        yield trainer.stepper, "before_update", "other"
        yield trainer.stepper, "_compare", "other"  # … but not what is found out about replicas and saves in between
        if trainer.mesh.size("data") * trainer.mesh.size("shard") > 1:
            yield trainer, "_settle_update", "data"
        for owner, name in trainer.sharded.engine.waits():
            yield owner, name, "data"


@contextmanager
def _wrapped(owner: Any, name: str, clock: Clock, part: str) -> Iterator[None]:
    """Meanwhile the clock knows when this method of one object runs."""
    method, own = getattr(owner, name), name in vars(owner)

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.inside(part):
            return method(*args, **kwargs)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


@contextmanager
def _running(clock: Clock) -> Iterator[None]:
    WAITED.clock = clock
    try:
        with clock:
            yield
    finally:
        WAITED.clock = None
