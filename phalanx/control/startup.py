"""How a controller comes to its first generation: all nodes come together, or those that live tell it what another had begun.
Part of `control/controller`; never loads torch."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.control.recover import Record
from phalanx.control.state import Generation, Message
from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, FailureNoticed, Finished, Recovered, RunStarted, Step
from phalanx.recovery.relayout import initial_assignment
from phalanx.recovery.state import Failure, Node, NodeLost, WorkerDied
from phalanx.spec.plan import Plan

if TYPE_CHECKING:
    from phalanx.control.controller import Controller

_TOGETHER = 60.0  # seconds in which all nodes must have come at the beginning
_SPARE = 0.3  # seconds more for those without ranks
_TAKEOVER = 1.0  # seconds in which those that live come to a new controller


async def assemble(c: Controller) -> None:
    """All nodes at the beginning; those that live where another has led before."""
    taking_over = c.agent.last is not None
    expected = range(c.agent.nodes)
    if not taking_over:
        await c.until(lambda: all(node in c.members for node in expected) or bool(c.lasts), _TOGETHER)
    if not taking_over and not c.lasts:
        missing = [node for node in expected if node not in c.members]
        if missing:
            c.end(1, f"node {missing[0]} did not start within {_TOGETHER:.0f} s: see its log in {c.agent.rundir.logs}.")
            return
        await _first(c)
        return
    newest = max(c.lasts, key=lambda last: last["generation"])
    nodes = {entry["node"] for entry in newest["ranks"]} - {newest["author"]}
    await c.until(lambda: nodes <= set(c.members), _TAKEOVER)
    # Spare nodes too: one that comes a moment later would be too late to step in.
    others = set(c.agent.claims.announced()) - {newest["author"]}
    await c.until(lambda: others <= set(c.members), _SPARE)
    known = _remember(c)
    c.agent.emit(ControllerChanged(term=c.term, node=c.agent.node))
    _inherit(c, newest)
    if c.troubles and known:  # the other had begun to recover from them
        c.recovering = Record(known[0].time, [event.number for event in known])


def _remember(c: Controller) -> list[FailureNoticed]:
    """What the one before has written down of failures, so that one that comes again and again is known for it; returns those that
    it had not recovered from."""
    open_: dict[int, FailureNoticed] = {}
    for event in _launch(read_events(c.agent.rundir.events_file)):
        if isinstance(event, FailureNoticed):
            open_[event.number] = event
            c.failures = max(c.failures, event.number)
            c.history += (Failure(event.cause, event.rank, event.step, event.message, event.node),)
        elif isinstance(event, Recovered):
            c.history = tuple(replace(one, tried=one.tried or event.action) for one in c.history)
            for number in event.failures:
                open_.pop(number, None)
    return list(open_.values())


async def _first(c: Controller) -> None:
    """The first generation of a launch."""
    plan = c.agent.plan
    assignment = initial_assignment(
        plan.layout, tuple(Node(one.node, one.slots) for one in sorted(c.members.values(), key=lambda one: one.node))
    )
    c.joined.clear()
    if c.term > 1:  # all who knew of the generation before are gone
        known = [
            event for event in _launch(read_events(c.agent.rundir.events_file)) if isinstance(event, Step | FailureNoticed)
        ]
        c.failures = max((event.number for event in known if isinstance(event, FailureNoticed)), default=0) + 1
        steps = [event.step for event in known if isinstance(event, Step)]
        step = steps[-1] if steps else None
        message = "all nodes were lost, and with them what was in memory"
        c.agent.emit(FailureNoticed(number=c.failures, cause="node lost", message=message, step=step))
        now = time.time()
        c.recovering = Record(now, [c.failures], source="disk", decided=now, before=step)
    await c.begin(plan, assignment, {}, {"kind": "disk", "until": None})


def _inherit(c: Controller, newest: Message) -> None:
    """Go on from what the agents know of the generation that another has begun."""
    plan = Plan.from_json(json.dumps(newest["plan"]))
    current = Generation(newest["generation"], plan, tuple(entry["node"] for entry in newest["ranks"]), newest["term"])
    c.generation = current
    for node, said in c.joins.items():
        for name, worker in said["workers"].items():
            if worker["generation"] == current.number and worker["rank"] is not None:
                current.names[worker["rank"]] = name
                if worker["ended"] is not None:
                    current.ended[worker["rank"]] = worker["ended"]
        if node not in current.assignment:
            c.joined.add(node)
    told = _launch(read_events(c.agent.rundir.events_file))
    if any(isinstance(event, Finished) for event in told):
        c.end(0)
        return
    step = next((event.step for event in reversed(told) if isinstance(event, Step)), None)  # no rank has said anything here yet
    for node in dict.fromkeys(current.assignment):
        if node not in c.members:
            for rank, place in enumerate(current.assignment):
                if place == node:
                    current.dead[rank] = WorkerDied(rank, step, "node lost", "its supervisor is gone", node_lives=False)
            c.troubles.append(NodeLost(node, step, f"node {node}: its supervisor is gone, and it decided for all"))
    for rank, place in enumerate(current.assignment):
        if place in c.members and rank not in current.names and rank not in current.dead:
            died = WorkerDied(rank, step, "died", f"rank {rank}: it is gone")
            current.dead[rank] = died
            c.troubles.append(died)


def _launch(events: list[Any]) -> list[Any]:
    """Those of the last launch."""
    begin = max((place for place, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return events[begin:]
