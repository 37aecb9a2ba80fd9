"""Lays a run out on a machine: fills in what the run file left open, and says what cannot work before anything starts.

The launcher, verification and the API call `settle` or `choose`; workers receive the Plan and the Run that come out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from phalanx.planning.devices import find_gpu
from phalanx.planning.memory import rank_state_bytes, sequence_bytes, sequence_share
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.machine import Gpu, Machine
from phalanx.spec.plan import Plan, Size
from phalanx.spec.run import Run
from phalanx.spec.schedule_choice import schedule

if TYPE_CHECKING:
    from phalanx.planning.chosen import Better

Compute = Literal["fp32", "bf16", "fp16", "fp8"]

_MOST_CPU_RANKS = 256
_MOST_RANKS_PER_CORE = 16
_CPU_MICRO_TOKENS = 4096  # beyond it a CPU's caches gain nothing and memory only grows
_GPU_SHARE = 0.8  # of the memory that an estimate may fill: the rest is fragmentation, NCCL and the estimate's error
_CPU_SHARE = 0.9
_TORCHRUN = "--nproc-per-node"


@dataclass(frozen=True, slots=True)
class Settled:
    """A run with nothing left open that training would have to decide."""

    run: Run
    """As it was given, with what is traded for memory filled in; its layout may still be open."""
    plan: Plan


def choose(run: Run, machine: Machine, ranks: int | None = None, size: Size | None = None) -> Plan:
    """The plan of `settle`, for whoever has no use for the run."""
    return settle(run, machine, ranks, size).plan


def settle(run: Run, machine: Machine, ranks: int | None = None, size: Size | None = None) -> Settled:
    """A plan for the run on this machine; `ranks` is how many somebody else, such as torchrun, has already started.

    Where the run file has no [layout], it is the plan's winner: replicas, which compute the same bits however many there are,
    unless something else is clearly quicker or fits where they do not. `size`: of one's own module, which the shape in the run
    file says nothing about. Raises RunError with everything that stands in the way.
    """
    from phalanx.planning.chosen import better  # the equations need numpy, which whoever only reads a plan does not pay for

    size = size or _size(run)
    settled: Settled | None = None
    refused: RunError | None = None
    try:
        settled = _as_usual(run, machine, ranks, size)
    except RunError as error:
        refused = error
    if run.layout == Layout() and run.model.module is None and (refused is None or _too_large(run, machine, ranks, size)):
        found = better(run, machine, ranks, settled.plan if settled and _fits(settled.plan, machine) else None)
        if found is not None:
            try:
                return _lay(found, machine, ranks, size)
            except RunError:
                if settled is None:
                    raise
    if settled is None:
        assert refused is not None
        raise refused
    return settled


def again(run: Run, machine: Machine, before: Plan, ranks: int | None = None, size: Size | None = None) -> Settled | None:
    """A run that goes on: where its layout is left open it keeps the one that it had, as long as the machine is the same.

    None where it is not, or cannot be laid out so any more.
    """
    asked = ranks or (run.cluster.cpu_ranks if before.device == "cpu" else None)
    if run.layout != Layout() or before.machine != described(machine) or asked not in (None, before.ranks):
        return None
    micro = run.train.micro_batch or before.micro_batch
    kept = replace(run, layout=before.layout, train=replace(run.train, micro_batch=micro))
    try:
        laid = settle(kept, machine, ranks, size)
    except RunError:
        return None
    return Settled(replace(run, memory=laid.run.memory), laid.plan)


def described(machine: Machine) -> str:
    """A machine in words, equal where a plan for the one is a plan for the other."""
    gpus = sorted({(gpu.name, gpu.memory) for gpu in machine.gpus})
    cards = "".join(f", {sum(gpu.name == name for gpu in machine.gpus)} × {name} with {_gib(memory)}" for name, memory in gpus)
    return f"{machine.cores} cores of {machine.cpu} with {_gib(machine.memory)}{cards}"


def _fits(plan: Plan, machine: Machine) -> bool:
    """Whether what is promised has room; nothing promised is no reason to doubt it."""
    if plan.promise is None:
        return True
    most = min(gpu.memory for gpu in machine.gpus) if plan.device == "cuda" else _CPU_SHARE * machine.memory / plan.ranks
    return plan.promise.total_memory <= most


def _lay(found: Better, machine: Machine, ranks: int | None, size: Size) -> Settled:
    """What a search came to, held to the same checks as what a person wrote."""
    laid = _as_usual(found.run, machine, ranks, size, found)
    return Settled(replace(found.asked, memory=laid.run.memory), laid.plan)


def _too_large(run: Run, machine: Machine, ranks: int | None, size: Size) -> bool:
    """Whether memory is all that stands in the way of replicas."""
    search = _Search.of(run, machine, ranks, size)
    layout = replace(run.layout, data=search.data())
    other = search.rank_problems(layout) + search.batch_problems(layout)
    return not other and bool(search.memory_problems(layout))


def _as_usual(run: Run, machine: Machine, ranks: int | None, size: Size, found: Better | None = None) -> Settled:
    """The layout as far as it is given, replicas for the rest. `found`: it is a search's, which counts memory better than this does."""
    from phalanx.planning.chosen import placed, promised

    search = _Search.of(run, machine, ranks, size)
    run = search.run
    layout = replace(run.layout, data=search.data())
    threads = run.cluster.threads or max(1, machine.cores // layout.ranks)
    problems = search.rank_problems(layout) + search.batch_problems(layout)
    if problems := problems + ([] if found else search.memory_problems(layout)):
        raise RunError(problems)
    micro_batch = search.micro_batch(layout)
    if problems := search.layout_problems(layout, run.batch // layout.replicas // micro_batch):
        raise RunError(problems)
    plan = Plan(
        layout=layout,
        device=search.device,
        threads=threads,
        micro_batch=micro_batch,
        accumulation=run.batch // layout.replicas // micro_batch,
        compute=search.compute,
        parameters=size.parameters,
        flops_per_token=size.flops_per_token,
        peak_flops=search.peak_flops(layout.ranks, threads),
        active=size.active,
        machine=described(machine),
    )
    plan = replace(plan, promise=promised(run, machine, plan))
    while run.train.micro_batch is None and plan.micro_batch > 1 and not _fits(plan, machine):
        less = _largest_divisor(run.batch // layout.replicas, plan.micro_batch // 2)
        plan = replace(plan, micro_batch=less, accumulation=run.batch // layout.replicas // less)
        plan = replace(plan, promise=promised(run, machine, plan))
    return Settled(run, replace(plan, placement=placed(run, machine, plan)))


def _size(run: Run) -> Size:
    model = run.model
    assert model.module is None, "an own module is measured before it is planned for"
    return Size(
        parameters=model.parameters(),
        active=model.active_parameters(),
        flops_per_token=model.flops_per_token(run.train.sequence_length),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """One question to the planner; the methods are the parts of its answer."""

    run: Run
    machine: Machine
    device: Literal["cpu", "cuda"]
    compute: Compute
    started: int | None
    parameters: int

    @staticmethod
    def of(run: Run, machine: Machine, ranks: int | None, size: Size) -> _Search:
        device = run.cluster.device or ("cuda" if machine.gpus else "cpu")
        compute = run.precision.compute or ("bf16" if device == "cuda" else "fp32")
        memory = run.memory
        # What nobody asked for and no plan has found is not done.
        memory = replace(
            memory,
            recompute="none" if memory.recompute == "auto" else memory.recompute,
            offload="none" if memory.offload == "auto" else memory.offload,
        )
        return _Search(replace(run, memory=memory), machine, device, compute, ranks, size.parameters)

    def data(self) -> int:
        """Replicas: what was asked for, or the most that the machine has room for and the batch divides among."""
        layout = self.run.layout
        if layout.data is not None:
            return layout.data
        others = replace(layout, data=1).ranks  # ranks of one replica
        if self.started is not None:
            return max(1, self.started // others)
        if self.device == "cpu" and self.run.cluster.cpu_ranks is not None:
            return max(1, self.run.cluster.cpu_ranks // others)
        room = len(self.machine.gpus) if self.device == "cuda" else min(self.machine.cores, self._ranks_in_memory())
        return _largest_divisor(self.run.batch // layout.shard, room // others)

    def micro_batch(self, layout: Layout) -> int:
        if self.run.train.micro_batch is not None:
            return self.run.train.micro_batch
        if self.device == "cpu":
            most = _CPU_MICRO_TOKENS // self.run.train.sequence_length
        else:
            room = _GPU_SHARE * self._smallest_gpu(layout.ranks).memory - self._state_bytes(layout)
            most = int(room // self._sequence_bytes(layout))
        share = self.run.batch // layout.replicas
        if layout.pipeline > 1:  # enough of them to keep all stages busy
            most = min(most, share // (2 * layout.pipeline))
        return _largest_divisor(share, most)

    def rank_problems(self, layout: Layout) -> list[str]:
        """Ranks against the machine, and against what has been started."""
        found, gpus, cores = [], len(self.machine.gpus), self.machine.cores
        most = min(_MOST_CPU_RANKS, _MOST_RANKS_PER_CORE * cores)
        if self.device == "cuda" and not gpus:
            found.append(
                'cluster.device = "cuda" but this machine has no GPU that nvidia-smi lists; '
                'set cluster.device = "cpu", or run `phalanx doctor` to see why.'
            )
        elif self.device == "cuda" and layout.ranks > gpus:
            found.append(
                f"The layout has {layout.ranks} ranks but this machine has {gpus} GPU{'s' if gpus > 1 else ''}; "
                f'{self._set(_largest_divisor(self.run.batch, gpus))}, or set cluster.device = "cpu".'
            )
        elif self.device == "cpu" and layout.ranks > most:
            found.append(
                f"The layout has {layout.ranks} CPU ranks but {cores} core{'s' if cores > 1 else ''} can carry {most} "
                f"({_MOST_RANKS_PER_CORE} per core, {_MOST_CPU_RANKS} at most); "
                f"{self._set(_largest_divisor(self.run.batch, most))} or less."
            )
        if self.started is not None and self.started != layout.ranks:
            found.append(
                f"torchrun started {self.started} ranks but the layout has {layout.ranks}; "
                f"start torchrun with {_TORCHRUN}={layout.ranks}, or leave layout.data out of the run file."
            )
        return found

    def layout_problems(self, layout: Layout, micro_batches: int) -> list[str]:
        """What only shows once the number of ranks, the device and the micro-batches are known."""
        found = []
        if self.run.layout.data is None:  # where it is given, the run file's own check has said so
            found += [finding.sentence for finding in layout_findings(replace(self.run, layout=layout))]
        found += self._schedule_problems(layout, micro_batches)
        gpus = [find_gpu(gpu.name) for gpu in self.machine.gpus[: layout.ranks]] if self.device == "cuda" else []
        if self.compute == "fp8" and (lacking := [gpu.key for gpu in gpus if gpu is not None and gpu.peak("fp8") is None]):
            found.append(
                f'precision.compute = "fp8" needs GPUs that multiply in it, but this machine has {lacking[0]}: '
                'set precision.compute = "bf16".'
            )
        return found

    def _schedule_problems(self, layout: Layout, micro_batches: int) -> list[str]:
        try:
            order = schedule(layout, micro_batches)
        except RunError as error:
            return list(error.problems)
        if order is None:
            return []
        found = order.problems()
        if order.stages > self.run.model.layers:
            found.append(
                f"The pipeline schedule has {order.stages} stages but model.layers = {self.run.model.layers}: take a schedule with fewer."
            )
        return found

    def batch_problems(self, layout: Layout) -> list[str]:
        """The batch among the replicas, and a replica's share among its micro-batches."""
        batch, replicas, micro = self.run.batch, layout.replicas, self.run.train.micro_batch
        if batch % replicas:
            larger = -(-batch // replicas) * replicas
            return [
                f"The global batch of {batch} sequences is not divisible by {replicas} replicas; "
                f"{self._set(_largest_divisor(batch, replicas))}, or {self._set_batch(larger)}."
            ]
        share = batch // replicas
        if micro is not None and share % micro:
            return [
                f"train.micro_batch = {micro} does not divide the {share} sequences that each of {replicas} "
                f"replica{'s' if replicas > 1 else ''} has per step; set train.micro_batch = {_largest_divisor(share, micro)}."
            ]
        return []

    def memory_problems(self, layout: Layout) -> list[str]:
        """Whether even a micro-batch of one sequence fits. The estimate is coarse, so a GPU is filled to the brim here."""
        need, smaller = self._rank_bytes(layout), "take a smaller model or a shorter train.sequence_length"
        if self.device == "cuda":
            if not self.machine.gpus or need <= (gpu := self._smallest_gpu(layout.ranks)).memory:
                return []
            return [
                f"A rank needs about {_gib(need)} with a micro-batch of 1 sequence but the {gpu.name} "
                f"has {_gib(gpu.memory)}; {smaller}."
            ]
        if layout.ranks * need <= (have := _CPU_SHARE * self.machine.memory):
            return []
        fewer = _largest_divisor(self.run.batch, self._ranks_in_memory())
        remedy = f"{self._set(fewer)}, or {smaller}" if fewer < layout.ranks and fewer * need <= have else smaller
        return [
            f"{layout.ranks} CPU rank{'s need' if layout.ranks > 1 else ' needs'} about {_gib(layout.ranks * need)} "
            f"with a micro-batch of 1 sequence but {_gib(have)} of {_gib(self.machine.memory)} can be used; {remedy}."
        ]

    def peak_flops(self, ranks: int, threads: int) -> float | None:
        if self.device == "cpu":
            # Also for bf16, though AMX and avx512_bf16 can beat it: on such CPUs MFU in bf16 flatters, even beyond 100%.
            core = self.machine.core_flops
            return None if core is None else core * min(self.machine.cores, ranks * threads)
        entries = [find_gpu(gpu.name) for gpu in self.machine.gpus[:ranks]]
        peaks = [entry.peak(self.compute) if entry else None for entry in entries]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None

    def _state_bytes(self, layout: Layout) -> int:
        """Of all parameters: experts that a token passes by are trained and kept like the others."""
        run = self.run
        offload = "none" if self.device == "cpu" and run.memory.offload == "cpu" else run.memory.offload
        return rank_state_bytes(run.model, self.parameters, layout, self.compute, offload)

    def _sequence_bytes(self, layout: Layout) -> int:
        whole = sequence_bytes(self.run.model, self.run.train.sequence_length, self.compute)
        return int(whole * sequence_share(layout, self.run.memory.recompute))

    def _rank_bytes(self, layout: Layout) -> int:
        return self._state_bytes(layout) + self._sequence_bytes(layout)

    def _ranks_in_memory(self) -> int:
        return int(_CPU_SHARE * self.machine.memory // self._rank_bytes(self.run.layout))

    def _smallest_gpu(self, ranks: int) -> Gpu:
        return min(self.machine.gpus[:ranks], key=lambda gpu: gpu.memory)

    def _set(self, ranks: int) -> str:
        """The remedy that changes the number of ranks, at the place that decided it."""
        if self.run.layout.data is None and self.started is not None:
            return f"start torchrun with {_TORCHRUN}={ranks}"
        cpu = self.run.layout.data is None and self.device == "cpu"
        return f"set {'cluster.cpu_ranks' if cpu else 'layout.data'} = {ranks}"

    def _set_batch(self, sequences: int) -> str:
        if self.run.train.batch is not None:
            return f"set train.batch = {sequences}"
        return f"set train.batch_tokens = {sequences * self.run.train.sequence_length}"


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; 1 where `most` is less."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
