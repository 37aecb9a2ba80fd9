"""Records what this rank does, and when: the parts of its steps, and each of its collectives with the time at which this rank was ready for it.
With the records of all ranks, `phalanx trace` says who was the last to arrive, and why. `training/hooks/timeline_hook` switches it on.

On a GPU, computation and collectives are timed by events of the device, which are read a step later, so that nobody waits for them. Data
loading, saving and evaluation are timed on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from phalanx import accelerator

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


class Interval(NamedTuple):
    """A part of a step; `kind` and `name` as in `events/timeline_files`. A stamp is seconds of the host or an event of the device."""

    begin: Any
    end: Any
    kind: str
    name: str


class CallTimes(NamedTuple):
    """One collective or message of this rank; as in `events/timeline_files`."""

    group: str
    number: int
    operation: str
    label: str
    arrived: Any
    begin: Any
    end: Any


class StepTimes(NamedTuple):
    """What was recorded from the end of one step to the end of the next, in seconds of the host's monotonic clock."""

    intervals: list[Interval]
    calls: list[CallTimes]


class Timeline:
    """The recorder of one rank. Used by one thread at a time, like `CommTimer`."""

    def __init__(self, device: torch.device, on_group: Callable[[str, str, tuple[int, ...]], None]):
        """`on_group`: called with each group (name, use, ranks) before it is used for the first time."""
        self._accelerator, self._on_group = accelerator.of(device), on_group
        self._known: set[str] = set()
        self._intervals: list[Interval] = []
        self._calls: list[CallTimes] = []
        self._started: dict[int, tuple[Any, str, int, str, str]] = {}
        """Collectives in the background, by their work: when this rank began them, and which they are."""
        self._numbers: dict[str, int] = {}
        self._unread: StepTimes | None = None
        """Of the last step: its events may not have happened yet."""
        self._anchor: tuple[float, Any] | None = None
        self._steps = 0

    # --- stamps ---

    def stamp(self) -> Any:
        """Now, on the device: what it does next begins here."""
        if not self._accelerator.asynchronous:
            return perf_counter()
        event = self._accelerator.event(timing=True)
        event.record()
        return event

    def end_step(self) -> StepTimes | None:
        """What was recorded since the last call; on a GPU, since the call before. None: there is nothing yet."""
        times = StepTimes(self._intervals, self._calls)
        self._intervals, self._calls, self._numbers = [], [], {}
        self._started.clear()  # of a step that failed
        self._steps += 1
        if not self._accelerator.asynchronous:
            return times
        ready, self._unread = self._unread, times
        result = None if ready is None else self._read(ready)
        if self._anchor is None or self._steps % _ANCHOR_STEPS == 0:
            self._drop_anchor()
        return result

    def drain(self) -> StepTimes | None:
        """What `end_step` has not returned yet."""
        ready, self._unread = self._unread, None
        if ready is not None:
            self._accelerator.synchronize()
        return None if ready is None else self._read(ready)

    def _drop_anchor(self) -> None:
        self._accelerator.synchronize()
        event = self._accelerator.event(timing=True)
        event.record()
        self._anchor = perf_counter(), event

    def _read(self, times: StepTimes) -> StepTimes | None:
        if self._anchor is None:
            return None
        host, anchor = self._anchor

        def seconds(stamp: Any) -> float:
            return stamp if isinstance(stamp, float) else host + anchor.elapsed_time(stamp) / 1000

        return StepTimes(
            [Interval(seconds(begin), seconds(end), kind, name) for begin, end, kind, name in times.intervals],
            [CallTimes(*call[:4], *map(seconds, call[4:])) for call in times.calls],
        )

    # --- what the rank does ---

    def add(self, begin: Any, end: Any, kind: str, name: str) -> None:
        self._intervals.append(Interval(begin, end, kind, name))

    def run(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """Runs a part of the computation and records it."""
        begin = self.stamp()
        result = function(*args)
        self._intervals.append(Interval(begin, self.stamp(), "work", name))
        return result

    def collective(self, collective: Callable[..., Any], group: dist.ProcessGroup | None, begin: Any) -> None:
        """A collective that was waited for at once, since the stamp `begin`, is complete."""
        name = self._group_name(group)
        self._calls.append(CallTimes(name, self._next(name), operation_name(collective), "", begin, begin, self.stamp()))

    def began(self, work: object, group: dist.ProcessGroup | None, operation: str, label: str) -> None:
        """A collective begins in the background."""
        name = self._group_name(group)
        self._started[id(work)] = self.stamp(), name, self._next(name), operation, label

    def waited(self, work: object, begin: Any) -> None:
        """A wait for a collective or message that was begun, since the stamp `begin`, is over."""
        if (started := self._started.pop(id(work), None)) is not None:
            arrived, *call = started
            self._calls.append(CallTimes(*call, begin if arrived is None else arrived, begin, self.stamp()))

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
