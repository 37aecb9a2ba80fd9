"""The failures of a launch: which ones count, when there are too many, and the report that then ends the run. Called by `recovery/policy`,
and by the controller and the simulator, which keep the history."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import dropwhile

from phalanx.recovery.state import (
    Action,
    Corrupt,
    Disconnected,
    EndRun,
    Event,
    EventBatch,
    Failure,
    NewGeneration,
    NodeJoined,
    NodeLost,
    Situation,
    Wait,
    WorkerDied,
)

SAME_FAILURE_LIMIT = 3
"""The same failure at the same step this many times is a bug, not bad luck."""

WINDOW = 1000
"""New steps within which failures count against `resilience.restarts`, which shall end a run that makes no progress, not one that lasts for
months. Steps, not hours: a program that fails after every step must end, however long its start takes."""

_FORGET_AFTER = 10 * WINDOW
"""New steps after which a failure is forgotten: no run rolls back that far, and the history stays short."""
_MAX_LISTED = 10
_NUMBER = re.compile(r"(?<!rank )(?<!node )\b(0x[0-9a-f]+|\d+(\.\d+)?)")
_ACTIONS = {
    "restart": "its processes were started again",
    "spare": "its ranks were moved to free places on other nodes",
    "shrink": "the run went on with fewer ranks",
    "grow": "the run went on with more ranks",
    "wait": "the run waited for a node",
}
_ADVICE = {
    "died": "the log of that rank, and the memory of its node: a process killed with SIGKILL that nobody killed ran out of it (dmesg)",
    "hung": "the stack of that rank in events.jsonl (failure_noticed): it shows where it stood",
    "failed": "the traceback in the log of that rank: the program itself failed, and will fail again",
    "node lost": "the machine, its power and its network: nothing was heard of it any more",
    "connection lost": "the network between the nodes: processes on both sides lived",
    "corrupt": "the device and the memory of that rank's node: it computes other numbers than its replicas",
}


def flatten(event: Event) -> Iterator[WorkerDied | NodeLost | NodeJoined | Disconnected | Corrupt]:
    """The single events of an event or batch."""
    if isinstance(event, EventBatch):
        for part in event.events:
            yield from flatten(part)
    else:
        yield event


def failures(situation: Situation, event: Event) -> tuple[Failure, ...]:
    """The distinct failures of an event. Ranks lost with their node are not counted, and neither is the same failure on several ranks."""
    events = list(flatten(event))
    lost = {event.node for event in events if isinstance(event, NodeLost)}
    distinct: dict[tuple[str, str, int | None], Failure] = {}
    for event in events:
        failure: Failure | None = None
        rank = event.rank if isinstance(event, WorkerDied | Corrupt) else None
        node = situation.assignment[rank] if rank is not None else None
        match event:
            case NodeLost():
                failure = Failure("node lost", None, event.step, event.reason or f"node {event.node} is gone", event.node)
            case WorkerDied() if node not in lost:
                failure = Failure(event.cause, rank, event.step, event.reason, node)
            case Disconnected():
                failure = Failure("connection lost", None, event.step, event.reason or "connections broke, but nobody died")
            case Corrupt() if node not in lost:
                unknown = "replicas differ, and which is wrong cannot be told"
                default = unknown if rank is None else "it holds other numbers than its replicas"
                failure = Failure("corrupt", rank, event.step, event.reason or default, node)
        if failure is not None:
            distinct.setdefault(_key(failure), failure)
    return tuple(distinct.values())


def updated_history(situation: Situation, event: Event, action: Action) -> tuple[Failure, ...]:
    """The history after a decision, for the next `Situation.history`."""
    tried = action.action if isinstance(action, NewGeneration) else "wait" if isinstance(action, Wait) else ""
    now = [replace(failure, tried=tried) for failure in failures(situation, event)]
    return tuple(_within_steps(_FORGET_AFTER, situation.first_step, [*situation.history, *now]))


def verdict(situation: Situation, now: Sequence[Failure]) -> EndRun | None:
    """End the run if another attempt is pointless; None: try again."""
    known = [*situation.history, *now]
    for failure in now:
        if failure.cause == "failed" and (failure.step is None or failure.step <= situation.first_step):
            why = "The program failed before it had completed a step, so that starting it again would only repeat it."
            return EndRun(_story(why, [failure]))
        key = _key(failure)
        # Compare the step first: few failures share it, and comparing reasons is slow.
        equal = [other for other in known if other.step == failure.step and _key(other) == key]
        if len(equal) >= SAME_FAILURE_LIMIT:
            why = f"The same failure came {len(equal)} times {_when(failure)}: that is a bug or a broken machine, not bad luck."
            return EndRun(_story(why, equal))
    counted = recent_failures(situation, now) if now else []
    if len(counted) > situation.restarts:
        many = len(counted) > 1
        count = f"There {'were' if many else 'was'} {len(counted)} failure{'s' if many else ''}"
        where = "in this launch" if len(counted) == len(known) else f"within {WINDOW:,} steps"
        return EndRun(_story(f"{count} {where}, and resilience.restarts = {situation.restarts}.", counted))
    return None


def recent_failures(situation: Situation, now: Sequence[Failure]) -> list[Failure]:
    """Failures that count against `resilience.restarts`."""
    return _within_steps(WINDOW, situation.first_step, [*situation.history, *now])


def _within_steps(steps: int, first_step: int, failures: list[Failure]) -> list[Failure]:
    """Failures within this many steps of the furthest step reached. Repeated steps are no progress: a run that never gets past its next
    checkpoint must end, too."""
    since = max([first_step, *(failure.step or 0 for failure in failures)]) - steps
    return failures if first_step > since else list(dropwhile(lambda failure: (failure.step or 0) <= since, failures))


def _key(failure: Failure) -> tuple[str, str, int | None]:
    """A key that is equal for equal failures. Rank and node are not part of it, because a bug moves with the layout, unless the first line
    of the reason names one. Other numbers in it, such as times and addresses, are ignored."""
    return failure.cause, _NUMBER.sub("#", _first_line(failure)), failure.step


def _story(why: str, listed: Sequence[Failure]) -> str:
    lines = [f"The run was given up. {why}"]
    if len(listed) > _MAX_LISTED:
        lines.append(f"The last {_MAX_LISTED} of them:")
    first = max(0, len(listed) - _MAX_LISTED)
    lines += [f"  {number}. {_describe(failure)}" for number, failure in enumerate(listed[first:], first + 1)]
    causes = dict.fromkeys(failure.cause for failure in listed)
    lines += [f"Look at {_ADVICE[cause]}." for cause in causes if cause in _ADVICE]
    lines.append(
        "What was saved is untouched: started again with the same run directory, the run goes on from its newest checkpoint."
    )
    return "\n".join(lines)


def _describe(failure: Failure) -> str:
    node = None if failure.node is None else f"node {failure.node}"
    rank = None if failure.rank is None else f"rank {failure.rank}"
    where = f"{rank} ({node})" if rank and node else rank or node or "no single rank"
    after = f"; then {_ACTIONS.get(failure.tried, failure.tried)}" if failure.tried else "; nothing more was tried"
    return f"{_when(failure)}, {where}, {failure.cause}: {_first_line(failure)}{after}."


def _when(failure: Failure) -> str:
    return "before any step was known to be complete" if failure.step is None else f"after step {failure.step}"


def _first_line(failure: Failure) -> str:
    lines = failure.reason.strip().splitlines()
    return lines[0].rstrip(" .") if lines else "no reason was given"
