"""One question to the planner: a run, a machine, and how many ranks there have to be. Its parts say what was asked for, and in
sentences what cannot be; `planning/resolve` puts the answer together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planning.machines.catalogue import find_gpu
from phalanx.schedules.makers import schedule_for
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Gpu, Machine, Plan, Size
from phalanx.spec.run import Run

Compute = Literal["fp32", "bf16", "fp16", "fp8"]

_MOST_CPU_RANKS = 256
_MOST_RANKS_PER_CORE = 16
_TORCHRUN = "--nproc-per-node"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is known before anything is chosen."""

    run: Run
    machine: Machine
    device: Literal["cpu", "cuda"]
    compute: Compute
    started: int | None
    """Ranks that somebody else, such as torchrun, has started."""
    size: Size

    @staticmethod
    def of(run: Run, machine: Machine, ranks: int | None, size: Size) -> PlanRequest:
        device = run.cluster.device or ("cuda" if machine.gpus else "cpu")
        compute = run.precision.compute or ("bf16" if device == "cuda" else "fp32")
        return PlanRequest(run, machine, device, compute, ranks, size)

    def plan(self, layout: Layout, micro_batch: int) -> Plan:
        """So laid out, with nothing promised yet."""
        threads = self.run.cluster.threads or max(1, self.machine.cores // layout.ranks)
        return Plan(
            layout=layout,
            device=self.device,
            threads=threads,
            micro_batch=micro_batch,
            accumulation=self.run.batch // layout.replicas // micro_batch,
            compute=self.compute,
            parameters=self.size.parameters,
            flops_per_token=self.size.flops_per_token,
            peak_flops=self._peak_flops(layout.ranks, threads),
            active=self.size.active,
            machine=described(self.machine),
        )

    def smallest_gpu(self, ranks: int) -> Gpu:
        return min(self.machine.gpus[:ranks], key=lambda gpu: gpu.memory)

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
                f'{self.set_ranks(largest_divisor(self.run.batch, gpus))}, or set cluster.device = "cpu".'
            )
        elif self.device == "cpu" and layout.ranks > most:
            found.append(
                f"The layout has {layout.ranks} CPU ranks but {cores} core{'s' if cores > 1 else ''} can carry {most} "
                f"({_MOST_RANKS_PER_CORE} per core, {_MOST_CPU_RANKS} at most); "
                f"{self.set_ranks(largest_divisor(self.run.batch, most))} or less."
            )
        if self.started is not None and self.started != layout.ranks:
            found.append(
                f"torchrun started {self.started} ranks but the layout has {layout.ranks}; "
                f"start torchrun with {_TORCHRUN}={layout.ranks}, or leave layout.data out of the run file."
            )
        return found

    def batch_problems(self, layout: Layout) -> list[str]:
        """The batch among the replicas, and a replica's share among its micro-batches."""
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
            order = schedule_for(layout, micro_batches)
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

    def set_ranks(self, ranks: int) -> str:
        """The remedy that changes the number of ranks, at the place that decided it."""
        if self.run.layout.data is None and self.started is not None:
            return f"start torchrun with {_TORCHRUN}={ranks}"
        cpu = self.run.layout.data is None and self.device == "cpu"
        return f"set {'cluster.cpu_ranks' if cpu else 'layout.data'} = {ranks}"

    def _set_batch(self, sequences: int) -> str:
        if self.run.train.batch is not None:
            return f"set train.batch = {sequences}"
        return f"set train.batch_tokens = {sequences * self.run.train.sequence_length}"

    def _peak_flops(self, ranks: int, threads: int) -> float | None:
        if self.device == "cpu":
            # Also for bf16, though AMX and avx512_bf16 can beat it: on such CPUs MFU in bf16 flatters, even beyond 100%.
            core = self.machine.core_flops
            return None if core is None else core * min(self.machine.cores, ranks * threads)
        entries = [find_gpu(gpu.name) for gpu in self.machine.gpus[:ranks]]
        peaks = [entry.peak(self.compute) if entry else None for entry in entries]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None


def described(machine: Machine) -> str:
    """A machine in words, equal where a plan for the one is a plan for the other."""
    gpus = sorted({(gpu.name, gpu.memory) for gpu in machine.gpus})
    cards = "".join(f", {sum(gpu.name == name for gpu in machine.gpus)} × {name} with {gib(memory)}" for name, memory in gpus)
    return f"{machine.cores} cores of {machine.cpu} with {gib(machine.memory)}{cards}"


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`; 1 where `most` is less."""
    return next(n for n in range(max(1, min(number, most)), 0, -1) if number % n == 0)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
