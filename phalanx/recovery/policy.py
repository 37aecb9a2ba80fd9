"""What to do when something happens to a run: a pure function of the situation. The live controller and the simulator call it.

The ladder, cheapest first: restart a dead worker on its node; move the ranks of a lost node to free slots; continue with fewer ranks on
another layout; wait for a node. With more slots than the layout uses, grow back towards the wanted layout. Too many failures end the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from time import localtime, strftime
from typing import Literal

from phalanx.recovery.relayout import (
    Legal,
    assign_nodes,
    reassign,
    relayout,
    relayout_cost,
    retained_ranks,
    with_valid_settings,
)
from phalanx.recovery.state import Action, EndRun, Event, Failure, NewGeneration, NodeJoined, Situation, Wait
from phalanx.spec.layout import Layout


def decide(situation: Situation, events: Sequence[Event], legal: Legal) -> Action:
    """The action that answers events that happened together. `legal`: whether a layout can be run."""
    assert len(situation.assignment) == situation.layout.ranks, "every rank of the running generation has a node"
    end = verdict(situation, failures(situation, events))
    if end is not None:
        return end
    aftermath = _aftermath(situation, events)
    grown = _grow(aftermath, legal)
    if not (aftermath.dead or aftermath.displaced or aftermath.broken):
        return grown
    # If the run is interrupted anyway, it grows at once rather than twice.
    return _continue_degraded(aftermath, legal) or grown or _same_layout(aftermath) or _shrink(aftermath, legal)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Aftermath:
    """The situation after the events."""

    situation: Situation
    living: dict[int, int]
    """Living nodes and their slots."""
    dead: frozenset[int]
    """Old ranks without a process, or with one whose state must be discarded."""
    places: dict[int, int]
    """Old ranks that can stay on their node, and that node."""
    broken: bool
    """The generation is over although no process died."""

    @property
    def slots(self) -> int:
        return sum(self.living.values())

    @property
    def displaced(self) -> list[int]:
        """Old ranks that cannot stay on their node."""
        return [rank for rank in range(self.situation.layout.ranks) if rank not in self.places]

    @property
    def survivors(self) -> dict[int, int]:
        """Old ranks whose processes continue, and their nodes."""
        return {rank: node for rank, node in self.places.items() if rank not in self.dead}


def _aftermath(situation: Situation, events: Sequence[Event]) -> _Aftermath:
    assignment, failed = situation.assignment, [event for event in events if isinstance(event, Failure)]
    joined = {event.node for event in events if isinstance(event, NodeJoined)}
    lost = {failure.node for failure in failed if failure.cause == "node lost"}
    # A node may be lost and joined in one batch: it has slots then, but nothing of what ran on it.
    living = {node: slots for node, slots in situation.nodes.items() if node not in lost - joined}
    dead = {rank for rank, node in enumerate(assignment) if node in lost or node not in living}
    dead |= {*situation.dead, *(failure.rank for failure in failed if failure.rank is not None)}
    if any(failure.cause == "corrupt" and failure.rank is None for failure in failed):
        dead = set(range(len(assignment)))
    return _Aftermath(
        situation=situation,
        living=living,
        dead=frozenset(dead),
        places=retained_ranks(assignment, living, dead),
        broken=any(failure.cause == "connection lost" for failure in failed),
    )


def _grow(aftermath: _Aftermath, legal: Legal) -> NewGeneration | None:
    """A layout that is nearer to the wanted one than the running layout, if the slots allow it."""
    wanted, layout = aftermath.situation.wanted, aftermath.situation.layout
    if layout == wanted:
        return None
    best = relayout(wanted, aftermath.slots, legal, aftermath.situation.batch)
    if best is None or relayout_cost(wanted, best) >= relayout_cost(wanted, layout):
        return None
    return _new_generation(aftermath, "grow", best)


def _continue_degraded(aftermath: _Aftermath, legal: Legal) -> NewGeneration | None:
    """The largest legal number of healthy replicas, all in their own processes: nothing has to be started."""
    layout = aftermath.situation.layout
    replicas = layout.data or 1
    if not aftermath.situation.settings.continue_degraded:
        return None
    inner = layout.shard * layout.context * layout.tensor
    survivors = aftermath.survivors
    living = Counter(rank // inner % replicas for rank in survivors)
    healthy = [replica for replica in range(replicas) if living[replica] == layout.ranks // replicas]
    if len(healthy) == replicas:
        return None
    for count in range(len(healthy), 0, -1):
        smaller = with_valid_settings(aftermath.situation.wanted, replace(layout, data=count))
        if legal(smaller):
            old = [rank for rank in range(layout.ranks) if rank // inner % replicas in healthy[:count]]
            return NewGeneration("shrink", smaller, tuple(survivors[rank] for rank in old), tuple(old))
    return None


def _same_layout(aftermath: _Aftermath) -> NewGeneration | None:
    """The same layout again: survivors keep their rank, dead ranks restart on their node, displaced ranks on free slots."""
    layout, displaced = aftermath.situation.layout, aftermath.displaced
    taken = Counter(aftermath.places.values())
    free = {node: slots - taken[node] for node, slots in aftermath.living.items()}
    if sum(free.values()) < len(displaced):
        return None
    # The emptiest node first, so that the ranks of a lost node stay together on a spare node.
    order = sorted(free, key=lambda node: (-free[node], node))
    places = assign_nodes(displaced, layout.tensor, {node: free[node] for node in order}, aftermath.places)
    ranks, survivors = range(layout.ranks), aftermath.survivors
    return NewGeneration(
        "spare" if displaced else "restart",
        layout,
        tuple(places[rank] for rank in ranks),
        tuple(rank if rank in survivors else None for rank in ranks),
    )


def _shrink(aftermath: _Aftermath, legal: Legal) -> NewGeneration | Wait:
    situation, dead = aftermath.situation, tuple(sorted(aftermath.dead))
    nodes, slots = len(aftermath.living), aftermath.slots
    room = f"{nodes} node{'' if nodes == 1 else 's'} with {slots} slot{'' if slots == 1 else 's'}"
    needs = f"the layout has {situation.layout.ranks} ranks, but the cluster has only {room} left"
    if not situation.settings.shrink:
        return Wait(f"{needs}, and resilience.shrink = false", dead)
    best = relayout(situation.wanted, slots, legal, situation.batch)
    if best is None:
        return Wait(f"{needs}, and no layout fits so small a number of ranks", dead)
    return _new_generation(aftermath, "shrink", best)


def _new_generation(aftermath: _Aftermath, action: Literal["shrink", "grow"], layout: Layout) -> NewGeneration:
    return NewGeneration(action, layout, *reassign(layout, aftermath.living, aftermath.survivors))


# --- the failures of a launch -----------------------------------------------------------------------------------------

SAME_FAILURE_LIMIT = 3  # the same failure at the same step this many times is a bug, not bad luck
WINDOW = 1000
"""New steps within which failures count against `resilience.restarts`, which shall end a run that makes no progress, not one that lasts for
months. Steps, not hours: a program that fails after every step must end, however long its start takes."""

HOUR = 3600.0
"""Seconds within which the failures of a program count that counts no steps."""

_FORGET_AFTER = 10 * WINDOW  # new steps after which a failure is forgotten: no run rolls back that far
_MAX_LISTED = 10
_NUMBER = re.compile(r"(?<!rank )(?<!node )\b(0x[0-9a-f]+|\d+(\.\d+)?)")
_ACTIONS = {
    "restart": "its processes were started again",
    "spare": "its ranks were moved to free places on other nodes",
    "shrink": "the run continued with fewer ranks",
    "grow": "the run continued with more ranks",
    "wait": "the run waited for a node",
}
_ADVICE = {
    "died": "the log of that rank, and the memory of its node: if nobody sent the SIGKILL, the machine ran out of memory (see dmesg)",
    "hung": "the stack of that rank in events.jsonl (failure_noticed): it shows where the rank was",
    "failed": "the traceback in the log of that rank: the program itself failed, and will fail again",
    "node lost": "the machine, its power and its network: it sent no more heartbeats",
    "connection lost": "the network between the nodes: the processes on both sides were alive",
    "corrupt": "the device and the memory of that rank's node: it computed other numbers than its replicas",
}


def failures(situation: Situation, events: Sequence[Event]) -> tuple[Failure, ...]:
    """The distinct failures among events. Ranks lost with their node are not counted, and neither is the same failure on several ranks."""
    failed = [event for event in events if isinstance(event, Failure)]
    lost = {failure.node for failure in failed if failure.cause == "node lost"}
    distinct: dict[tuple[str, str, int | None], Failure] = {}
    for failure in failed:
        if failure.rank is not None:
            failure = replace(failure, node=situation.assignment[failure.rank])
        if failure.rank is None or failure.node not in lost:
            distinct.setdefault(_key(failure), failure)
    return tuple(distinct.values())


def updated_history(situation: Situation, events: Sequence[Event], action: Action) -> tuple[Failure, ...]:
    """The history after a decision, for the next `Situation.history`."""
    tried = action.action if isinstance(action, NewGeneration) else "wait" if isinstance(action, Wait) else ""
    now = [replace(failure, tried=tried) for failure in failures(situation, events)]
    return tuple(_within_steps(_FORGET_AFTER, situation.first_step, [*situation.history, *now]))


def verdict(situation: Situation, now: Sequence[Failure]) -> EndRun | None:
    """End the run if another attempt is pointless; None: try again."""
    known = [*situation.history, *now]
    if now and not situation.counts_steps:
        return _verdict_by_time(situation, [failure for failure in known if failure.time > now[-1].time - HOUR], now)
    known_by_key: dict[tuple[str, str, int | None], list[Failure]] = {}
    steps = {failure.step for failure in now}
    for failure in known:  # of those steps only: thousands may fail together, and making keys is slow
        if failure.step in steps:
            known_by_key.setdefault(_key(failure), []).append(failure)
    for failure in now:
        if failure.cause == "failed" and (failure.step is None or failure.step <= situation.first_step):
            why = "The program failed before it had completed a step, so that starting it again would only repeat it."
            return EndRun(_story(situation, why, [failure]))
        equal = known_by_key[_key(failure)]
        if len(equal) >= SAME_FAILURE_LIMIT:
            why = f"The same failure came {len(equal)} times {_when(failure)}: that is a bug or a broken machine, not bad luck."
            return EndRun(_story(situation, why, equal))
    counted = _within_steps(WINDOW, situation.first_step, known) if now else []
    if len(counted) > situation.settings.restarts:
        many = len(counted) > 1
        count = f"There {'were' if many else 'was'} {len(counted)} failure{'s' if many else ''}"
        where = "in this launch" if len(counted) == len(known) else f"within {WINDOW:,} steps"
        why = f"{count} {where}, and resilience.restarts = {situation.settings.restarts}."
        return EndRun(_story(situation, why, counted))
    return None


def _verdict_by_time(situation: Situation, recent: Sequence[Failure], now: Sequence[Failure]) -> EndRun | None:
    """The verdict on a program that counts no steps: what counts are the failures of the last hour."""
    for failure in now:
        equal = [other for other in recent if other.cause == "failed" and _key(other) == _key(failure)]
        if len(equal) >= SAME_FAILURE_LIMIT:
            return EndRun(_story(situation, f"The program failed {len(equal)} times in the same way within an hour.", equal))
    if len(recent) > situation.settings.restarts:
        count = (
            f"There {'were' if len(recent) > 1 else 'was'} {len(recent)} failure{'s' if len(recent) > 1 else ''} within an hour"
        )
        return EndRun(_story(situation, f"{count}, and resilience.restarts = {situation.settings.restarts}.", recent))
    return None


def _within_steps(steps: int, first_step: int, failures: list[Failure]) -> list[Failure]:
    """Failures within this many steps of the furthest step reached. Repeated steps are no progress: a run that never gets past its next
    checkpoint must end, too."""
    since = max([first_step, *(failure.step or 0 for failure in failures)]) - steps
    return failures if first_step > since else list(dropwhile(lambda failure: (failure.step or 0) <= since, failures))


def _key(failure: Failure) -> tuple[str, str, int | None]:
    """A key that is equal for equal failures. Rank and node are not part of it, because a bug moves with the layout, unless the first line
    of the reason names one. Other numbers in it, such as times and addresses, are ignored."""
    return failure.cause, _NUMBER.sub("#", _first_line(failure)), failure.step


def _story(situation: Situation, why: str, listed: Sequence[Failure]) -> str:
    by_time = not situation.counts_steps
    lines = [f"The run was given up. {why}"]
    if len(listed) > _MAX_LISTED:
        lines.append(f"The last {_MAX_LISTED} of them:")
    first = max(0, len(listed) - _MAX_LISTED)
    lines += [f"  {number}. {_describe(failure, by_time)}" for number, failure in enumerate(listed[first:], first + 1)]
    causes = dict.fromkeys(failure.cause for failure in listed)
    lines += [f"Look at {_ADVICE[cause]}." for cause in causes if cause in _ADVICE]
    if not by_time and situation.saves:
        lines.append("Checkpoints are untouched: the same command continues from the newest checkpoint.")
    elif not by_time:
        lines.append("Nothing was saved, because checkpoint.save = false: the same command starts again from step 0.")
    return "\n".join(lines)


def _describe(failure: Failure, by_time: bool) -> str:
    when = f"at {strftime('%H:%M:%S', localtime(failure.time))}" if by_time else _when(failure)
    node = None if failure.node is None else f"node {failure.node}"
    rank = None if failure.rank is None else f"rank {failure.rank}"
    where = f"{rank} ({node})" if rank and node else rank or node or "no single rank"
    after = f"; then {_ACTIONS.get(failure.tried, failure.tried)}" if failure.tried else "; nothing more was tried"
    return f"{when}, {where}, {failure.cause}: {_first_line(failure)}{after}."


def _when(failure: Failure) -> str:
    return "before any step was known to be complete" if failure.step is None else f"after step {failure.step}"


def _first_line(failure: Failure) -> str:
    lines = failure.reason.strip().splitlines()
    return lines[0].rstrip(" .") if lines else "no reason was given"
