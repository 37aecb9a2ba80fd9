"""Measures the time that this rank is blocked in collectives, so that stragglers can be told apart from ranks that wait for them; and, in a
few steps of a launch, the time of each part of a step (`Clock`).

All communication of a step goes through `timed_collective` and `wait`. Their arguments say what a wait is for: `worker/hang_report` reads
them from the stack of a rank that hangs, so nothing has to be recorded while all is well.

On GPUs the host runs ahead while the device waits, so events in the compute stream are timed instead; work of other streams shows only where
that stream waits for it. Not measured: FSDP2 on GPUs, whose messages overlap the computation, the sums between its replicas, and
communication inside compiled code. A wait that is not measured looks like work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from time import perf_counter
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from phalanx import accelerator
from phalanx.accelerator import Accelerator
from phalanx.observe.timeline import Timeline

PARTS = ("compute", "tensor", "context", "expert", "data", "bubble", "optimizer", "loading", "other")
"""Parts of a step, named as in the plan. Here "compute" includes kernel launches, "bubble" the messages between stages, "optimizer" the
transfers of offloaded state: a rank cannot separate them. "loading" is waiting for the next batch."""

_PARTS_OF_USES = {
    "tensor": "tensor", "context": "context", "expert": "expert", "expert tensor": "expert", "pipeline": "bubble", "muon": "optimizer",
    **dict.fromkeys(("data", "shard", "experts' data", "experts' shard", "tied", "local steps"), "data"),
}  # fmt: skip


def part_of(use: str) -> str:
    """The part that a wait in a group of this use belongs to; "other" for what all ranks agree on in a step."""
    return _PARTS_OF_USES.get(use.removesuffix(" (whole)"), "other")


class Clock:
    """Times one rank while it is entered. A step is cut wherever one activity changes to another, so the parts add up to the whole. Used by
    one thread at a time, like `CommTimer`."""

    def __init__(self, device: torch.device):
        self._accelerator = accelerator.of(device)
        self._activities = ["other"]
        self._marks: list[tuple[str, Any]] = []
        self._started = 0.0
        self.seconds = 0.0
        """Of the whole step."""
        self.parts: dict[str, float] = {}
        """Seconds of each part that occurred; they add up to `seconds`."""

    def __enter__(self) -> Clock:
        self._accelerator.synchronize()  # earlier work is not part of this step
        self._started = perf_counter()
        self._mark()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return  # do not wait for a device that has failed
        self._mark()
        self._accelerator.synchronize()
        self.seconds = perf_counter() - self._started
        self._add_up()

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """While this context is open, time counts as this part; afterwards, as the previous part."""
        self._activities.append(part)
        self._mark()
        try:
            yield
        finally:
            self._activities.pop()
            self._mark()

    def _mark(self) -> None:
        """Record when the current activity begins."""
        stamp: Any = perf_counter()
        if self._accelerator.asynchronous:
            stamp = self._accelerator.event(timing=True)
            stamp.record()
        self._marks.append((self._activities[-1], stamp))

    def _add_up(self) -> None:
        totals = dict.fromkeys(PARTS, 0.0)
        for (activity, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            totals[activity] += begin.elapsed_time(end) / 1000 if self._accelerator.asynchronous else end - begin
        # The device begins a little after the host and ends before it. On a host nothing lies between the marks.
        totals["other"] += max(0.0, self.seconds - sum(totals.values()))
        self.parts = {part: seconds for part, seconds in totals.items() if seconds > 0}
        self.seconds = sum(self.parts.values())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While this context is open, an attribute of a module, class or object has another value."""
    own = getattr(owner, "__dict__", None)  # None with slots
    is_inherited = own is not None and name not in own
    original = own.get(name) if own is not None else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


P = ParamSpec("P")
T = TypeVar("T")

_POLL = timedelta(seconds=0.25)
_POLL_TIMED_OUT = "Operation timed out!"  # a poll of ours; gloo's own timeouts have other messages
_ASYNC_COLLECTIVES: tuple[Callable[..., object], ...] = (
    dist.all_reduce,
    dist.all_to_all_single,
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
)
"""Collectives that accept async_op."""


class NamedGroup(Protocol):
    """A group of ranks that knows which technique uses it: `parallel/group.Group`."""

    @property
    def use(self) -> str: ...


def complete(work: dist.Work) -> None:
    """Wait, and return to Python every 250 ms: gloo does not always wake a thread that waits for a lost rank, and a thread can be
    interrupted only between two Python instructions."""
    while True:
        try:
            work.wait(_POLL)
            return
        except RuntimeError as error:
            if _POLL_TIMED_OUT not in str(error):
                raise


class CommTimer:
    """Adds up waiting times. Used by one thread at a time: the one that computes, or autograd's while that one is blocked."""

    __slots__ = ("_accelerator", "_free", "clock", "complete", "events", "seconds", "timeline")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Host seconds since the last `take`."""
        self.events: list[tuple[Any, Any]] | None = None
        """On an asynchronous device: events recorded before and after each wait."""
        self.clock: Clock | None = None
        """Runs in a step whose parts are timed."""
        self.timeline: Timeline | None = None
        """Records every collective, with `watch.timeline`."""
        self.complete: Callable[[dist.Work], None] = complete
        """Waits for a collective. A rehearsal, which has no other ranks, replaces it."""
        self._free: list[tuple[Any, Any]] = []
        self._accelerator: Accelerator = accelerator.of("cpu")

    def watch(self, device: torch.device) -> None:
        """Set the device that this rank computes on."""
        self._accelerator = accelerator.of(device)
        self.events = [] if self._accelerator.asynchronous else None

    def take(self) -> float:
        """Seconds of waiting since the last call; on an asynchronous device those of waits that have passed."""
        seconds, self.seconds = self.seconds, 0.0
        if self.events:
            pairs, self.events = self.events, []
            for pair in pairs:
                if pair[1].query():
                    seconds += pair[0].elapsed_time(pair[1]) / 1000
                    self._free.append(pair)
                else:
                    self.events.append(pair)
        return seconds

    def on_device(self, wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a wait that blocks the device and not the host."""
        assert self.events is not None
        new = self._accelerator.event
        pair = self._free.pop() if self._free else (new(timing=True), new(timing=True))
        pair[0].record()
        result = wait(*args, **kwargs)
        pair[1].record()
        self.events.append(pair)
        return result

    @contextmanager
    def on_clock(self, use: str) -> Iterator[None]:
        """While this context is open, the step clock counts time as waiting in a group of this use; nested waits count once."""
        assert self.clock is not None
        with self.clock.inside(part_of(use)), replaced(self, "clock", None):
            yield


COMM_TIMER = CommTimer()

# The two functions repeat their timing code: another call would double what they cost.


def timed_collective(collective: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a collective that returns when all ranks have taken part."""
    if is_compiling():
        return collective(*args, **kwargs)  # it becomes a part of the graph, in which there are no clocks
    if COMM_TIMER.clock is not None:
        handle = _group_of(args, kwargs)
        with COMM_TIMER.on_clock("step" if handle is None else handle.group_desc):
            return timed_collective(collective, *args, **kwargs)
    if (timeline := COMM_TIMER.timeline) is not None:
        begin, COMM_TIMER.timeline = timeline.stamp(), None
        try:
            return timed_collective(collective, *args, **kwargs)
        finally:
            COMM_TIMER.timeline = timeline
            timeline.collective(collective, _group_of(args, kwargs), begin)
    if COMM_TIMER.events is not None:
        return COMM_TIMER.on_device(collective, *args, **kwargs)
    started = perf_counter()
    if collective in _ASYNC_COLLECTIVES:
        work = cast(dist.Work, collective(*args, **kwargs, async_op=True))  # type: ignore[arg-type]
        COMM_TIMER.complete(work)
        result = cast(T, None)
    else:
        result = collective(*args, **kwargs)
    COMM_TIMER.seconds += perf_counter() - started
    return result


def wait(work: dist.Work, group: NamedGroup | None = None, peer: int | None = None, operation: str | None = None) -> None:
    """Wait for communication that was started. `group`: None for all ranks; `peer`: the rank that a message comes from or goes to;
    `operation`: its name, where the work does not know it."""
    if COMM_TIMER.clock is not None:
        with COMM_TIMER.on_clock("step" if group is None else group.use):
            return wait(work, group, peer, operation)
    if (timeline := COMM_TIMER.timeline) is not None:
        begin, COMM_TIMER.timeline = timeline.stamp(), None
        try:
            return wait(work, group, peer, operation)
        finally:
            COMM_TIMER.timeline = timeline
            timeline.waited(work, begin)
    if COMM_TIMER.events is not None:
        COMM_TIMER.on_device(work.wait)
        return
    started = perf_counter()
    if peer is None:
        COMM_TIMER.complete(work)
    else:
        work.wait()  # with a timeout, gloo would close the connection at its end
    COMM_TIMER.seconds += perf_counter() - started


def _group_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)), None)


def began(work: dist.Work | None, group: dist.ProcessGroup | None, operation: str, label: str = "") -> None:
    """A collective has begun in the background, `wait` follows. `work`: None where the group is one rank; `label`: what it moves."""
    if COMM_TIMER.timeline is not None and work is not None:
        COMM_TIMER.timeline.began(work, group, operation, label)


def message_began(work: dist.Work, sender: int, receiver: int, label: str, *, receives: bool) -> None:
    """A message between two ranks of the job has begun, `wait` follows."""
    if COMM_TIMER.timeline is not None:
        COMM_TIMER.timeline.message(work, sender, receiver, label, receives=receives)


def message_sent(work: dist.Work) -> None:
    """A message that this rank has sent is complete, without a wait."""
    if COMM_TIMER.timeline is not None:
        COMM_TIMER.timeline.waited(work, COMM_TIMER.timeline.stamp())


def span(part: str) -> AbstractContextManager[None]:
    """Attributes the time inside to one part of the step, in a step that is timed. In other steps it does nothing."""
    return nullcontext() if COMM_TIMER.clock is None else COMM_TIMER.clock.inside(part)
