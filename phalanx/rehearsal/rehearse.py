"""`rehearse` runs the real program of one rank of a job, on tensors without memory and without the other ranks: what memory it needs,
what it sends and what it computes. The command line and the API call it with a `rehearsal_job`. `launch/model_check` starts this file as a
command for a run that is about to be trained, and gets the memory of one rank of each kind (`answer_question`):

    python -m phalanx.rehearsal.rehearse < QUESTION.json

On GPUs it runs only as many micro-batches as show everything that the whole step does. What an action of a pipeline does depends only
on its kind and stage. How much memory exists depends on how many micro-batches of each stage are in progress, which receives have
started, which stages have gradients, and whose parameters are still gathered. A shorter step that passes through every such situation
of the whole step, and does the same in it, has the same peak.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch._subclasses import fake_tensor

from phalanx.launch.model_check import DRIVER
from phalanx.parallel.pipeline.executor import rank_actions
from phalanx.planning.machine_fit import CPU_SHARE, promise_of
from phalanx.planning.machines.hardware import planned
from phalanx.planning.planner import plan_run, search
from phalanx.planning.request import PlanRequest, with_engine
from phalanx.planning.search.search import judge
from phalanx.rehearsal import ledger as memory
from phalanx.rehearsal.extrapolate import SampledLayers, profile
from phalanx.rehearsal.fake_gpu import RehearsalDevice, card
from phalanx.rehearsal.ledger import COMPONENTS, Ledger, ProgramLocation
from phalanx.rehearsal.op_tracker import OpTracker
from phalanx.rehearsal.rehearsed_rank import ASSUMED, Program, rehearsed_program
from phalanx.rehearsal.result import Rehearsal
from phalanx.schedules.actions import Schedule
from phalanx.schedules.makers import resized, schedule_for
from phalanx.schedules.stage_split import cut, flop_costs
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.load import loads
from phalanx.spec.plan import Machine, Plan, Promise, Size
from phalanx.spec.run import Run

CONTEXT = 1 << 30
"""Bytes of CUDA itself, its libraries and their kernels, which load at their first use: 695 to 895 MiB measured on an H200, CUDA 13."""
_LINKS = 256 << 20
"""Bytes of NCCL's buffers for each group of ranks: an estimate from its documentation (channels × buffers)."""
_PROCESS = 350 << 20
"""Bytes of a CPU rank without any tensor."""
_CLOSE = 0.99
"""Fraction of the device's memory above which a note says that the run may not fit."""
_POINTS = 2000
"""Points of a timeline."""
_LOOPED = 4
"""Micro-batches without a pipeline: the first, one between, the last but one and the last."""

_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
"""What torch raises where fake tensors are asked for values."""


class NeedsValues(RunError):
    """The program reads the values of a tensor, which rehearsals do not have. It may train all the same."""


Situation = tuple[str, int, tuple[tuple[int, int, int, bool, bool], ...], int]
"""Kind and stage of an action; for each stage its number, the micro-batches in progress, those with a deferred weight backward, whether
it has gradients, and whether its last action was not a forward, after which parameters stay gathered; receives that have started."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is rehearsed and where: a resolved run, its plan, and the device."""

    run: Run
    plan: Plan
    device: RehearsalDevice
    name: str = ""
    """Of the device, in the catalogue or as the driver has it; empty: a CPU."""


def rehearsal_job(run: Run, machine: Machine, size: Size | None = None, memory: int | None = None) -> Job:
    """For the cluster that the run names, or for this machine. `memory`: bytes of a device, instead of its own.

    A layout and micro-batch of the run file are used as they are, even if the planner's estimate says that they do not fit: a rehearsal
    finds out. With `engine.name = "xla"` the job is compiled (`rehearsal/compiled_rehearsal`), otherwise a rank of it is run.
    """
    named = planned(run)
    run = with_engine(run)
    request = PlanRequest(run, None if named else machine, module_size=size)
    device = request.device
    gpus = request.cluster.gpus if named else len(machine.gpus) if device == "cuda" else 0
    if run.train.micro_batch is not None and (run.layout.data is not None or gpus):
        plan = _given(request, gpus)
        if device == "cuda" and run.model.is_builtin and run.engine.name == "torch":
            run = _as_planned(run, plan, request)
    else:
        chosen = plan_run(run, request.machine, size=size)
        run, plan = chosen.run, chosen.plan
    if run.engine.name == "xla":
        plan = replace(plan, promise=_expected(request, run, plan))
    if named:
        cluster = request.cluster
        has, node, island, name = int(cluster.gpu.memory), cluster.node, cluster.island, cluster.gpu.key
    elif device == "cuda":
        has = min((gpu.memory for gpu in machine.gpus), default=0) - DRIVER
        node = island = max(gpus, 1)
        name = machine.gpus[0].name if machine.gpus else ""
    else:
        has, node, island, name = machine.memory, 1 << 30, 1 << 30, ""
    if device == "cpu":
        has = int(CPU_SHARE * has / plan.ranks)
    gpu = card(name) if device == "cuda" and run.engine.name == "torch" else None
    there = RehearsalDevice(card=gpu, capacity=has if memory is None else memory, node=node, island=island)
    return Job(run, plan, there, name if device == "cuda" else "")


def _given(request: PlanRequest, gpus: int) -> Plan:
    """The layout of the run file; `layout.data`, if open, uses all devices."""
    run, layout = request.run, request.run.layout
    assert run.train.micro_batch is not None
    if layout.data is None:
        layout = replace(layout, data=max(1, gpus // replace(layout, data=1).ranks))
        refuse([finding.sentence for finding in layout_findings(replace(run, layout=layout))])
    refuse(request.batch_problems(layout))
    plan = request.plan(layout, run.train.micro_batch)
    if order := schedule_for(layout, plan.accumulation):
        refuse(order.problems())
    return plan


def _expected(request: PlanRequest, run: Run, plan: Plan) -> Promise | None:
    """What the equations say of the plan, whether it fits or not; None where they do not know the model."""
    fixed = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    try:
        return promise_of(judge(fixed, request.devices(plan.ranks)))
    except RunError:
        return None


def _as_planned(run: Run, plan: Plan, request: PlanRequest) -> Run:
    """The run with open settings of [memory] as the planner chooses them; unchanged if nothing fits, so that the rehearsal shows why."""
    memory = run.memory
    if "auto" not in (memory.recompute, memory.offload) and None not in (memory.compile, memory.loss_chunk):
        return run
    try:
        best = search(replace(run, layout=plan.layout), request.cluster, most=1).best
    except RunError:
        return run
    return replace(run, memory=best.with_savings(run.memory))


def distinct_ranks(run: Run, plan: Plan) -> dict[int, int]:
    """One rank of each kind, and the number of ranks of that kind: the first pipeline rank, the last, and one for each distribution of
    blocks between them: the earliest, which has the most micro-batches in progress."""
    layout = plan.layout
    each = layout.ranks // layout.pipeline
    order = schedule_for(layout, plan.accumulation)
    if order is None:
        return {0: layout.ranks}
    if not run.model.is_builtin:  # which blocks a stage has is known when the module is built
        return {rank * each: each for rank in range(layout.pipeline)}
    costs = flop_costs(run.model, run.train.sequence_length)
    ranges = cut(costs.blocks, costs.first, costs.last, order.stages)
    kinds: dict[Any, list[int]] = {}
    for rank in range(layout.pipeline):
        stages = order.stages_of(rank)
        ends = rank == 0 or rank == layout.pipeline - 1
        blocks = tuple(costs.blocks[slice(*ranges[stage])] for stage in stages)
        kinds.setdefault((rank if ends else -1, blocks), []).append(rank)
    return {ranks[0] * each: len(ranks) * each for ranks in kinds.values()}


def rehearse(run: Run, plan: Plan, rank: int, device: RehearsalDevice, layers: SampledLayers | None = None) -> Rehearsal:
    """Runs one step of this rank's program. Raises RunError for what is refused before a job starts. `layers`: the only ones to run, and to
    make a profile of.

    What would fail on the cluster is in the result. Cannot run in a process that is itself a rank of a job.
    """
    _refuse(plan, rank)
    began = time.process_time()
    with warnings.catch_warnings(action="ignore"):  # torch warns of its own fake tensors
        try:
            sampled = None if layers is None else layers.rehearsed
            with rehearsed_program(resolved(run, plan), plan, rank, device, sampled) as (program, tracker):
                rehearsal = _run(program, tracker, device, layers)
        except _NEEDS_VALUES as error:
            raise NeedsValues(
                f"The program cannot be rehearsed: it reads the values of a tensor ({_short(error)}), and rehearsals have none; "
                "a module of your own must not depend on values on the host."
            ) from error
    return replace(rehearsal, seconds=time.process_time() - began, notes=_notes(run, plan, device, rehearsal.in_use))


def resolved(run: Run, plan: Plan) -> Run:
    """The run with "auto" settings off, and uncompiled. Compiled blocks store what selective recomputation stores."""
    memory = run.memory
    recompute = "none" if memory.recompute == "auto" else memory.recompute
    if recompute == "none" and _stores_as_compiled(run, plan):
        recompute = "selective"
    offload = "none" if memory.offload == "auto" else memory.offload
    return replace(run, memory=replace(memory, recompute=recompute, offload=offload, compile=False, cuda_graphs=False))


def _stores_as_compiled(run: Run, plan: Plan) -> bool:
    """Whether selective recomputation stores what the run's compiled blocks store. Those of tensor ranks also store gathered inputs, and of
    blocks with experts only attention is compiled."""
    return bool(run.memory.compile) and plan.layout.tensor == 1 and run.model.moe is None


def _refuse(plan: Plan, rank: int) -> None:
    layout = plan.layout
    if not 0 <= rank < layout.ranks:
        raise RunError([f"--rank {rank} is none of the layout's {layout.ranks} ranks: take one from 0 to {layout.ranks - 1}."])
    if layout.stage_split == "measured" and layout.pipeline > 1:
        raise RunError(
            'layout.stage_split = "measured" cuts stages by what they take on the devices of a job, so it cannot be rehearsed: take "counted".'
        )


def _run(program: Program, tracker: OpTracker, device: RehearsalDevice, layers: SampledLayers | None) -> Rehearsal:
    """Runs a step and reads its results."""
    order, at = program.built.schedule, program.mesh.coordinate("pipeline")
    ledger = tracker.device
    built, sent_before = len(ledger.events), len(tracker.messages)
    micro_batches, error = enough(order, program.plan, at), None
    try:
        program.step(micro_batches, program.plan.accumulation)
    except _NEEDS_VALUES:
        raise
    except Exception as failure:  # anything that a rank would raise
        where = tracker.where
        error = f"{where.phase} of {where.module or 'the model'} {where.action}: {type(failure).__name__}: {_short(failure)}"
    counts = repetitions(order, program.plan, at, micro_batches)
    first = memory.first_step(ledger, built)
    top = memory.peak(ledger, first)
    fixed = _fixed(program, device)
    reserved = _reserved(ledger, first, top, None if device.capacity is None else device.capacity - sum(fixed.values()), device)
    live = memory.live_at_peak(ledger, first, top)
    components = _sums((ledger.component(number), ledger.change(number)) for number in live)
    state = program.built.placement()
    elements = {owned.name: owned.value.numel() for owned in program.built.sharded.owned}
    at_peak = ledger.events[top.at - 1] if ledger.events else 0
    return Rehearsal(
        rank=program.mesh.rank,
        ranks=program.mesh.ranks,
        device=program.plan.device,
        applied=state.applied,
        peak=max(reserved.allocated, top.bytes),
        reserved=reserved.reserved,
        fixed=fixed,
        capacity=device.capacity,
        components={name: components[name] for name in COMPONENTS if name in components},
        modules=_sums((_module(ledger.origins[number]), ledger.change(number)) for number in live),
        at=ledger.origins[at_peak] if at_peak > 0 else None,
        host=tracker.host.peak if device.card else 0,
        state={kind: getattr(state, kind) for kind in ("parameters", "gradients", "optimizer", "files")},
        messages=tuple(replace(message, times=counts.get(message.action, 1)) for message in tracker.messages[sent_before:]),
        flops=_sums((_module(where), count * counts.get(where.action, 1)) for where, count in tracker.flops.items()),
        repeated_flops=sum(count * counts.get(action, 1) for action, count in tracker.repeated.items()),
        micro_batches=program.plan.accumulation,
        taken=micro_batches,
        no_room=None if reserved.failed is None else ledger.origins[reserved.failed],
        error=error,
        assumed=ASSUMED,
        timeline=_timeline(ledger, built),
        elements=sum(elements.values()),
        profile=None if layers is None else profile(layers, ledger, built, tracker.flops, elements),
    )


def _reserved(
    ledger: Ledger, first: memory.FirstStep, top: memory.Peak, limit: int | None, device: RehearsalDevice
) -> memory.Reserved:
    if device.card is not None:
        reserved = memory.reserve(ledger, first, limit)
        if reserved.failed is None:
            return reserved
        return replace(memory.reserve(ledger, first, None), failed=reserved.failed)  # what a larger device would need
    failed = None
    if limit is not None and top.bytes > limit:
        totals = zip(ledger.events, accumulate(map(ledger.change, ledger.events)), strict=True)
        # Where only the second step is above the limit, its last event stands for it.
        failed = next((event for event, total in totals if event > 0 and total > limit), abs(ledger.events[-1]))
    return memory.Reserved(top.bytes, top.bytes, failed)


def _fixed(program: Program, device: RehearsalDevice) -> dict[str, int]:
    if device.card is None:
        return {"process": _PROCESS}
    groups = {group.ranks for group in program.mesh._groups.values() if group.size > 1}
    return {"context": CONTEXT} | ({"links": _LINKS * len(groups)} if groups else {})


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of each name, largest first."""
    sums: Counter[str] = Counter()
    for name, number in pairs:
        sums[name] += number
    return dict(sums.most_common())


def _module(where: ProgramLocation) -> str:
    return where.module or f"({where.phase})"


def _timeline(ledger: Ledger, built: int) -> tuple[tuple[float, int], ...]:
    """The largest memory between two points of the step; `built`: number of events before it."""
    totals = list(islice(accumulate(map(ledger.change, ledger.events)), built, None))
    every = max(1, len(totals) // _POINTS)
    return tuple(
        (index / len(totals), max(totals[max(0, index - every) : index + 1])) for index in range(0, len(totals), every)
    )


def _notes(run: Run, plan: Plan, device: RehearsalDevice, in_use: int) -> tuple[str, ...]:
    """Where the rehearsal differs from the run."""
    notes = []
    if device.card and device.capacity is not None and _CLOSE * device.capacity < in_use <= device.capacity:
        notes.append("The peak is within 1 % of the device's memory: fragmentation decides whether the run fits.")
    if run.memory.activations == "cpu":
        notes.append(
            "Activations that return from the host are freed when the GPU has used them, which a rehearsal cannot time: the allocator may "
            "reserve up to twice as much as shown."
        )
    if run.memory.compile and _stores_as_compiled(run, plan):
        notes.append("Blocks are rehearsed uncompiled, with what compiled blocks store for the backward.")
    elif run.memory.compile:
        notes.append("Blocks are rehearsed uncompiled. Compiled blocks take less memory than shown.")
    return tuple(notes)


def _short(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def enough(order: Schedule | None, plan: Plan, rank: int) -> int:
    """The number of micro-batches that show everything that those of the plan do; `rank`: of the pipeline."""
    count = plan.accumulation
    if plan.device == "cpu":
        return count  # there gradients are summed as a tree over all micro-batches
    if order is None:
        return min(count, _LOOPED)
    needed = situations(order, rank)
    for fewer in range(1, count):
        try:
            shorter = resized(order, fewer)
        except (RunError, AssertionError):
            continue
        if not shorter.problems() and needed <= situations(shorter, rank):
            return fewer
    return count


def situations(order: Schedule, rank: int) -> set[Situation]:
    """All situations of a rank's program."""
    return {situation for _, situation in _actions(order, rank)}


def _actions(order: Schedule, rank: int) -> Iterator[tuple[str, Situation]]:
    """A rank's actions by name, each with the situation in which it begins."""
    in_progress: Counter[int] = Counter()
    deferred: Counter[int] = Counter()
    with_gradients: set[int] = set()
    last: dict[int, str] = {}
    stages, receives = order.stages_of(rank), set[object]()
    for step in rank_actions(order, rank):
        receives |= {message for _, message in step.receives}
        state = tuple(
            (stage, in_progress[stage], deferred[stage], stage in with_gradients, last.get(stage, "") != "F")
            for stage in stages
        )
        yield f"{step.stage}{step.kind}{step.micro_batch}", (step.kind, step.stage, state, len(receives))
        receives.discard(step.consumes)
        last[step.stage] = step.kind
        if step.kind == "F":
            in_progress[step.stage] += 1
        elif step.kind == "W":
            deferred[step.stage] -= 1
            with_gradients.add(step.stage)
        else:
            in_progress[step.stage] -= 1
            deferred[step.stage] += step.kind == "I"
            with_gradients.update([step.stage] if step.kind == "B" else [])


def repetitions(order: Schedule | None, plan: Plan, rank: int, micro_batches: int) -> dict[str, int]:
    """How many actions of the whole step each action of the shorter step represents, by name; actions without an entry represent
    themselves."""
    count = plan.accumulation
    if micro_batches == count:
        return {}
    if order is None:
        return {"micro-batch 2": count - micro_batches + 1}
    shorter = list(_actions(resized(order, micro_batches), rank))
    counts = dict.fromkeys((name for name, _ in shorter), 0)
    representative = {situation: name for name, situation in shorter}
    for _, situation in _actions(order, rank):
        counts[representative[situation]] += 1
    return counts


def main() -> None:
    torch.set_num_threads(1)
    try:
        answer = answer_question(json.loads(sys.stdin.read()))
    except RunError as error:
        answer = {"problems": list(error.problems)}
    print("\n" + json.dumps(answer), flush=True)


def answer_question(question: dict[str, Any]) -> dict[str, Any]:
    run, plan = loads(question["run"]), Plan.from_json(question["plan"])
    gpu = plan.device == "cuda"
    device = RehearsalDevice(card=card(question["gpu"]) if gpu else None, capacity=question["capacity"] if gpu else None)
    ranks = []
    for rank, count in distinct_ranks(run, plan).items():
        rehearsal = rehearse(run, plan, rank, device)
        at = rehearsal.no_room or rehearsal.at
        outcome = {"fits": rehearsal.fits, "in_use": rehearsal.in_use, "at": str(at or ""), "error": rehearsal.error}
        ranks.append({"rank": rank, "count": count} | outcome)
    return {"kinds": ranks}


if __name__ == "__main__":
    main()
