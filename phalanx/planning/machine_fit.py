"""Fits a given layout to the memory of this machine: the number of replicas, the micro-batch, and what is recomputed or
offloaded. On GPUs the micro-batch is the cost model's; on CPUs, and for a custom module, it starts from a rule of thumb and
shrinks until it fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from phalanx.planning.cost.job_table import TOKEN_BYTES, is_counted
from phalanx.planning.machines.cpu import resident
from phalanx.planning.request import PlanRequest, devices_of, gib
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import SAFE, find, judge
from phalanx.planning.search.space import largest_divisor
from phalanx.spec.adapted_layers import STORED_BYTES
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Promise
from phalanx.spec.run import Memory, Run

CLEARLY = 0.95
"""A candidate is clearly better if its step takes at most this fraction of the other's."""
CPU_SHARE = 0.9
"""Fraction of main memory that all CPU ranks together may fill."""
_CPU_TOKENS = 4096
"""Tokens of a micro-batch on CPUs: more do not make better use of the caches, and memory grows."""
_MODULE_TOKENS = 16384
"""Tokens of a micro-batch of a custom module on a GPU: most gain nothing from more."""
_MODULE_SHARE = 0.8
"""Fraction of a GPU that an estimate from the number of parameters alone may fill."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with nothing left open that training would have to decide."""

    run: Run
    """The run as given, with its recomputation and offload filled in. Its layout may still be open: the plan has it."""
    plan: Plan
    need: float = 0.0
    """Bytes of the fullest rank."""
    has_margin: bool = True
    """The plan leaves the part of memory free that plans leave free."""


def judge_plan(run: Run, machine: Machine, plan: Plan, *, any_micro_batch: bool = False) -> Candidate | None:
    """The cost model's prediction for a plan on this machine; what the run leaves open of recomputation and offload, and with
    `any_micro_batch` of the micro-batch, is the fastest that fits. On CPUs the memory is that of the process. A custom schedule counts as
    GPipe, which holds most activations. None where the cost model does not know the model or the layout."""
    if not run.model.is_builtin and not is_counted(run.model):
        return None
    layout, train = plan.layout, run.train
    if layout.schedule_file is not None:
        layout = replace(layout, schedule_file=None, schedule="gpipe", stages=None)
    if not any_micro_batch:
        train = replace(train, micro_batch=plan.micro_batch)
    devices = devices_of(run, machine, plan.ranks, plan.threads, plan.device)
    try:
        candidate = judge(replace(run, layout=layout, train=train), devices)
    except RunError:
        return None
    return as_process(candidate, run, machine, plan)


def as_process(candidate: Candidate, run: Run, machine: Machine, plan: Plan) -> Candidate:
    """A candidate on CPUs with the memory of a whole process; on GPUs the candidate itself."""
    if plan.device != "cpu":
        return candidate
    return replace(candidate, memory=resident(run, replace(plan, layout=candidate.layout), candidate.memory, machine))


def need_and_promise(run: Run, machine: Machine, plan: Plan) -> tuple[float, Promise | None]:
    """Bytes of the fullest rank, a coarse estimate where the cost model does not know the model; and what the plan may promise: None for a
    custom module or schedule, and for layouts that only a proof uses, such as one replica of a local-SGD run."""
    candidate = judge_plan(run, machine, plan)
    if candidate is None:
        return module_bytes(run, plan), None
    return candidate.bytes, promise_of(candidate) if run.layout.schedule_file is None else None


def promise_of(candidate: Candidate) -> Promise:
    predicted = {item.name: getattr(candidate, item.name) for item in fields(Promise) if item.name != "total_memory"}
    return Promise(**predicted, total_memory=candidate.bytes)


def module_bytes(run: Run, plan: Plan) -> float:
    """Bytes of one rank of a custom module, estimated from its number of parameters alone."""
    layout = plan.layout
    parameters = plan.parameters / (layout.tensor * layout.pipeline)
    offloaded = run.memory.offloads and not (plan.device == "cpu" and run.memory.offload == "cpu")
    each, states = _parameter_bytes(layout, half=plan.compute != "fp32", offloaded=offloaded), 0.0
    if plan.trained is not None:  # LoRA: the module itself has no gradients
        value = 4 if plan.compute == "fp32" else 2
        tables = min(parameters, 2 * run.model.rows * run.model.dim / layout.tensor)
        stored = value if run.lora.base is None else STORED_BYTES[run.lora.base]
        states = ((parameters - tables) * stored + tables * value) / (layout.shard if layout.zero == 3 else 1)
        parameters = plan.trained / layout.pipeline
    states += parameters * each
    kept = {"selective": 0.5, "full": 0.25}.get(run.memory.recompute, 1.0) / (layout.context * layout.tensor)
    token = TOKEN_BYTES * math.sqrt(plan.parameters) * (2 if plan.compute == "fp32" else 1) * kept
    return states + token * plan.micro_batch * run.train.sequence_length


def _parameter_bytes(layout: Layout, *, half: bool, offloaded: bool) -> float:
    """Bytes per parameter of value, gradient and Adam's states under ZeRO. `half`: the run computes in 16 bits, where ZeRO-1 and 2
    keep a whole copy in two bytes, with two for the gradient, and share the fp32 master weights."""
    states, shard = 0 if offloaded else 8, layout.shard
    if shard == 1:
        return 8 + states
    if layout.zero == 3:
        return (8 + states) / shard
    value = 2 if half else 4
    master = 4 if half else 0  # when offloaded, the copy that ranks gather from still lies on the device
    return value + value / (shard if layout.zero == 2 else 1) + (master + states) / shard


def replicas(request: PlanRequest) -> int:
    """The given number of replicas, or the most that the machine has room for and that divides the batch."""
    run, layout, machine = request.run, request.run.layout, request.this_machine
    if layout.data is not None:
        return layout.data
    others = replace(layout, data=1).ranks  # ranks of one replica
    if request.started is not None:
        return max(1, request.started // others)
    if request.device == "cpu" and run.cluster.cpu_ranks is not None:
        return max(1, run.cluster.cpu_ranks // others)
    share = run.batch // layout.shard
    if request.device == "cuda":
        return largest_divisor(share, len(machine.gpus) // others)
    plain = replace(run, memory=_without_auto(run, request.device))
    count = largest_divisor(share, machine.cores // others)
    while count > 1:  # until they fit into memory with one sequence at a time
        need, _ = need_and_promise(plain, machine, request.plan(replace(layout, data=count), 1))
        room = int(CPU_SHARE * machine.memory // (need * others))
        if room >= count:
            break
        count = largest_divisor(share, min(room, count - 1))
    return count


def fit(request: PlanRequest, layout: Layout, *, save_memory: bool) -> PlannedRun:
    """The micro-batch, recomputation and offload of a layout, as far as the run leaves them open. `save_memory`: blocks are recomputed
    where nothing else fits or it is clearly faster; where that is not enough, optimizer states leave the device."""
    known = request.run.model.is_builtin and request.run.layout.schedule_file is None
    if request.device == "cuda" and known and (planned := _fit_by_cost(request, layout, save_memory)) is not None:
        return planned
    tried: PlannedRun | None = None
    for memory in _savings(request, save_memory):
        for micro_batch in _micro_batches(request, layout):
            run, plan = replace(request.run, memory=memory), request.plan(layout, micro_batch)
            need, promise = need_and_promise(run, request.this_machine, plan)
            tried = PlannedRun(run, replace(plan, promise=promise), need, need <= _room(request, layout))
            if tried.has_margin:
                return tried
    assert tried is not None, "one sequence divides every batch"
    return tried


def _fit_by_cost(request: PlanRequest, layout: Layout, save_memory: bool) -> PlannedRun | None:
    """The fastest that fits by the cost model; None where it does not know the layout."""
    memory, room, plan = request.run.memory, _room(request, layout), request.plan(layout, 1)
    plain = _without_auto(request.run, request.device)
    recomputing = replace(memory, offload=plain.offload)
    best: Candidate | None = None
    for savings in (plain, recomputing, memory) if save_memory else (plain,):
        if best is not None and best.bytes <= room and savings is memory:
            break  # optimizer states leave the device only if they must
        candidate = judge_plan(replace(request.run, memory=savings), request.this_machine, plan, any_micro_batch=True)
        if candidate is None:
            return None
        better = candidate.bytes <= room and best is not None and candidate.seconds < CLEARLY * best.seconds
        better = better and request.run.engine.name == "torch"  # to whose steps the times of GPUs were fitted
        if best is None or best.bytes > room or better:
            best = candidate
    assert best is not None
    plan = replace(request.plan(layout, best.micro_batch), promise=promise_of(best))
    return PlannedRun(replace(request.run, memory=best.with_savings(memory)), plan, best.bytes, best.bytes <= room)


def _savings(request: PlanRequest, save_memory: bool) -> Iterator[Memory]:
    """Ways to save memory, the one that costs least time first."""
    memory = request.run.memory
    last = _without_auto(request.run, request.device)
    yield last
    if not save_memory or not request.run.model.is_builtin:
        return
    if memory.recompute == "auto":
        yield replace(last, recompute="selective")
        last = replace(last, recompute="full")
        yield last
    if memory.offload == "auto" and request.run.optimizer.traits.no_offload is None:
        # On CPUs, "cpu" would put the states where they already are.
        yield replace(last, offload="nvme" if request.device == "cpu" else "cpu")


def _micro_batches(request: PlanRequest, layout: Layout) -> Iterator[int]:
    """The given micro-batch, or those of the rule of thumb, largest first."""
    train, share = request.run.train, request.run.batch // layout.replicas
    if train.micro_batch is not None:
        yield train.micro_batch
        return
    most = (_CPU_TOKENS if request.device == "cpu" else _MODULE_TOKENS) // train.sequence_length
    if layout.pipeline > 1:  # enough micro-batches to keep all stages busy
        most = min(most, share // (2 * layout.pipeline))
    size = largest_divisor(share, most)
    yield size
    while size > 1:
        size = largest_divisor(share, size // 2)
        yield size


def memory_problems(request: PlanRequest, fitted: PlannedRun) -> list[str]:
    """Whether even a micro-batch of one sequence is too large. A GPU counts as a whole here: the rehearsal decides about the rest."""
    layout, machine = fitted.plan.layout, request.this_machine
    if request.device == "cuda" and not machine.gpus:
        return []
    room = float(request.smallest_gpu(layout.ranks).memory) if request.device == "cuda" else _room(request, layout)
    if fitted.need <= room:
        return []
    need, _ = need_and_promise(fitted.run, machine, request.plan(layout, 1))
    if need <= room:
        return []  # the micro-batch was asked for
    smaller = "use a smaller model or a shorter train.sequence_length"
    if _another_layout_fits(request):
        smaller = f"remove [layout], because another layout fits, or {smaller}"
    if request.device == "cuda":
        gpu = request.smallest_gpu(layout.ranks)
        return [
            f"A rank needs about {gib(need)} with a micro-batch of 1 sequence{_savings_label(fitted.run.memory)} but the {gpu.name} "
            f"has {gib(gpu.memory)}; {smaller}."
        ]
    room *= layout.ranks
    fewer = largest_divisor(request.run.batch, int(room // need))
    remedy = f"{request.set_ranks(fewer)}, or {smaller}" if fewer < layout.ranks and fewer * need <= room else smaller
    return [
        f"{layout.ranks} CPU rank{'s need' if layout.ranks > 1 else ' needs'} about {gib(layout.ranks * need)} "
        f"with a micro-batch of 1 sequence{_savings_label(fitted.run.memory)} but {gib(room)} of {gib(machine.memory)} can be used; {remedy}."
    ]


def _savings_label(memory: Memory) -> str:
    """The memory savings that are already used, in words, for the message that the run does not fit."""
    keys = [f'memory.recompute = "{memory.recompute}"'] if memory.recomputes else []
    keys += [f'memory.offload = "{memory.offload}"'] if memory.offloads else []
    return f", {' and '.join(keys)}," if keys else ""


def _room(request: PlanRequest, layout: Layout) -> float:
    """Bytes of a rank that a plan may fill."""
    if request.device == "cpu":
        return CPU_SHARE * request.this_machine.memory / layout.ranks
    share = SAFE if request.run.model.is_builtin else _MODULE_SHARE
    return share * request.smallest_gpu(layout.ranks).memory


def _another_layout_fits(request: PlanRequest) -> bool:
    run = request.run
    if run.layout == Layout() or not run.model.is_builtin or request.device == "cpu":
        return False
    return find(replace(run, layout=Layout()), request.cluster, most=1, gpus=request.started) is not None


def _without_auto(run: Run, device: str) -> Memory:
    """[memory] with "auto" as what costs least time: nothing is saved that was not asked for. Blocks that XLA repeats on GPUs copy what they store into
    stacks for all blocks, which takes longer than to compute what lies between matrix products once more."""
    memory, copies = run.memory, run.engine.name == "xla" and device == "cuda" and run.model.is_builtin
    recompute = memory.recompute
    if recompute == "auto":
        recompute = "selective" if copies else "none"
    return replace(memory, recompute=recompute, offload="none" if memory.offload == "auto" else memory.offload)
