"""How long this rank waits for others, so that its own work can be told from the whole step: in that, all ranks take as long as the
slowest. What this room does between ranks in a step goes through here; the trainer takes the sum once a step.

What a wait is for stands in the arguments of these functions: `worker/hang_report` reads it off the stack of a rank that hangs, and
nothing has to be written down while all is well.

On GPUs the host goes on where the device waits, and its own time says nothing. There a pair of events is put into the stream around
each wait, and read after the step, when they have passed. Not measured: FSDP2 on GPUs, whose messages run beside the computation,
the sums between its replicas, and what compiled code does between ranks. A wait that is not measured looks like work: there, a rank
that waits for a slow one can look as slow as it.

In a few steps of a launch a clock runs, which is told what each wait is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from time import perf_counter
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from phalanx.observe.step_clock import Clock, part_of

P = ParamSpec("P")
T = TypeVar("T")


class NamedGroup(Protocol):
    """A group of ranks that knows which technique uses it: `parallel/group.Group`."""

    @property
    def use(self) -> str: ...


class Waiting:
    """Adds up. Of one thread: the one that computes, or autograd's while that stands still."""

    __slots__ = ("_free", "clock", "passed", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of the host, since the last take."""
        self.passed: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        """On a GPU: what stands in its stream before and behind each wait."""
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.clock: Clock | None = None
        """In a step that is timed by what is done in it."""

    def watch(self, device: torch.device) -> None:
        """Say once where this rank computes."""
        self.passed = [] if device.type == "cuda" else None

    def take(self) -> float:
        """Seconds of waiting since this was last called; on a GPU those that the device has passed."""
        seconds, self.seconds = self.seconds, 0.0
        if self.passed:
            pairs, self.passed = self.passed, []
            for pair in pairs:
                if pair[1].query():
                    seconds += pair[0].elapsed_time(pair[1]) / 1000
                    self._free.append(pair)
                else:
                    self.passed.append(pair)
        return seconds

    def on_device(self, wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A wait that the host does not see."""
        assert self.passed is not None
        pair = self._free.pop() if self._free else (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        result = wait(*args, **kwargs)
        pair[1].record()
        self.passed.append(pair)
        return result


WAITED = Waiting()
_LOOK = timedelta(seconds=0.25)
_NOT_YET = "Operation timed out!"  # of this wait alone: gloo's own words are others
_BEGUN: tuple[Callable[..., object], ...] = (
    dist.all_reduce,
    dist.all_to_all_single,
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
)
"""Collectives that can be begun and waited for."""

# Both are written out: a call more would double what they cost.


def timed_collective(collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """A collective that returns when all have taken part."""
    if is_compiling():
        return collective(*args, **kwargs)  # it becomes a part of the graph, in which there are no clocks
    if WAITED.clock is not None:
        handle = next((value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)), None)
        with _on_clock(part_of("step" if handle is None else handle.group_desc)):
            return timed_collective(collective, *args, **kwargs)
    if WAITED.passed is not None:
        return WAITED.on_device(collective, *args, **kwargs)
    started = perf_counter()
    if collective in _BEGUN:
        work = cast(dist.Work, collective(*args, **kwargs, async_op=True))  # type: ignore[arg-type]
        _complete(work)
        result = cast(T, None)
    else:
        result = collective(*args, **kwargs)
    WAITED.seconds += perf_counter() - started
    return result


def wait(work: dist.Work, group: NamedGroup | None = None, peer: int | None = None, operation: str | None = None) -> None:
    """Until what was begun is complete. `group`: whose it is, or all ranks'; `peer`: the rank that a message comes from or goes to;
    `operation`: what it is, where the work itself does not know."""
    if WAITED.clock is not None:
        with _on_clock(part_of("step" if group is None else group.use)):
            return wait(work, group, peer, operation)
    if WAITED.passed is not None:
        WAITED.on_device(work.wait)
        return
    started = perf_counter()
    if peer is None:
        _complete(work)
    else:
        work.wait()  # given a time, gloo would give up the connection when that is over
    WAITED.seconds += perf_counter() - started


def span(part: str) -> AbstractContextManager[None]:
    """Attributes the time inside to one part of the step, in a step that is timed. In other steps it does nothing."""
    return nullcontext() if WAITED.clock is None else WAITED.clock.inside(part)


@contextmanager
def _on_clock(part: str) -> Iterator[None]:
    """Meanwhile a step that is timed waits for this."""
    clock, WAITED.clock = WAITED.clock, None  # once is enough
    assert clock is not None
    try:
        with clock.inside(part):
            yield
    finally:
        WAITED.clock = clock


def _complete(work: dist.Work) -> None:
    """Wait, and come back to Python now and then: gloo does not always wake who waits for a rank that is gone, and whoever is to
    interrupt this thread can do so between two of its instructions only."""
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError as error:
            if _NOT_YET not in str(error):
                raise
