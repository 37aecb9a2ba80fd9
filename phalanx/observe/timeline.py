"""Records what this rank does, and when: the parts of its steps, and each of its collectives with the time at which this rank was ready for it.
With the records of all ranks, `phalanx trace` says who was the last to arrive, and why. `training/hooks/timeline_hook` switches it on.

On a GPU, computation and collectives are timed by events of the device, which are read a step later, so that nobody waits for them. Data
loading, saving and evaluation are timed on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from phalanx import accelerator
from phalanx.events.timeline_files import Call, Span

T = TypeVar("T")

_ANCHOR_STEPS = 50
"""Steps after which the clocks of device and host are compared again. It waits for the device; and they drift by some microseconds a minute."""
_NAMES = {
    "_AllGather": "all_gather", "_ReduceScatter": "reduce_scatter", "all_gather_single": "all_gather", "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all",
    "broadcast_object_list": "broadcast_object", "_all_gather_object": "all_gather_object",
}  # fmt: skip
"""Names of torch's functions, which differ between its versions, and of FSDP2's classes."""


def operation_name(collective: Callable[..., Any]) -> str:
    owner = getattr(collective, "__self__", None)
    name = type(owner).__name__ if owner is not None else getattr(collective, "__name__", "collective")
    return _NAMES.get(name, name)


class StepTimes(NamedTuple):
    """What was recorded from the end of one step to the end of the next: fields of `Span` and of `Call`. A stamp is seconds of the host's
    monotonic clock, or an event of the device."""

    spans: list[tuple[Any, Any, str, str]]
    calls: list[tuple[str, int, str, str, Any, Any, Any]]


class Timeline:
    """The recorder of one rank. Used by one thread at a time, like `CommTimer`."""

    def __init__(self, device: torch.device, on_group: Callable[[str, str, tuple[int, ...]], None]):
        """`on_group`: called with each group (name, use, ranks) before it is used for the first time."""
        self._accelerator, self._on_group = accelerator.of(device), on_group
        self._known: set[str] = set()
        self._times = StepTimes([], [])
        self._started: dict[int, tuple[Any, str, int, str, str]] = {}
        """Collectives in the background, by their work: when this rank began them, and which they are."""
        self._numbers: dict[str, int] = {}
        self._unread: StepTimes | None = None
        """Of the last step: its events may not have happened yet."""
        self._anchor: tuple[float, Any] | None = None
        self._free: list[Any] = []
        """Events that were read. To make one takes longer than to record it."""
        self._steps = 0
        self.part_end: Any = None
        """When the last part of the computation ended."""

    # --- stamps ---

    def stamp(self, now: float | None = None) -> Any:
        """Now, on the device: what it does next begins here. `now`: what the host's clock has just said."""
        if not self._accelerator.asynchronous:
            return perf_counter() if now is None else now
        event = self._free.pop() if self._free else self._accelerator.event(timing=True)
        event.record()
        return event

    def end_step(self) -> StepTimes | None:
        """What was recorded since the last call; on a GPU, since the call before. None: there is nothing yet."""
        times, self._times, self._numbers = self._times, StepTimes([], []), {}
        self._started.clear()  # of a step that failed
        self._steps += 1
        if not self._accelerator.asynchronous:
            return times
        if self._anchor is None or self._steps % _ANCHOR_STEPS == 0:
            self._drop_anchor()
        ready, self._unread = self._unread, times
        return ready

    def drain(self) -> StepTimes | None:
        """What `end_step` has not returned yet, if it has happened by now: a device that waits for a lost rank is not waited for."""
        ready, self._unread = self._unread, None
        if ready is None or self._anchor is None:
            return None
        stamps = [stamp for _, stamp, *_ in ready.spans if not isinstance(stamp, float)]
        return ready if not stamps or stamps[-1].query() else None

    def since(self, begin: float, times: StepTimes) -> tuple[list[Span], list[Call]]:
        """In seconds since `begin`. Any thread may call it, with the times of one step after the other."""
        host, anchor = self._anchor or (0.0, cast(Any, None))

        def seconds(stamp: Any) -> float:
            return stamp - begin if isinstance(stamp, float) else float(host - begin + anchor.elapsed_time(stamp) / 1000)

        spans = [Span(seconds(first), seconds(last), kind, name) for first, last, kind, name in times.spans]
        calls = [Call(*call[:4], *map(seconds, call[4:])) for call in times.calls]
        if self._accelerator.asynchronous:
            stamps = [stamp for first, last, *_ in times.spans for stamp in (first, last)]
            stamps += [stamp for call in times.calls for stamp in call[4:]]
            # A stamp may end one phase and begin the next, of the same step.
            self._free += {id(stamp): stamp for stamp in stamps if not isinstance(stamp, float)}.values()
        return spans, calls

    def _drop_anchor(self) -> None:
        """Find out what time it is on the host when it is now on the device."""
        self._accelerator.synchronize()
        event = self._accelerator.event(timing=True)
        event.record()
        self._anchor = perf_counter(), event

    # --- what the rank does ---

    def add(self, begin: Any, end: Any, kind: str, name: str) -> None:
        self._times.spans.append((begin, end, kind, name))

    def run(self, name: str, function: Callable[..., T], *args: Any, after: Any = None) -> T:
        """Runs a part of the computation and records it. `after`: the stamp at which the part before it ended. On a device, this part begins
        there: an event takes the host some ten microseconds, and what is between two parts is less."""
        begin = after if after is not None and self._accelerator.asynchronous else self.stamp()
        result = function(*args)
        self.part_end = self.stamp()
        self._times.spans.append((begin, self.part_end, "work", name))
        return result

    def collective(self, collective: Callable[..., Any], group: dist.ProcessGroup | None, begin: Any) -> None:
        """A collective that was waited for at once, since the stamp `begin`, is complete."""
        name = self._group_name(group)
        self._times.calls.append((name, self._next(name), operation_name(collective), "", begin, begin, self.stamp()))

    def began(self, work: object, group: dist.ProcessGroup | None, operation: str, label: str) -> None:
        """A collective begins in the background."""
        name = self._group_name(group)
        self._started[id(work)] = self.stamp(), name, self._next(name), operation, label

    def waited(self, work: object, begin: Any) -> None:
        """A wait for a collective or message that was begun, since the stamp `begin`, is over."""
        if (started := self._started.pop(id(work), None)) is not None:
            arrived, *call = started
            self._times.calls.append((*call, begin if arrived is None else arrived, begin, self.stamp()))

    def message(self, work: object, sender: int, receiver: int, label: str, *, receives: bool) -> None:
        """A message between two ranks begins: numbers of ranks in the job. Its receiver arrives when it has nothing else to do, and its sender now."""
        name = f"{sender}>{receiver}"
        if name not in self._known:
            self._known.add(name)
            self._on_group(name, "pipeline", (sender, receiver))
        operation = "receive" if receives else "send"
        self._started[id(work)] = None if receives else self.stamp(), name, self._next(name), operation, label

    def _next(self, name: str) -> int:
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        return number

    def _group_name(self, group: dist.ProcessGroup | None) -> str:
        handle = dist.group.WORLD if group is None else group
        assert handle is not None
        name: str = handle.group_name  # torch meets the ranks of a group under this name, so it is the same on all of them
        if name not in self._known:
            self._known.add(name)
            use = "all ranks" if handle is dist.group.WORLD else handle.group_desc
            self._on_group(name, use, tuple(dist.get_process_group_ranks(handle)))
        return name
