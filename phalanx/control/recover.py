"""From something that broke, or a node that came, to a new generation: halt, see what the survivors have, decide, keep the state, begin.
One object carries one such change; the controller makes it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from phalanx.checkpointing.replicas import replica_index, shm_slots
from phalanx.control.processes import BYTES_PER_PARAMETER
from phalanx.control.state import Generation, Message
from phalanx.events.records import FailureNoticed, Warned
from phalanx.recovery.history import updated_history
from phalanx.recovery.policy import decide
from phalanx.recovery.relayout import replicated_elsewhere
from phalanx.recovery.state import (
    Corrupt,
    Disconnected,
    EndRun,
    Event,
    EventBatch,
    NewGeneration,
    NoChange,
    NodeJoined,
    NodeLost,
    Wait,
    WorkerDied,
)
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.control.controller import Controller


_MOMENT = 0.03  # seconds: what dies together is decided together
_GIVE_UP = 10.0  # seconds in which a rank must have given up its step
_HAND_OVER = 120.0  # seconds in which survivors must have copied their state into memory
_PAUSE = 600.0  # seconds in which ranks come to the end of a step


@dataclass(slots=True)
class Record:
    """What the record of a recovery will say."""

    noticed: float
    failures: list[int] = field(default_factory=list)
    action: str = "restart"
    source: str = "live"
    decided: float = 0.0
    before: int | None = None
    """The newest step that was complete."""
    restarted: float | None = None


class Recovery:
    """One change of generation."""

    def __init__(self, controller: Controller, *, save: bool = False):
        """`save`: the run is to stop, and soon: the next generation only saves."""
        self._c, self._save = controller, save
        # A recovery that was itself disturbed is one with what follows.
        self._record = controller.recovering or Record(time.time())
        self._events: list[Event] = []

    async def run(self) -> None:
        c = self._c
        while c.leads and c.agent.outcome is None:
            await asyncio.sleep(_MOMENT)
            self._take()
            if not self._save and all(isinstance(event, NodeJoined) for event in self._events):
                if not await self._pause():
                    return
                continue
            if await self._change():
                return

    def _take(self) -> None:
        """What has happened by now, told as failures."""
        new = self._c.take_troubles()
        self._events += new
        for event in new:
            if isinstance(event, NodeJoined):
                continue
            number = self._c.failures = self._c.failures + 1
            self._record.failures.append(number)
            self._c.agent.emit(noticed(number, event, self._c.generation))

    async def _pause(self) -> bool:
        """Only nodes have come. Where that allows for more, let the ranks end their step; False: go on as before."""
        c, current = self._c, self._c.generation
        assert current is not None
        action = decide(c.situation(), EventBatch(tuple(self._events)), c.replanner.legal)
        if not isinstance(action, NewGeneration) or c.recovering is not None:
            # A run that has just begun to recover comes back to this when it has.
            c.returned |= {event.node for event in self._events if isinstance(event, NodeJoined)}
            return False
        c.order({"order": "pause", "generation": current.number})
        await c.until(lambda: bool(c.troubles) or bool(current.ended) or len(current.paused) == current.ranks, _PAUSE)
        if current.ended:
            return False
        if not c.troubles:
            await self._change()
            return False
        return True

    async def _change(self) -> bool:
        """Whether a new generation has begun, or the run has ended."""
        c, current = self._c, self._c.generation
        assert current is not None
        await self._halt(current)
        self._take()
        if not c.leads:
            return True
        event = EventBatch(tuple(self._events))
        action = decide(c.situation(), event, c.replanner.legal)
        if isinstance(action, NoChange):  # halted all the same: everybody goes on where they were
            action = decide(c.situation(), EventBatch((*self._events, Disconnected(current.step))), c.replanner.legal)
        self._record.decided = time.time()
        final = next((one for one in self._events if isinstance(one, WorkerDied) and one.final), None)
        if isinstance(action, EndRun) or final is not None:
            died = final or next((one for one in self._events if isinstance(one, WorkerDied)), None)
            alone = final is not None or not c.history  # the first failure of a launch tells its own story
            c.give_up(action.story if isinstance(action, EndRun) and not (alone and died) else None, died)
            return True
        if isinstance(action, Wait):
            await self._wait(action)
            return False
        assert isinstance(action, NewGeneration)
        source = await self._source(current)
        if c.troubles:
            return False  # somebody was lost meanwhile: decide again, with what is left
        c.history = updated_history(c.situation(), event, action)
        self._record.action, self._record.before, self._record.restarted = action.action, current.step, None
        plan = c.replanner.plan(action.layout)
        assert plan is not None, "the policy has asked whether it is legal"
        names = {rank: current.names.get(old) for rank, old in enumerate(action.old) if old is not None}
        c.dead = ()
        await c.begin(plan, action.assignment, names, source, save=self._save)
        c.recovering = self._record
        return True

    async def _wait(self, action: Wait) -> None:
        """Nothing fits: until a node comes."""
        c = self._c
        c.dead = action.dead
        c.agent.emit(Warned(message=f"The run waits: {action.reason}"))
        await c.until(lambda: bool(c.joined) or bool(c.troubles), float("inf"))

    async def _halt(self, current: Generation) -> None:
        """Every survivor gives up its step and says what it has; who does not is lost."""
        c = self._c
        if (store := c.agent.stores.get(current.number)) is not None:
            store.end(f"generation {current.number} is over")
        c.order({"order": "halt", "generation": current.number})

        def stand() -> bool:
            return all(rank in current.standings or rank in current.ended for rank in current.living)

        if await c.until(stand, _GIVE_UP):
            return
        late = [rank for rank in current.living if rank not in current.standings and rank not in current.ended]
        stacks = await c.overseer.hangs.stacks(current, late)
        for rank in late:
            reason = f"rank {rank} did not give up its step within {_GIVE_UP:.0f} s"
            failure = {"cause": "hung", "reason": reason, "traceback": stacks.get(rank, "")}
            c.order({"order": "kill", "generation": current.number, "ranks": [rank], "failure": failure})
        await c.until(stand, _GIVE_UP)

    async def _source(self, current: Generation) -> Message:
        """Where the next generation finds the state: with the survivors, in copies in memory, or on disk."""
        live, states = await self._live(current), await self._copies()
        # Where it is not known who is right, what was copied since replicas last agreed may be wrong too.
        until = None if current.told_apart or current.corruption is None else current.corruption["agreed"] or 0
        best = max((one for one in states if until is None or one.step <= until), key=_course, default=None)
        holders = [list(member.holder) for member in self._c.members.values()]
        if live is not None and (best is None or _course(best) <= (live["rewinds"], live["step"])):
            self._record.source = "live"
            # What others have handed over before is no longer needed; a run that fails again and again must not fill the memory with it.
            self._c.agent.spawn(self._c.overseer.forget(current.number))
            return {"kind": "memory", "generation": current.number, "holders": holders} | live
        if best is not None:
            self._record.source = "memory"
            where = {"generation": best.generation, "step": best.step, "ranks": best.ranks}
            return {"kind": "memory", "holders": holders} | where
        self._record.source = "disk"
        return {"kind": "disk", "until": until}

    async def _live(self, current: Generation) -> Message | None:
        """The survivors' own state, handed over; None where it is not all of it."""
        c, target = self._c, current.target()
        if target is None:
            return None
        step, contributors, ahead = target
        if not current.every_stage(contributors):
            return None
        current.handed.clear()
        order = {"order": "hand over", "generation": current.number, "contributors": contributors, "step": step}
        c.order(order | {"divisor": ahead["divisor"], "bad": ahead["bad"], "teller": ahead["rank"]})
        done = await c.until(lambda: bool(c.troubles) or all(rank in current.handed for rank in contributors), _HAND_OVER)
        if not done or c.troubles or not all(current.handed[rank]["covered"] for rank in contributors):
            return None
        return {"step": step, "ranks": len(contributors), "rewinds": ahead["rewinds"]}

    async def _copies(self) -> list[replica_index.ReplicaState]:
        addresses = [member.holder for member in self._c.members.values()]
        return await asyncio.to_thread(replica_index.complete_states, addresses, self._c.agent.token)


def _course(state: replica_index.ReplicaState) -> tuple[int, int]:
    """Which of two states is the later: a run that went back has left the steps after that behind."""
    contents = state.kept[0][0].copy.contents or {}
    return len(contents.get("progress", {}).get("left_out", [])), state.step


def noticed(number: int, event: Event, current: Generation | None) -> FailureNoticed:
    """An event as a record of a failure."""
    step = current.step if current is not None else None
    if isinstance(event, WorkerDied):
        node = current.assignment[event.rank] if current is not None else None
        where = f"rank {event.rank} (node {node})"
        message = event.reason if event.reason.startswith("rank") else f"{where}: {event.reason}"
        return FailureNoticed(
            number=number, cause=event.cause, message=message, rank=event.rank, node=node, step=step, traceback=event.traceback
        )
    if isinstance(event, NodeLost):
        return FailureNoticed(number=number, cause="node lost", message=event.reason, node=event.node, step=step)
    if isinstance(event, Corrupt):
        return FailureNoticed(number=number, cause="corrupt", message=event.reason, rank=event.rank, step=step)
    assert isinstance(event, Disconnected)
    return FailureNoticed(number=number, cause="connection lost", message=event.reason, step=step)


_MODEST = 0.4
"""Of the free memory."""


class Replanner:
    """Plans of one run on this kind of machine."""

    def __init__(self, run: Run, plan: Plan, machine: Callable[[], Machine]):
        """`machine`: asked only when there is a new layout to plan, as drivers of GPUs take seconds to answer."""
        self._run, self._plan, self._machine = run, plan, machine
        self._size = Size(
            parameters=plan.parameters, active=plan.active or plan.parameters, flops_per_token=plan.flops_per_token
        )
        self._known: dict[Layout, Plan | None] = {plan.layout: plan}

    def plan(self, layout: Layout) -> Plan | None:
        """None where the run cannot be laid out so."""
        if layout not in self._known:
            self._known[layout] = self._choose(layout)
        return self._known[layout]

    def legal(self, layout: Layout) -> bool:
        return self.plan(layout) is not None

    def _choose(self, layout: Layout) -> Plan | None:
        from phalanx.planning.planner import choose  # imports numpy, which a controller needs only to plan anew

        if self._run.optimizer.sync_every > 1 and layout.data != self._plan.layout.data:
            return None  # each replica has a state of its own
        share, micro = self._run.batch // layout.replicas, self._run.train.micro_batch
        # The batch stays what it is; a replica's share of it may no longer be a multiple of the micro-batch that was asked for.
        train = replace(self._run.train, micro_batch=math.gcd(share, micro) if micro and share else micro)
        run = replace(self._run, layout=layout, train=train)
        if next(iter(layout_findings(run)), None) is not None:
            return None
        try:
            return choose(run, self._machine(), size=self._size)
        except RunError:
            return None


def copy_every(run: Run, plan: Plan, assignment: Sequence[int]) -> int | None:
    """How often the state is copied into host memory: as the run file says; else after every step where a rank, or a node where there
    are several, holds what no other does, and memory is plentiful."""
    if run.checkpoint.memory_every is not None:
        return run.checkpoint.memory_every
    alike = run.optimizer.sync_every == 1  # else each replica goes its own way for some steps
    if run.resilience.restarts == 0 or (alike and replicated_elsewhere(plan.layout, assignment)):
        return None
    return 1 if _plenty(plan, len(set(assignment))) else None


def _plenty(plan: Plan, nodes: int) -> bool:
    """Whether copies that nobody asked for leave most of the memory to others. Each node has its own ranks' and its neighbour's."""
    root = shm_slots.default_root()
    room = shm_slots.free_bytes(root if root.is_dir() else root.parent)
    return 2 * plan.parameters * BYTES_PER_PARAMETER * min(nodes, 2) / nodes <= _MODEST * room
