"""Another layout of a running run: whether it can be run here, its Plan, and whether losing a node would lose state. Called by the
controller; never loads torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.checkpointing.replicas import shm_slots
from phalanx.control.replica_process import BYTES_PER_PARAMETER
from phalanx.planning.resolve import choose
from phalanx.recovery.places import elsewhere
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.machine import Machine
from phalanx.spec.plan import Plan, Size
from phalanx.spec.run import Run

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
    if run.resilience.restarts == 0 or (alike and elsewhere(plan.layout, assignment)):
        return None
    return 1 if _plenty(plan, len(set(assignment))) else None


def _plenty(plan: Plan, nodes: int) -> bool:
    """Whether copies that nobody asked for leave most of the memory to others. Each node has its own ranks' and its neighbour's."""
    root = shm_slots.default_root()
    room = shm_slots.free_bytes(root if root.is_dir() else root.parent)
    return 2 * plan.parameters * BYTES_PER_PARAMETER * min(nodes, 2) / nodes <= _MODEST * room
