"""What of a given layout is left open, chosen by what there is room for: how many replicas, their micro-batch, and what is traded for
memory; and in a sentence, why there is none. `planning/resolve` calls it.

On GPUs the micro-batch is the planner's: the quickest that fits, and of those as quick as that, the smallest. On cores, and for one's own
module, it is a rule of thumb that shrinks until it fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.planning.chosen import CLEARLY, judged, promise_of, rank_bytes
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.request import PlanRequest, gib, largest_divisor
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import SAFE, find
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Memory, Run

_CPU_TOKENS = 4096
"""Of a micro-batch: beyond it a CPU's caches gain nothing and memory only grows."""
_MODULE_TOKENS = 16384
"""Of a micro-batch of one's own module on a GPU: beyond it most gain nothing."""
CPU_SHARE = 0.9
"""Part of the memory that ranks on cores may fill together."""
_MODULE_SHARE = 0.8
"""Part of a GPU that an estimate from parameters alone may fill."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A layout with nothing left open."""

    run: Run
    """With what is traded for memory filled in."""
    plan: Plan
    need: float
    """Bytes of its fullest rank."""

    @property
    def traded(self) -> str:
        """In words, for whoever is told that even so it does not fit."""
        memory = self.run.memory
        said = [f'memory.recompute = "{memory.recompute}"'] if memory.recomputes else []
        said += [f'memory.offload = "{memory.offload}"'] if memory.offloads else []
        return f", {' and '.join(said)}," if said else ""


def replicas(asked: PlanRequest) -> int:
    """What was asked for, or the most that the machine has room for and the batch divides among."""
    run, layout = asked.run, asked.run.layout
    if layout.data is not None:
        return layout.data
    others = replace(layout, data=1).ranks  # ranks of one replica
    if asked.started is not None:
        return max(1, asked.started // others)
    if asked.device == "cpu" and run.cluster.cpu_ranks is not None:
        return max(1, run.cluster.cpu_ranks // others)
    share = run.batch // layout.shard
    if asked.device == "cuda":
        return largest_divisor(share, len(asked.machine.gpus) // others)
    return _in_memory(asked, share, asked.machine.cores // others)


def _in_memory(asked: PlanRequest, share: int, most: int) -> int:
    """The most replicas on cores that divide the share of a batch and find room, one sequence at a time."""
    count = largest_divisor(share, most)
    while count > 1:
        layout = replace(asked.run.layout, data=count)
        need = rank_bytes(replace(asked.run, memory=_plain(asked.run.memory)), asked.machine, asked.plan(layout, 1))
        room = int(CPU_SHARE * asked.machine.memory // (need * layout.ranks // count))
        if room >= count:
            break
        count = largest_divisor(share, min(room, count - 1))
    return count


def lay(asked: PlanRequest, layout: Layout, *, trade: bool) -> Laid:
    """The micro-batch and what is traded for memory, as far as they are open. `trade`: where nothing else fits, or it is clearly quicker,
    blocks are recomputed; where still nothing fits, optimizer states leave the device."""
    known = asked.run.model.module is None and asked.run.layout.schedule_file is None
    if asked.device == "cuda" and known and (found := _planned(asked, layout, trade)) is not None:
        return found
    tried: Laid | None = None
    for memory in _savings(asked, trade):
        for micro_batch in _sizes(asked, layout):
            tried = _filled(asked, layout, memory, micro_batch)
            if tried.need <= _room(asked, layout):
                return tried
    assert tried is not None, "one sequence divides every batch"
    return tried


def _planned(asked: PlanRequest, layout: Layout, trade: bool) -> Laid | None:
    """As the planner has it; None where the equations do not know such a layout."""
    memory, room = asked.run.memory, _room(asked, layout)
    recomputing = replace(memory, offload=_plain(memory).offload)
    best: Candidate | None = None
    for some in (_plain(memory), recomputing, memory) if trade else (_plain(memory),):
        if best is not None and best.bytes <= room and some is memory:
            break  # states leave the device only if they must
        option = judged(replace(asked.run, memory=some), asked.machine, asked.plan(layout, 1))
        if option is None:
            return None
        if best is None or best.bytes > room or (option.bytes <= room and option.seconds < CLEARLY * best.seconds):
            best = option
    assert best is not None
    plan = replace(asked.plan(layout, best.micro_batch), promise=promise_of(best))
    return Laid(replace(asked.run, memory=best.with_savings(memory)), plan, best.bytes)


def _savings(asked: PlanRequest, trade: bool) -> Iterator[Memory]:
    """What may be traded, the cheapest first."""
    memory = asked.run.memory
    yield _plain(memory)
    if not trade or asked.run.model.module is not None:
        return
    last = _plain(memory)
    if memory.recompute == "auto":
        yield replace(last, recompute="selective")
        last = replace(last, recompute="full")
        yield last
    if memory.offload == "auto" and asked.run.optimizer.name != "muon":
        # Cores compute where "cpu" would put things.
        yield replace(last, offload="nvme" if asked.device == "cpu" else "cpu")


def _sizes(asked: PlanRequest, layout: Layout) -> Iterator[int]:
    """Micro-batches by the rule of thumb, the largest first; or the one that is given."""
    train, share = asked.run.train, asked.run.batch // layout.replicas
    if train.micro_batch is not None:
        yield train.micro_batch
        return
    most = (_CPU_TOKENS if asked.device == "cpu" else _MODULE_TOKENS) // train.sequence_length
    if layout.pipeline > 1:  # enough of them to keep all stages busy
        most = min(most, share // (2 * layout.pipeline))
    size = largest_divisor(share, most)
    yield size
    while size > 1:
        size = largest_divisor(share, size // 2)
        yield size


def _filled(asked: PlanRequest, layout: Layout, memory: Memory, micro_batch: int) -> Laid:
    run, plan = replace(asked.run, memory=memory), asked.plan(layout, micro_batch)
    one = replace(run, train=replace(run.train, micro_batch=micro_batch))
    option = judged(one, asked.machine, plan)
    if option is None:
        return Laid(run, plan, rank_bytes(run, asked.machine, plan))
    promise = promise_of(option) if run.layout.schedule_file is None else None
    return Laid(run, replace(plan, promise=promise), option.bytes)


def memory_problems(asked: PlanRequest, laid: Laid) -> list[str]:
    """Whether even a micro-batch of one sequence is too large. A GPU is filled to the brim here: a rehearsal has the last word."""
    layout, machine = laid.plan.layout, asked.machine
    if asked.device == "cuda" and not machine.gpus:
        return []
    have = float(asked.smallest_gpu(layout.ranks).memory) if asked.device == "cuda" else _room(asked, layout)
    if laid.need <= have:
        return []
    need = rank_bytes(laid.run, machine, asked.plan(layout, 1))
    if need <= have:
        return []  # of a micro-batch that somebody asked for
    smaller = "take a smaller model or a shorter train.sequence_length"
    if _shared(asked):
        smaller = f"leave [layout] out, as another one fits, or {smaller}"
    if asked.device == "cuda":
        gpu = asked.smallest_gpu(layout.ranks)
        return [
            f"A rank needs about {gib(need)} with a micro-batch of 1 sequence{laid.traded} but the {gpu.name} "
            f"has {gib(gpu.memory)}; {smaller}."
        ]
    have *= layout.ranks
    fewer = largest_divisor(asked.run.batch, int(have // need))
    remedy = f"{asked.set_ranks(fewer)}, or {smaller}" if fewer < layout.ranks and fewer * need <= have else smaller
    return [
        f"{layout.ranks} CPU rank{'s need' if layout.ranks > 1 else ' needs'} about {gib(layout.ranks * need)} "
        f"with a micro-batch of 1 sequence{laid.traded} but {gib(have)} of {gib(machine.memory)} can be used; {remedy}."
    ]


def roomy(laid: Laid, asked: PlanRequest) -> bool:
    """Whether it fits with a little to spare, as plans do."""
    return laid.need <= _room(asked, laid.plan.layout)


def _room(asked: PlanRequest, layout: Layout) -> float:
    """Bytes of a rank that a plan fills."""
    if asked.device == "cpu":
        return CPU_SHARE * asked.machine.memory / layout.ranks
    share = SAFE if asked.run.model.module is None else _MODULE_SHARE
    return share * asked.smallest_gpu(layout.ranks).memory


def _shared(asked: PlanRequest) -> bool:
    """Whether the plan would find a layout for what does not fit as it is given."""
    run = asked.run
    if run.layout == Layout() or run.model.module is not None or asked.device == "cpu":
        return False
    free = replace(run, layout=Layout())
    return find(free, hardware(free, asked.machine), most=1, gpus=asked.started) is not None


def _plain(memory: Memory) -> Memory:
    """What nobody asked for and no plan has found is not done."""
    return replace(
        memory,
        recompute="none" if memory.recompute == "auto" else memory.recompute,
        offload="none" if memory.offload == "auto" else memory.offload,
    )
