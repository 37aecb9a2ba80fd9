"""What failed before, when that is enough, and the story that is then told. Called by `recovery/policy`, and by the controller,
which remembers failures together with what was done about them."""

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
"""So often the same failure at the same step is a bug, not bad luck."""

WINDOW = 1000
"""New steps in which failures are counted together: `resilience.restarts` is there to end a run that does not get on, not one that lasts
for months. Steps, not hours: a program that fails after every step must end, however long starting it takes."""

_REMEMBERED = 10 * WINDOW
"""New steps after which a failure is forgotten: no run goes back so far to meet it again, and months of failures need not be searched."""
_MOST_TOLD = 10
_NUMBER = re.compile(r"(?<!rank )(?<!node )\b(0x[0-9a-f]+|\d+(\.\d+)?)")
_TRIED = {
    "restart": "its processes were started again",
    "spare": "its ranks were moved to free places on other nodes",
    "shrink": "the run went on with fewer ranks",
    "grow": "the run went on with more ranks",
    "wait": "the run waited for a node",
}
_LOOK = {
    "died": "the log of that rank, and the memory of its node: a process killed with SIGKILL that nobody killed ran out of it (dmesg)",
    "hung": "the stack of that rank in events.jsonl (failure_noticed): it shows where it stood",
    "failed": "the traceback in the log of that rank: the program itself failed, and will fail again",
    "node lost": "the machine, its power and its network: nothing was heard of it any more",
    "connection lost": "the network between the nodes: processes on both sides lived",
    "corrupt": "the device and the memory of that rank's node: it computes other numbers than its replicas",
}


def flatten(event: Event) -> Iterator[WorkerDied | NodeLost | NodeJoined | Disconnected | Corrupt]:
    """The single events of one or of several at once."""
    if isinstance(event, EventBatch):
        for one in event.events:
            yield from flatten(one)
    else:
        yield event


def failures(situation: Situation, event: Event) -> tuple[Failure, ...]:
    """What failed now. Ranks that went with their node are no failures of their own, nor is one that several ranks met at once."""
    events = list(flatten(event))
    lost = {one.node for one in events if isinstance(one, NodeLost)}
    found: dict[tuple[str, str, int | None], Failure] = {}
    for one in events:
        rank = one.rank if isinstance(one, WorkerDied | Corrupt) else None
        node = one.node if isinstance(one, NodeLost) else situation.assignment[rank] if rank is not None else None
        if isinstance(one, NodeLost):
            failure = Failure("node lost", None, one.step, one.reason or f"node {one.node} is gone", node)
        elif isinstance(one, WorkerDied) and node not in lost:
            failure = Failure(one.cause, rank, one.step, one.reason, node)
        elif isinstance(one, Disconnected):
            failure = Failure("connection lost", None, one.step, one.reason or "connections broke, but nobody died")
        elif isinstance(one, Corrupt) and node not in lost:
            said = (
                "replicas differ, and which is wrong cannot be told"
                if rank is None
                else "it holds other numbers than its replicas"
            )
            failure = Failure("corrupt", rank, one.step, one.reason or said, node)
        else:
            continue
        found.setdefault(_same(failure), failure)
    return tuple(found.values())


def updated_history(situation: Situation, event: Event, action: Action) -> tuple[Failure, ...]:
    """The history after a decision: `Situation.history` of the next."""
    tried = action.action if isinstance(action, NewGeneration) else "wait" if isinstance(action, Wait) else ""
    now = [replace(failure, tried=tried) for failure in failures(situation, event)]
    return tuple(_within(_REMEMBERED, situation.begun, [*situation.history, *now]))


def verdict(situation: Situation, now: Sequence[Failure]) -> EndRun | None:
    """The end of the run, where what fails now is not worth another attempt."""
    everything = [*situation.history, *now]
    for failure in now:
        if failure.cause == "failed" and (failure.step is None or failure.step <= situation.begun):
            why = "The program failed before it had completed a step, so that starting it again would only repeat it."
            return EndRun(_story(why, [failure]))
        same = _same(failure)
        # Few are of the same step: words are compared of those alone.
        alike = [other for other in everything if other.step == failure.step and _same(other) == same]
        if len(alike) >= SAME_FAILURE_LIMIT:
            why = f"The same failure came {len(alike)} times {_when(failure)}: that is a bug or a broken machine, not bad luck."
            return EndRun(_story(why, alike))
    counted = recent_failures(situation, now) if now else []
    if len(counted) > situation.restarts:
        many = len(counted) > 1
        count = f"There {'were' if many else 'was'} {len(counted)} failure{'s' if many else ''}"
        where = "in this launch" if len(counted) == len(everything) else f"within {WINDOW:,} steps"
        return EndRun(_story(f"{count} {where}, and resilience.restarts = {situation.restarts}.", counted))
    return None


def recent_failures(situation: Situation, now: Sequence[Failure]) -> list[Failure]:
    """Failures that count against `resilience.restarts`."""
    return _within(WINDOW, situation.begun, [*situation.history, *now])


def _within(steps: int, begun: int, told: list[Failure]) -> list[Failure]:
    """Failures since the run was so many steps less far than it ever was. Steps that were lost and done again are no progress: a run that
    never comes beyond its next checkpoint must end too."""
    since = max([begun, *(one.step or 0 for one in told)]) - steps
    return told if begun > since else list(dropwhile(lambda one: (one.step or 0) <= since, told))


def _same(failure: Failure) -> tuple[str, str, int | None]:
    """Two failures are the same where this is. Neither rank nor node is in it: a bug moves about with the layout. A reason that
    names one in its first line tells them apart; other numbers in it, such as times and addresses, do not."""
    return failure.cause, _NUMBER.sub("#", _first_line(failure)), failure.step


def _story(why: str, told: Sequence[Failure]) -> str:
    lines = [f"The run was given up. {why}"]
    if len(told) > _MOST_TOLD:
        lines.append(f"The last {_MOST_TOLD} of them:")
    first = max(0, len(told) - _MOST_TOLD)
    lines += [f"  {number}. {_told(failure)}" for number, failure in enumerate(told[first:], first + 1)]
    causes = dict.fromkeys(failure.cause for failure in told)
    lines += [f"Look at {_LOOK[cause]}." for cause in causes if cause in _LOOK]
    lines.append(
        "What was saved is untouched: started again with the same run directory, the run goes on from its newest checkpoint."
    )
    return "\n".join(lines)


def _told(failure: Failure) -> str:
    node = None if failure.node is None else f"node {failure.node}"
    rank = None if failure.rank is None else f"rank {failure.rank}"
    where = f"{rank} ({node})" if rank and node else rank or node or "no single rank"
    after = f"; then {_TRIED.get(failure.tried, failure.tried)}" if failure.tried else "; nothing more was tried"
    return f"{_when(failure)}, {where}, {failure.cause}: {_first_line(failure)}{after}."


def _when(failure: Failure) -> str:
    return "before any step was known to be complete" if failure.step is None else f"after step {failure.step}"


def _first_line(failure: Failure) -> str:
    lines = failure.reason.strip().splitlines()
    return lines[0].rstrip(" .") if lines else "no reason was given"
