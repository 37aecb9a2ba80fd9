"""What is rehearsed and where: a resolved run, its plan, and the device. Used by `phalanx rehearse` and the API. As a command it rehearses
a run that is about to be trained, one rank of each kind; `launch/model_check` starts it:

    python -m phalanx.rehearsal.job < QUESTION.json

The question: the run as TOML, its plan, and the memory of one device for one rank. The last line of output is a JSON object: for each
kind of rank its number, how many there are, and the memory it needs; or a list of problems.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.launch.model_check import DRIVER
from phalanx.planning.machine_fit import CPU_SHARE
from phalanx.planning.machines.hardware import planned
from phalanx.planning.planner import plan_run, search
from phalanx.planning.request import PlanRequest
from phalanx.rehearsal.fake_gpu import RehearsalDevice, card
from phalanx.rehearsal.rehearse import rehearse
from phalanx.schedules.makers import schedule_for
from phalanx.schedules.stage_split import cut, flop_costs
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run


@dataclass(frozen=True, slots=True)
class Job:
    run: Run
    plan: Plan
    device: RehearsalDevice


def rehearsal_job(run: Run, machine: Machine, size: Size | None = None, memory: int | None = None) -> Job:
    """For the cluster that the run names, or for this machine. `memory`: bytes of a device, instead of its own.

    A layout and micro-batch of the run file are used as they are, even if the planner's estimate says that they do not fit: a rehearsal
    finds out.
    """
    named = planned(run)
    request = PlanRequest(run, None if named else machine, module_size=size)
    if named and request.cluster.device == "tpu":
        raise RunError([f"{request.cluster.name} has TPUs, for which there is no program to rehearse: name a cluster of GPUs."])
    device = request.device
    gpus = request.cluster.gpus if named else len(machine.gpus) if device == "cuda" else 0
    if run.train.micro_batch is not None and (run.layout.data is not None or gpus):
        plan = _given(request, gpus)
        if device == "cuda" and run.model.module is None:
            run = _as_planned(run, plan, request)
    else:
        chosen = plan_run(run, request.machine, size=size)
        run, plan = chosen.run, chosen.plan
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
    gpu = card(name) if device == "cuda" else None
    return Job(run, plan, RehearsalDevice(card=gpu, capacity=has if memory is None else memory, node=node, island=island))


def _given(request: PlanRequest, gpus: int) -> Plan:
    """The layout of the run file; `layout.data`, if open, uses all devices."""
    run, layout = request.run, request.run.layout
    assert run.train.micro_batch is not None
    if layout.data is None:
        layout = replace(layout, data=max(1, gpus // replace(layout, data=1).ranks))
        if problems := [finding.sentence for finding in layout_findings(replace(run, layout=layout))]:
            raise RunError(problems)
    if problems := request.batch_problems(layout):
        raise RunError(problems)
    plan = request.plan(layout, run.train.micro_batch)
    if (order := schedule_for(layout, plan.accumulation)) and (problems := order.problems()):
        raise RunError(problems)
    return plan


def _as_planned(run: Run, plan: Plan, request: PlanRequest) -> Run:
    """The run with "auto" settings of [memory] as the planner chooses them; unchanged if nothing fits, so that the rehearsal shows why."""
    if "auto" not in (run.memory.recompute, run.memory.offload):
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
    costs = flop_costs(run.model, run.train.sequence_length)
    ranges = cut(costs.blocks, costs.first, costs.last, order.stages)
    kinds: dict[Any, list[int]] = {}
    for rank in range(layout.pipeline):
        stages = order.stages_of(rank)
        ends = rank == 0 or rank == layout.pipeline - 1
        blocks = tuple(costs.blocks[slice(*ranges[stage])] for stage in stages)
        kinds.setdefault((rank if ends else -1, blocks), []).append(rank)
    return {ranks[0] * each: len(ranks) * each for ranks in kinds.values()}


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
