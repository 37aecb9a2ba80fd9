"""How a controller gets its first generation: it starts one when all nodes have joined, or takes over one that another controller began."""

from __future__ import annotations

import time
from dataclasses import replace

from phalanx.control.controller_state import Control, Generation, RecoveryRecord
from phalanx.control.protocol import BeginGeneration, StateSource
from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Finished, Recovered, RunStarted, Step
from phalanx.recovery.relayout import initial_assignment
from phalanx.recovery.state import Failure, NodeLost, WorkerDied

_JOIN_TIMEOUT = 60.0  # seconds in which all nodes must have joined a new launch
_SPARES_TIMEOUT = 0.3  # seconds more for nodes without ranks
_TAKEOVER_TIMEOUT = 1.0  # seconds in which living nodes join a new controller


async def start(control: Control) -> None:
    """Start the first generation once all nodes have joined; if another controller led before, take over its generation."""
    state, agent = control.state, control.agent
    expected = range(agent.nodes)
    if agent.last_begin is None:
        await control.until(lambda: all(node in state.members for node in expected) or bool(state.begins), _JOIN_TIMEOUT)
    if agent.last_begin is None and not state.begins:
        missing = [node for node in expected if node not in state.members]
        if missing:
            logs = agent.rundir.logs
            control.end(1, f"node {missing[0]} did not start within {_JOIN_TIMEOUT:.0f} s: see its log in {logs}.")
        else:
            await _begin_first(control)
        return
    newest = max(state.begins, key=lambda begin: begin.generation)
    nodes = {slot.node for slot in newest.ranks} - {newest.author}
    await control.until(lambda: nodes <= set(state.members), _TAKEOVER_TIMEOUT)
    # Spare nodes, too: one that joined a moment later would be too late to replace a lost node.
    others = set(agent.terms.announced()) - {newest.author}
    await control.until(lambda: others <= set(state.members), _SPARES_TIMEOUT)
    unrecovered = _read_history(control)
    agent.emit(ControllerChanged(term=control.term, node=agent.node))
    _take_over(control, newest)
    if state.events and unrecovered:  # the previous controller had begun to recover from them
        state.recovery = RecoveryRecord(unrecovered[0].time, [event.number for event in unrecovered])


def _read_history(control: Control) -> list[FailureNoticed]:
    """Read the failures of this launch from the event log, so that repeated ones are recognized. Returns those not recovered from."""
    state = control.state
    unrecovered: dict[int, FailureNoticed] = {}
    for event in _launch_events(control):
        if isinstance(event, FailureNoticed):
            unrecovered[event.number] = event
            state.failures = max(state.failures, event.number)
            state.history += (Failure(event.cause, event.rank, event.step, event.message, event.node),)
        elif isinstance(event, Recovered):
            state.history = tuple(replace(failure, tried=failure.tried or event.action) for failure in state.history)
            for number in event.failures:
                unrecovered.pop(number, None)
    return list(unrecovered.values())


async def _begin_first(control: Control) -> None:
    """Begin the first generation of a launch."""
    state, agent = control.state, control.agent
    assignment = initial_assignment(agent.plan.layout, state.nodes())
    state.joined.clear()
    if control.term > 1:  # every node that knew the previous generation is gone
        events = _launch_events(control)
        state.failures = max((event.number for event in events if isinstance(event, FailureNoticed)), default=0) + 1
        step = _last_step(events)
        message = "all nodes were lost, and with them what was in memory"
        agent.emit(FailureNoticed(number=state.failures, cause="node lost", message=message, step=step))
        now = time.time()
        state.recovery = RecoveryRecord(now, [state.failures], source="disk", decided=now, step_before=step)
    await control.begin(agent.plan, assignment, {}, StateSource(in_memory=False))


def _take_over(control: Control, begin: BeginGeneration) -> None:
    """Continue with the generation that another controller began, from what the agents report about it."""
    state = control.state
    generation = Generation(begin.generation, begin.plan, tuple(slot.node for slot in begin.ranks), begin.term)
    state.generation = generation
    for node, join in state.joins.items():
        for name, worker in join.workers.items():
            if worker.generation == generation.number and worker.rank is not None:
                generation.names[worker.rank] = name
                if worker.exit_code is not None:
                    generation.ended[worker.rank] = worker.exit_code
        if node not in generation.assignment:
            state.joined.add(node)
    events = _launch_events(control)
    if any(isinstance(event, Finished) for event in events):
        control.end(0)
        return
    step = _last_step(events)  # no rank has reported to this controller yet
    for node in dict.fromkeys(generation.assignment):
        if node not in state.members:
            for rank, place in enumerate(generation.assignment):
                if place == node:
                    generation.dead[rank] = WorkerDied(rank, step, "node lost", "its supervisor is gone", node_lives=False)
            state.events.append(NodeLost(node, step, f"node {node}: its supervisor is gone, and it decided for all"))
    for rank, place in enumerate(generation.assignment):
        if place in state.members and rank not in generation.names and rank not in generation.dead:
            died = WorkerDied(rank, step, "died", f"rank {rank}: it is gone")
            generation.dead[rank] = died
            state.events.append(died)


def _launch_events(control: Control) -> list[Event]:
    """The records of the current launch."""
    events = read_events(control.agent.rundir.events_file)
    begin = max((index for index, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return events[begin:]


def _last_step(events: list[Event]) -> int | None:
    return next((event.step for event in reversed(events) if isinstance(event, Step)), None)
