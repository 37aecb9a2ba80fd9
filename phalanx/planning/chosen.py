"""What the equations say of a run on this machine: the promise of a layout, and whether another one is clearly better than plain
replicas. `planning/resolve` asks; cores are judged for every number of ranks that they could be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.cpu import cpu_hardware, resident
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.module import module_bytes
from phalanx.planning.placement import Placement, placement
from phalanx.planning.planner import search
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import find, judge
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Promise
from phalanx.spec.run import Run

CLEARLY = 0.95
"""Part of the replicas' step that another layout may take at most to be preferred."""


@dataclass(frozen=True, slots=True)
class Better:
    """A layout that a search prefers."""

    asked: Run
    """As it was given."""
    run: Run
    """The same with the layout, the micro-batch and what is traded for memory filled in."""


def promised(run: Run, machine: Machine, plan: Plan) -> Promise | None:
    """What a plan may promise; None for one's own module or schedule, of which the equations know nothing, and for what only a proof
    lays out, such as one replica that others would meet now and then."""
    option = judged(_with_micro_batch(run, plan), machine, plan) if run.layout.schedule_file is None else None
    return None if option is None else promise_of(option)


def rank_bytes(run: Run, machine: Machine, plan: Plan) -> float:
    """Bytes of the fullest rank, coarsely where the equations do not know it."""
    option = judged(_with_micro_batch(run, plan), machine, plan)
    return module_bytes(run, plan) if option is None else option.bytes


def judged(run: Run, machine: Machine, plan: Plan) -> Candidate | None:
    """What the plan's layout comes to on this machine, with the micro-batch and what is traded for memory as the run has them, or the
    quickest that fit; on cores with all that a process keeps. A schedule of one's own counts as one that keeps most. None where the
    equations know nothing."""
    if run.model.module is not None:
        return None
    layout = plan.layout
    if layout.schedule_file is not None:
        layout = replace(layout, schedule_file=None, schedule="gpipe", stages=None)
    devices = devices_of(run, machine, plan.ranks, plan.threads, plan.device)
    try:
        option = judge(replace(run, layout=layout), devices)
    except RunError:
        return None
    if plan.device == "cpu":
        option = replace(option, memory=resident(run, plan, option.memory, machine))
    return option


def plan_for(run: Run, cluster: Hardware) -> Plan:
    """The winner on machines that are not this one. RunError where nothing fits there."""
    best, model = search(run, cluster).best, run.model
    peak = cluster.gpu.peak(best.compute)
    return Plan(
        layout=best.layout,
        device="cpu" if cluster.device == "cpu" else "cuda",
        threads=1,
        micro_batch=best.micro_batch,
        accumulation=best.accumulation,
        compute=best.compute,
        parameters=model.parameters(),
        flops_per_token=model.flops_per_token(run.train.sequence_length),
        peak_flops=None if peak is None else peak * best.layout.ranks,
        active=model.active_parameters(),
        machine=cluster.name,
        promise=promise_of(best),
        placement=_plain(placement(best.layout, cluster)),
    )


def placed(run: Run, machine: Machine, plan: Plan) -> dict[str, Any]:
    """Which ranks share a node, a rail, a pipeline, in what JSON can write."""
    return _plain(placement(plan.layout, devices_of(run, machine, plan.ranks, plan.threads, plan.device)))


def _plain(where: Placement) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(json.dumps(where.table()))
    return table


def promise_of(option: Candidate) -> Promise:
    return Promise(
        seconds=option.seconds,
        low=option.low,
        high=option.high,
        tokens_per_second=option.tokens_per_second,
        memory=dict(option.memory),
        total_memory=option.bytes,
        mfu=option.mfu,
        days=option.days,
        price=option.price,
        split=dict(option.split),
    )


def better(run: Run, machine: Machine, started: int | None, usual: Plan | None) -> Better | None:
    """The winner of a search where it is clearly quicker than `usual`, or where there is no usual plan at all.

    Replicas compute the same bits however many there are: on cores nothing else takes their place unless they do not fit, and only
    their number is asked for.
    """
    device = run.cluster.device or ("cuda" if machine.gpus else "cpu")
    if device == "cpu" and usual is not None:
        return _fewer(run, machine, started, usual)
    best: tuple[float, Candidate] | None = None
    for ranks in _ranks(run, machine, started, usual):
        found = find(run, devices_of(run, machine, ranks, _threads(run, machine, ranks), device), most=1, gpus=ranks)
        if found is None:
            continue  # nothing of this size fits, or divides what has to be divided
        # With another number of ranks, what is to take the place of the usual has to be quicker even on a bad day.
        seconds = found.best.seconds if usual is None or ranks == usual.ranks else found.best.high
        if best is None or seconds < best[0]:
            best = (seconds, found.best)
    if best is None:
        return None
    seconds, option = best
    same = usual is not None and (usual.layout, usual.micro_batch) == (option.layout, option.micro_batch)
    if usual is not None and (same or usual.promise is None or seconds >= CLEARLY * usual.promise.seconds):
        return None
    return _taken(run, best[1])


def _fewer(run: Run, machine: Machine, started: int | None, usual: Plan) -> Better | None:
    """Fewer replicas with more threads each, where nobody has said how many."""
    if started is not None or run.cluster.cpu_ranks is not None or usual.promise is None:
        return None
    best: Better | None = None
    least = usual.promise.seconds
    ranks = usual.ranks
    while ranks > 1:
        ranks = max(number for number in range(1, ranks // 2 + 1) if run.batch % number == 0)
        option = judge(replace(run, layout=Layout(data=ranks)), cpu_hardware(machine, ranks, _threads(run, machine, ranks)))
        if option.fits and option.high < min(least, CLEARLY * usual.promise.seconds):
            best, least = _taken(run, option), option.high
    return best


def _taken(run: Run, option: Candidate) -> Better:
    memory = option.with_savings(run.memory)
    train = replace(run.train, micro_batch=option.micro_batch)
    return Better(run, replace(run, layout=option.layout, memory=memory, train=train))


def _ranks(run: Run, machine: Machine, started: int | None, usual: Plan | None) -> list[int]:
    """Numbers of ranks that the machine could be used with, the largest first."""
    if started is not None:
        return [started]
    if (run.cluster.device or "cuda") == "cuda" and machine.gpus:
        return sorted({len(machine.gpus), usual.ranks if usual else len(machine.gpus)}, reverse=True)
    if run.cluster.cpu_ranks is not None:
        return [run.cluster.cpu_ranks]
    return [machine.cores >> half for half in range(machine.cores.bit_length())]


def _threads(run: Run, machine: Machine, ranks: int) -> int:
    return run.cluster.threads or max(1, machine.cores // ranks)


def devices_of(run: Run, machine: Machine, ranks: int, threads: int, device: str) -> Hardware:
    """So many of this machine's devices, or of the cluster that the run file names."""
    if device == "cpu":
        return cpu_hardware(machine, ranks, threads)
    found = hardware(run, machine)
    return replace(found, gpus=ranks, node=min(found.node, ranks), island=min(found.island, ranks))


def _with_micro_batch(run: Run, plan: Plan) -> Run:
    return replace(run, train=replace(run.train, micro_batch=plan.micro_batch))
