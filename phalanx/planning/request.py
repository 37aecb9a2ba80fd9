"""A request to the planner: a run, the machines it is planned for, and what the answer is to minimize. It also checks what does
not depend on the cost model (ranks, batch, schedule) and says in sentences what cannot work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planning.machines.catalogue import find_gpu
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.cpu import cpu_hardware
from phalanx.planning.machines.hardware import hardware, planned
from phalanx.planning.search.search import NO_LIMITS, Aim, Limits
from phalanx.planning.search.space import largest_divisor
from phalanx.schedules.makers import schedule_for
from phalanx.spec.adapted_layers import adapter_parameters, flops_per_token
from phalanx.spec.check_engine import engine_problems
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.engine import Engine
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.keys import apply_rules
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Gpu, Machine, Plan, Size
from phalanx.spec.run import Memory, Run

Compute = Literal["fp32", "bf16", "fp16", "fp8"]

_MOST_CPU_RANKS = 256
_MOST_RANKS_PER_CORE = 16
_TORCHRUN = "--nproc-per-node"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A run to plan, where, and under which limits."""

    run: Run
    machine: Machine | None = None
    """This machine, where the plan is for it; None: the cluster that the run file names."""
    started: int | None = None
    """Ranks that another launcher, such as torchrun, has already started."""
    module_size: Size | None = None
    """Measured size of a custom module, which the run file's shape says nothing about."""
    aim: Aim = "time"
    limits: Limits = NO_LIMITS
    given: bool = False
    """Judge the run file's own layout instead of searching."""
    free: bool = False
    """Search as if the run file gave no layout, and compare its own with the best."""
    top: int = 10
    """Runners-up in the report."""

    def __post_init__(self) -> None:
        """Everything that predicts reads the size of a custom module off the run's model, and the engine off the run. RunError where the machines
        need another engine than the run file's, and that lacks something."""
        if self.module_size is not None:
            model = replace(self.run.model, measured=self.module_size)
            object.__setattr__(self, "run", replace(self.run, model=model))
        if self.machine is None:
            object.__setattr__(self, "run", with_engine(self.run))

    @property
    def cluster(self) -> Hardware:
        """The machines to plan for. RunError where the run file names a cluster that does not exist, or a GPU that is not there."""
        return hardware(self.run, self.machine)

    @property
    def this_machine(self) -> Machine:
        assert self.machine is not None, "the plan is for this machine"
        return self.machine

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        if self.machine is None:
            return "cpu" if self.cluster.device == "cpu" else "cuda"
        return self.run.cluster.device or ("cuda" if self.machine.gpus else "cpu")

    @property
    def compute(self) -> Compute:
        return self.run.precision.compute or ("bf16" if self.device == "cuda" else "fp32")

    @property
    def size(self) -> Size:
        """Parameters and FLOPs of the model."""
        model = self.run.model
        if model.measured is not None:
            return model.measured
        assert model.is_builtin, "a custom module is measured before it is planned for"
        return Size(
            parameters=model.parameters(),
            active=model.active_parameters(),
            flops_per_token=flops_per_token(model, self.run.lora, self.run.train.sequence_length),
            trained=None if self.run.lora.rank is None else adapter_parameters(model, self.run.lora),
        )

    def threads(self, ranks: int) -> int:
        """CPU threads of each rank."""
        if self.machine is None:
            return 1
        return self.run.cluster.threads or max(1, self.machine.cores // ranks)

    def devices(self, ranks: int) -> Hardware:
        """The machines as this many ranks see them."""
        if self.machine is None:
            return self.cluster
        return devices_of(self.run, self.machine, ranks, self.threads(ranks), self.device)

    def plan(self, layout: Layout, micro_batch: int) -> Plan:
        """The plan of a layout, without a promise yet."""
        size, threads = self.size, self.threads(layout.ranks)
        return Plan(
            layout=layout,
            device=self.device,
            threads=threads,
            micro_batch=micro_batch,
            accumulation=self.run.batch // layout.replicas // micro_batch,
            compute=self.compute,
            parameters=size.parameters,
            flops_per_token=size.flops_per_token,
            peak_flops=self._peak_flops(layout.ranks, threads),
            active=size.active,
            trained=size.trained,
            machine=self.cluster.name if self.machine is None else machine_name(self.machine),
        )

    def smallest_gpu(self, ranks: int) -> Gpu:
        return min(self.this_machine.gpus[:ranks], key=lambda gpu: gpu.memory)

    def rank_problems(self, layout: Layout) -> list[str]:
        """Whether the machine, and the ranks that are already started, match the layout's number of ranks."""
        problems, gpus, cores = [], len(self.this_machine.gpus), self.this_machine.cores
        most = min(_MOST_CPU_RANKS, _MOST_RANKS_PER_CORE * cores)
        if self.device == "cuda" and not gpus:
            problems.append(
                'cluster.device = "cuda" but this machine has no GPU that nvidia-smi lists; '
                'set cluster.device = "cpu", or run `phalanx doctor` to see why.'
            )
        elif self.device == "cuda" and layout.ranks > gpus:
            problems.append(
                f"The layout has {layout.ranks} ranks but this machine has {gpus} GPU{'s' if gpus > 1 else ''}; "
                f'{self.set_ranks(largest_divisor(self.run.batch, gpus))}, or set cluster.device = "cpu".'
            )
        elif self.device == "cpu" and layout.ranks > most:
            problems.append(
                f"The layout has {layout.ranks} CPU ranks but {cores} core{'s' if cores > 1 else ''} can carry {most} "
                f"({_MOST_RANKS_PER_CORE} per core, {_MOST_CPU_RANKS} at most); "
                f"{self.set_ranks(largest_divisor(self.run.batch, most))} or less."
            )
        if self.started is not None and self.started != layout.ranks:
            problems.append(
                f"torchrun started {self.started} ranks but the layout has {layout.ranks}; "
                f"start torchrun with {_TORCHRUN}={layout.ranks}, or remove layout.data from the run file."
            )
        return problems

    def batch_problems(self, layout: Layout) -> list[str]:
        """Whether the replicas divide the batch, and micro-batches divide a replica's share of it."""
        batch, replicas, micro = self.run.batch, layout.replicas, self.run.train.micro_batch
        if batch % replicas:
            larger = -(-batch // replicas) * replicas
            return [
                f"The global batch of {batch} sequences is not divisible by {replicas} replicas; "
                f"{self.set_ranks(largest_divisor(batch, replicas))}, or {self._set_batch(larger)}."
            ]
        share = batch // replicas
        if micro is not None and share % micro:
            return [
                f"train.micro_batch = {micro} does not divide the {share} sequences that each of {replicas} "
                f"replica{'s' if replicas > 1 else ''} has per step; set train.micro_batch = {largest_divisor(share, micro)}."
            ]
        return []

    def layout_problems(self, layout: Layout, micro_batches: int) -> list[str]:
        """What can be checked only once ranks, device and micro-batches are known."""
        problems = []
        if self.run.layout.data is None:  # where it is given, the run file's own check has passed
            problems += [finding.sentence for finding in layout_findings(replace(self.run, layout=layout))]
        problems += self._schedule_problems(layout, micro_batches)
        gpus = [find_gpu(gpu.name) for gpu in self.this_machine.gpus[: layout.ranks]] if self.device == "cuda" else []
        if self.compute == "fp8" and (lacking := [gpu.key for gpu in gpus if gpu is not None and gpu.peak("fp8") is None]):
            problems.append(
                f'precision.compute = "fp8" needs GPUs that multiply in it, but this machine has {lacking[0]}: '
                'set precision.compute = "bf16".'
            )
        return problems

    def _schedule_problems(self, layout: Layout, micro_batches: int) -> list[str]:
        try:
            order = schedule_for(layout, micro_batches)
        except RunError as error:
            return list(error.problems)
        if order is None:
            return []
        problems = order.problems()
        if order.stages > self.run.model.layers:
            problems.append(
                f"The pipeline schedule has {order.stages} stages but model.layers = {self.run.model.layers}: use a schedule with fewer."
            )
        return problems

    def set_ranks(self, ranks: int) -> str:
        """The remedy that changes the number of ranks, in the place that set it."""
        if self.run.layout.data is None and self.started is not None:
            return f"start torchrun with {_TORCHRUN}={ranks}"
        cpu = self.run.layout.data is None and self.device == "cpu"
        return f"set {'cluster.cpu_ranks' if cpu else 'layout.data'} = {ranks}"

    def _set_batch(self, sequences: int) -> str:
        if self.run.train.batch is not None:
            return f"set train.batch = {sequences}"
        return f"set train.batch_tokens = {sequences * self.run.train.sequence_length}"

    def _peak_flops(self, ranks: int, threads: int) -> float | None:
        """Peak FLOP/s of all ranks; None where a device is not in the catalogue."""
        if self.machine is None:
            peak = self.cluster.gpu.peak(self.compute)
            return None if peak is None else peak * ranks
        if self.device == "cpu":
            # Also for bf16, though AMX and avx512_bf16 can beat it: on such CPUs MFU in bf16 is too high, even above 100%.
            core = self.machine.core_flops
            return None if core is None else core * min(self.machine.cores, ranks * threads)
        entries = [find_gpu(gpu.name) for gpu in self.machine.gpus[:ranks]]
        peaks = [entry.peak(self.compute) if entry else None for entry in entries]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None


def with_engine(run: Run) -> Run:
    """The run with the engine that the devices of its cluster need. RunError where that lacks something."""
    if run.engine.name != "torch" or not planned(run) or (cluster := hardware(run, None)).device != "tpu":
        return run
    run = replace(run, engine=Engine(name="xla"))
    why = f'{cluster.name} has TPUs, which only engine.name = "xla" computes on.'
    refuse([f"{why} {finding.sentence}" for finding in apply_rules(run, engine_problems)])
    return run


def devices_of(run: Run, machine: Machine, ranks: int, threads: int, device: str) -> Hardware:
    """This many of a machine's devices: its cores shared among ranks, or that many of its GPUs."""
    if device == "cpu":
        return cpu_hardware(machine, ranks, threads)
    cluster = hardware(run, machine)
    return replace(cluster, gpus=ranks, node=min(cluster.node, ranks), island=min(cluster.island, ranks))


def free_run(run: Run) -> Run:
    """The run with every key open that a search can choose."""
    default = Memory()
    memory = replace(run.memory, recompute=default.recompute, recompute_every=default.recompute_every, offload=default.offload)
    return replace(run, layout=Layout(), memory=memory, train=replace(run.train, micro_batch=None))


def machine_name(machine: Machine) -> str:
    """A machine in words, equal for two machines if a plan for one is a plan for the other."""
    gpus = sorted({(gpu.name, gpu.memory) for gpu in machine.gpus})
    cards = "".join(f", {sum(gpu.name == name for gpu in machine.gpus)} × {name} with {gib(memory)}" for name, memory in gpus)
    hosts = "" if machine.nodes == 1 else f"{machine.nodes} hosts: "
    return f"{hosts}{machine.cores} cores of {machine.cpu} with {gib(machine.memory)}{cards}"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
