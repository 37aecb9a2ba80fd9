"""ZeRO-3, tensor parallelism and 1F1B next to hand-written loops of the same model, on 4 CPU ranks with one thread each.

    python benchmarks/parallel.py [--only zero3 tensor 1f1b] [--rounds 40] [--starts 3] [--profile]

Every rank holds both our Trainer and the loop, with the same weights, and alternates their steps on the same tokens. Other load on the
machine affects both, and equal losses show that both do the same work. The trainer reads its text and agrees on every step; the loops
have their tokens in memory. Start-up is measured with the commands `phalanx train` and torchrun. `--profile` shows where a rank spends
its time instead.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist
from common import RUN, job_pair, machine_load, start_seconds
from handwritten_parallel import LOOPS, Micro

from phalanx.data.loader import ReplicaShare
from phalanx.host.env import worker_env
from phalanx.host.probe import probe
from phalanx.models.init import build, materialize
from phalanx.parallel.mesh import Mesh
from phalanx.planning.planner import choose
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.trainer import Trainer
from phalanx.verification.rank_pool import RankPool

RANKS = 4
WARM_UP = 5
"""Steps of each side before the measurement: the first steps allocate memory, and one of ours counts its operations."""
# No weight decay and a larger eps: both would make the losses differ without changing the work.
_SETTINGS = 'weight_decay = 0.0\nschedule = "constant"\neps = 1e-4'
TECHNIQUES = {
    "zero3": RUN.format(batch=16, optimizer=_SETTINGS, layout="data = 1\nshard = 4"),
    "tensor": RUN.format(batch=4, optimizer=_SETTINGS, layout="data = 1\ntensor = 4"),
    "1f1b": RUN.format(batch=32, optimizer=_SETTINGS, layout="data = 1\npipeline = 4"),
}


@dataclass
class Side:
    """The steps of one side, ours or theirs, on one rank."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    profiler: cProfile.Profile | None = None
    profile: str = ""
    """The report of the profiler with --profile."""

    def measure(self, step: Callable[[], float | None]) -> None:
        """Takes a step. All ranks start together, and the step ends when the last rank is done."""
        if self.profiler is not None and len(self.seconds) >= WARM_UP:
            step = partial(self.profiler.runcall, step)
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        self.losses.append(step())
        self.cpu.append(time.process_time() - cpu)
        dist.barrier()
        self.seconds.append(time.perf_counter() - begin)

    def picklable(self) -> Side:
        """A copy with the profiler's report in place of the profiler."""
        text = io.StringIO()
        if self.profiler is not None:
            pstats.Stats(self.profiler, stream=text).sort_stats("tottime").print_stats(45)
        return replace(self, profiler=None, profile=text.getvalue())


def alternate(mesh: Mesh, run: Run, plan: Plan, technique: str, rounds: int, profile: bool) -> tuple[Side, Side]:
    """Runs on every rank: alternates steps of both sides; the side that begins changes."""
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer(run, plan, mesh, Path(name) / "checkpoints")
        trainer.build()
        model = materialize(build(run.model), run.train.seed, mesh.device)
        loop = LOOPS[technique](model, run)  # type: ignore[arg-type]
        batches = [_batches(trainer, run, mesh, step) for step in range(WARM_UP + rounds)]
        ours, theirs = (Side(profiler=cProfile.Profile() if profile else None) for _ in range(2))
        for step in range(WARM_UP + rounds):
            sides: list[tuple[Side, Callable[[], float | None]]] = [
                (ours, lambda: _loss(trainer)),
                (theirs, partial(loop.step, *batches[step])),
            ]
            for side, work in sides if step % 2 else sides[::-1]:
                side.measure(work)
        trainer.close()
    return ours.picklable(), theirs.picklable()


def _loss(trainer: Trainer) -> float:
    result = trainer.step()
    assert result is not None
    return result.loss


def _batches(trainer: Trainer, run: Run, mesh: Mesh, step: int) -> tuple[list[Micro], int]:
    """The tokens that the trainer will read, and the number of counted targets in the whole batch."""
    assert run.train.micro_batch is not None
    share = ReplicaShare(batch=run.batch, replica=mesh.replica, replicas=run.layout.replicas, micro_batch=run.train.micro_batch)
    samples = step * run.batch + np.arange(run.batch)
    counted = int((trainer.data.train.batch(samples).targets >= 0).sum())
    shares = share.cut(trainer.data.train.batch(share.samples(step * run.batch)))
    batches = [MicroBatch.prepare(part, mesh.device, run.data.document_mask) for part in shares]
    return [Micro(batch.tokens, batch.targets, batch.positions) for batch in batches], counted


def fastest_quarter(values: list[float]) -> float:
    """Mean of the fastest quarter: other load on the machine mostly affects the other steps."""
    return fmean(sorted(values)[: max(1, len(values) // 4)])


def mean_losses(ranks: list[Side]) -> list[float]:
    """The mean loss of each step over the ranks that know it."""
    steps = zip(*(side.losses for side in ranks), strict=True)
    return [fmean([loss for loss in step if loss is not None]) for step in steps]


def report(technique: str, ours: list[Side], theirs: list[Side]) -> str:
    pairs = list(zip(mean_losses(ours), mean_losses(theirs), strict=True))
    difference = [abs(own - other) / abs(other) for own, other in pairs]
    both = [side[0].seconds[WARM_UP:] for side in (ours, theirs)]
    fast, middle = [fastest_quarter(seconds) for seconds in both], [median(seconds) for seconds in both]
    cpu = [median(map(sum, zip(*(side.cpu[WARM_UP:] for side in ranks), strict=True))) for ranks in (ours, theirs)]
    paired = median(other / own for own, other in zip(*both, strict=True))
    return (
        f"{technique}: {len(both[0])} steps each. Ours to theirs, steps/s: {fast[1] / fast[0]:.3f} by the fastest quarter "
        f"({1 / fast[0]:.2f} against {1 / fast[1]:.2f}), {middle[1] / middle[0]:.3f} by medians ({1 / middle[0]:.2f} against "
        f"{1 / middle[1]:.2f}), {paired:.3f} by pairs.\n"
        f"  CPU seconds a step, all ranks: {cpu[0]:.3f} against {cpu[1]:.3f}: {cpu[1] / cpu[0]:.3f}.\n"
        f"  Losses: step 1 {pairs[0][0]:.6f} against {pairs[0][1]:.6f}; relative difference {max(difference[:WARM_UP]):.1e} in {WARM_UP} steps, "
        f"{max(difference):.1e} in all; the last {pairs[-1][0]:.4f} against {pairs[-1][1]:.4f}."
    )


def start_up(technique: str, count: int) -> str:
    run, script = TECHNIQUES[technique], ["handwritten_parallel.py", technique]
    seconds = start_seconds(lambda folder: job_pair(folder, run, RANKS, script), count)
    ours, theirs = seconds["phalanx"], seconds["hand-written"]
    return f"  Start-up: {ours:.1f} s against {theirs:.1f} s: {ours / theirs:.2f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TECHNIQUES, default=list(TECHNIQUES))
    parser.add_argument("--rounds", type=int, default=40, help="measured steps of each side")
    parser.add_argument("--starts", type=int, default=3, help="starts of each command; 0: none")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    runs = {technique: loads(TECHNIQUES[technique]) for technique in args.only}
    plans = {technique: choose(run, probe(""), RANKS) for technique, run in runs.items()}
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # The allocator reads its settings when a process starts: both sides get those that our launcher gives its ranks.
        os.execve(sys.executable, [sys.executable, *sys.argv], worker_env(next(iter(plans.values()))))
    torch.set_num_threads(1)
    with RankPool(RANKS, timeout=1800) as pool:
        for technique, run in runs.items():
            plan = plans[technique]
            print(machine_load(), flush=True)
            sides = pool.run(alternate, plan.layout, run, plan, technique, args.rounds, args.profile)
            ours, theirs = ([pair[which] for pair in sides] for which in (0, 1))
            print(report(technique, ours, theirs), flush=True)
            if args.profile:
                print(f"ours, rank 0:\n{ours[0].profile}\ntheirs, rank 0:\n{theirs[0].profile}", flush=True)
            elif args.starts:
                print(start_up(technique, args.starts), flush=True)
            print(machine_load(), flush=True)


if __name__ == "__main__":
    main()
