"""From a failure, or a node that joined or leaves, to a new generation: halt the survivors, decide by `recovery/policy`, keep the state, plan the
layout, begin."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import itemgetter

from phalanx.checkpointing.replicas import replica_index
from phalanx.control import protocol
from phalanx.control.controller_state import Control, Generation, RecoveryRecord
from phalanx.events.records import FailureNoticed, Warned
from phalanx.recovery.policy import decide, updated_history
from phalanx.recovery.state import Action, EndRun, Event, Failure, NewGeneration, NodeJoined, NodeLeaving, Wait
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run

_GATHER = 0.03  # seconds: failures that come together are handled together
_HALT_TIMEOUT = 10.0  # seconds in which a rank must have abandoned its step
_HAND_OFF_TIMEOUT = 120.0  # seconds in which survivors must have copied their state into host memory
_PAUSE_TIMEOUT = 600.0  # seconds in which ranks reach the end of a step
_LEAVE_FRACTION = 0.5  # part of the time until a node goes away in which ranks reach the end of a step


class Recovery:
    """One change of generation."""

    def __init__(self, control: Control, replanner: Replanner, *, save_only: bool = False):
        """`save_only`: the run must stop soon; the next generation restores, saves and ends."""
        self._control, self._state, self._agent = control, control.state, control.agent
        self._replanner, self._save_only = replanner, save_only
        # A recovery that another failure interrupts is one recovery with the next.
        self._record = self._state.recovery or RecoveryRecord(time.time())
        self._events: list[Event] = []

    async def run(self) -> None:
        """Change the generation, again if more fails meanwhile, until one has begun or the run ends."""
        while self._control.leads and self._agent.outcome is None:
            await asyncio.sleep(_GATHER)
            if await self._control.lost_majority() and not await self._control.offer_term():
                return
            if self._agent.node in self._state.leaving and self._state.nodes():
                await self._control.step_down()
                return
            self._gather()
            if not self._save_only and all(isinstance(event, NodeJoined | NodeLeaving) for event in self._events):
                if not await self._pause_to_change():
                    return
                continue
            if await self._change():
                return

    def _gather(self) -> None:
        """Take what has happened by now, and record the failures."""
        now, generation = time.time(), self._state.generation
        assert generation is not None
        new = [replace(event, time=now) if isinstance(event, Failure) else event for event in self._state.take_events()]
        self._events += new
        for event in new:
            if isinstance(event, Failure):
                self._state.failures += 1
                self._record.failures.append(self._state.failures)
                self._agent.emit(failure_noticed(self._state.failures, event, generation))

    def _decide(self, *more: Event) -> Action:
        situation = self._state.situation(self._agent.run)
        return decide(situation, (*self._events, *more), self._replanner.legal)

    async def _pause_to_change(self) -> bool:
        """Only nodes have joined, or leave. If the run shall change, pause after the current step and do it; False: nothing more to do."""
        state, generation = self._state, self._state.generation
        assert generation is not None
        action = self._decide()
        displaced = set(state.leaving) & set(generation.assignment)
        if isinstance(action, Wait) and displaced:
            self._control.request_stop(f"node {min(displaced)} goes away, and {action.reason}")
            return False
        if not isinstance(action, NewGeneration) or (state.recovery is not None and not displaced):
            # A recovery in progress comes back to these nodes when it is complete.
            state.joined_during_recovery |= {event.node for event in self._events if isinstance(event, NodeJoined)}
            return False
        self._control.order(protocol.Pause(generation=generation.number))
        left = min((state.members[node].leaves or 0.0 for node in displaced), default=math.inf) - time.monotonic()
        await self._control.until(
            lambda: bool(state.events) or bool(generation.ended) or len(generation.paused) == generation.ranks,
            min(_PAUSE_TIMEOUT, _LEAVE_FRACTION * left),
        )
        if generation.ended:
            return False
        if not state.events:
            await self._change()
            return False
        return True

    async def _change(self) -> bool:
        """Halt, decide and act; returns whether a new generation has begun or the run has ended."""
        state, generation = self._state, self._state.generation
        assert generation is not None
        await self._halt(generation)
        self._gather()
        if not self._control.leads:
            return True
        action = self._decide()
        if action is None:  # the ranks were halted, so the same ranks must begin again
            action = self._decide(Failure("connection lost", None, generation.step, ""))
        self._record.decided = time.time()
        final = next((event for event in self._events if isinstance(event, Failure) and event.final), None)
        if isinstance(action, EndRun) or final is not None:
            self._give_up(action, final)
            return True
        if isinstance(action, Wait):
            state.dead = action.dead
            self._agent.emit(Warned(message=f"The run waits: {action.reason}"))
            await self._control.until(lambda: bool(state.joined) or bool(state.events), float("inf"))
            return False
        assert isinstance(action, NewGeneration)
        source = await self._choose_source(generation)
        if state.events:
            return False  # another rank was lost meanwhile: decide again
        situation = state.situation(self._agent.run)
        state.history = updated_history(situation, self._events, action)
        self._record.action, self._record.step_before, self._record.restarted = action.action, generation.step, None
        plan = self._replanner.plan(action.layout)
        assert plan is not None, "the policy chooses legal layouts only"
        # No process of the XLA engine outlives its generation (`worker/xla_rank`).
        kept = enumerate(action.old if self._agent.run.engine.name == "torch" else ())
        names = {rank: generation.names.get(old) for rank, old in kept if old is not None}
        state.dead = ()
        await self._control.begin(plan, action.assignment, names, source, save_only=self._save_only)
        state.recovery = self._record
        return True

    def _give_up(self, action: Action, final: Failure | None) -> None:
        """End the run. The first failure of a launch is reported by itself, later ones with the history of all."""
        died = final or next((event for event in self._events if isinstance(event, Failure) and event.is_death), None)
        alone = final is not None or not self._state.history
        if isinstance(action, EndRun) and not (alone and died is not None):
            self._control.end(1, action.story, traceback=died.traceback if died is not None else "")
        else:
            assert died is not None
            self._control.end(1, died.reason.removeprefix(f"rank {died.rank}: "), died.rank, died.traceback)

    async def _halt(self, generation: Generation) -> None:
        """Make every survivor abandon its step and report its state; ranks that do not are killed."""
        if (store := self._agent.stores.get(generation.number)) is not None:
            store.end(f"generation {generation.number} is over")
        self._control.order(protocol.Halt(generation=generation.number))

        def missing() -> list[int]:
            return [rank for rank in generation.living if rank not in generation.survivors and rank not in generation.ended]

        if await self._control.until(lambda: not missing(), _HALT_TIMEOUT):
            return
        late = missing()
        stacks = await self._control.stacks(generation, late)
        for rank in late:
            self._control.kill_hung([rank], f"rank {rank} did not give up its step within {_HALT_TIMEOUT:.0f} s", stacks[rank])
        await self._control.until(lambda: not missing(), _HALT_TIMEOUT)

    async def _choose_source(self, generation: Generation) -> protocol.StateSource:
        """Choose the newest state: the survivors' own, replicas in host memory, or a checkpoint on disk."""
        live = await self._hand_off(generation)
        servers = self._state.replica_servers()
        replicas = await asyncio.to_thread(replica_index.complete_states, servers, self._agent.token)
        newest_step = generation.last_valid
        usable = [state for state in replicas if newest_step is None or state.step <= newest_step]
        if newest_step is not None:  # no later failure may find the wrong ones
            await asyncio.to_thread(replica_index.discard, servers, self._agent.token, after=newest_step)
        states = [(_rewinds(state), state.step, "memory", state.generation, state.ranks) for state in usable]
        if live is not None:
            rewinds, step, ranks = live
            # First, so that it is preferred to equally new replicas.
            states.insert(0, (rewinds, step, "live", generation.number, ranks))
        if not states:
            self._record.source = "disk"
            return protocol.StateSource(in_memory=False, newest_step=newest_step)
        # A rollback abandons the steps after it: of two states, the one with more rollbacks is newer.
        _, step, self._record.source, number, ranks = max(states, key=itemgetter(0, 1))
        if self._record.source == "live":
            # A run that fails again and again must not fill the memory with earlier hand-offs.
            self._agent.spawn(discard_replicas(self._control, generation.number))
        addresses = [list(server) for server in servers]
        return protocol.StateSource(
            in_memory=True, newest_step=newest_step, generation=number, step=step, ranks=ranks, servers=addresses
        )

    async def _hand_off(self, generation: Generation) -> tuple[int, int, int] | None:
        """Have the survivors copy their state into host memory; returns (rewinds, step, ranks), or None if part of it is missing."""
        state, newest_state = self._state, generation.newest_state()
        if newest_state is None:
            return None
        step, contributors, newest = newest_state
        if not generation.covers_all_stages(contributors):
            return None
        generation.handed_off.clear()
        self._control.order(protocol.HandOff(generation=generation.number, spans=_spans(contributors), newest=newest))
        done = await self._control.until(
            lambda: bool(state.events) or all(rank in generation.handed_off for rank in contributors), _HAND_OFF_TIMEOUT
        )
        if not done or state.events or not all(generation.handed_off[rank].covered for rank in contributors):
            return None
        return newest.rewinds, step, len(contributors)


def _spans(ranks: list[int]) -> list[list[int]]:
    """First and last of those that follow each other."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def _rewinds(state: replica_index.ReplicaState) -> int:
    metadata = state.replicas[0][0].copy.metadata
    return len(metadata.progress.get("left_out", [])) if metadata is not None else 0


async def discard_replicas(control: Control, before: int) -> None:
    """Free hand-offs of earlier generations. With replicas after every step nothing needs to be done: newer ones replace them."""
    if control.state.copy_every is None:
        await asyncio.to_thread(replica_index.discard, control.state.replica_servers(), control.agent.token, before=before)


def failure_noticed(number: int, failure: Failure, generation: Generation) -> FailureNoticed:
    """The record of a failure."""
    step, message = generation.step, failure.reason
    node = failure.node if failure.rank is None else generation.assignment[failure.rank]
    if failure.is_death and not message.startswith("rank"):
        message = f"rank {failure.rank} (node {node}): {message}"
    return FailureNoticed(
        number=number,
        cause=failure.cause,
        message=message,
        rank=failure.rank,
        node=node,
        step=step,
        traceback=failure.traceback,
    )


class Replanner:
    """Plans a running run on other layouts."""

    def __init__(self, run: Run, plan: Plan, machine: Callable[[], Machine]):
        """`machine` is called only when a new layout is planned: GPU drivers take seconds to answer."""
        self._run, self._plan, self._machine = run, plan, machine
        self._size = Size(
            parameters=plan.parameters,
            active=plan.active or plan.parameters,
            flops_per_token=plan.flops_per_token,
            trained=plan.trained,
        )
        self.plan = cache(self._choose)

    def legal(self, layout: Layout) -> bool:
        return self.plan(layout) is not None

    def _choose(self, layout: Layout) -> Plan | None:
        """The plan on a layout, whose ranks are processes; None if the run cannot use it."""
        from phalanx.planning.planner import choose  # imports numpy, which a controller needs only to plan anew

        if layout == self._plan.process_layout:
            return self._plan
        if self._plan.devices_per_process > 1:
            data, odd = divmod((self._plan.layout.data or 1) * layout.ranks, self._plan.processes)
            if odd or not data or layout.data != layout.ranks:
                return None
            layout = replace(self._plan.layout, data=data)
        if self._run.command.program is not None:
            return self._with_whole_nodes(layout)
        if self._run.optimizer.sync_every > 1 and layout.data != self._plan.layout.data:
            return None  # each replica has a state of its own
        share, micro = self._run.batch // layout.replicas, self._run.train.micro_batch
        # The batch stays the same, so a replica's share of it may not be a multiple of the requested micro-batch.
        train = replace(self._run.train, micro_batch=math.gcd(share, micro) if micro and share else micro)
        run = replace(self._run, layout=layout, train=train)
        if run.engine.name == "xla":  # on fewer hosts, perhaps
            run = replace(
                run,
                engine=replace(run.engine, devices_per_process=self._plan.devices_per_process),
                cluster=replace(run.cluster, nodes=1),
            )
        if next(iter(layout_findings(run)), None) is not None:
            return None
        try:
            return choose(run, self._machine(), size=self._size)
        except RunError:
            return None

    def _with_whole_nodes(self, layout: Layout) -> Plan | None:
        """The plan of a program of the user's own on fewer nodes; None if it may not run on so few."""
        cluster, wanted = self._run.cluster.nodes - self._run.resilience.spares, self._plan.ranks
        nodes, left = divmod(layout.ranks * cluster, wanted)
        fewest = self._run.command.min_nodes or cluster
        return replace(self._plan, layout=layout) if not left and nodes >= fewest and layout.data == layout.ranks else None
