"""ZeRO-3, tensor parallelism and 1F1B beside hand-written loops of the same model, on 4 CPU ranks with one thread each.

    python benchmarks/parallel.py [--only zero3 tensor 1f1b] [--rounds 40] [--starts 3] [--profile]

Every rank holds both, our Trainer and the loop, from the same weights, and takes a step of each in turns, on the same tokens:
whatever else the machine does falls on both, and that their losses agree shows that they do the same work. The trainer reads
its text and agrees on every step; the loops have their tokens in memory. Start-up is that of `phalanx train` and of the loop
under torchrun, each as a command. `--profile` shows instead where a rank's time goes, on both sides.
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
from common import RUN, contestants, starts
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
from phalanx.verification.rank_pool import Pool

RANKS = 4
WARM = 5
"""Steps of each before any is measured: the first do things for the first time, and one of ours is taken under a counter."""
# Which parameters decay is not what is measured, and would show in the losses; so would a small eps, which makes steps of rounding.
_SETTINGS = 'weight_decay = 0.0\nschedule = "constant"\neps = 1e-4'
TECHNIQUES = {
    "zero3": RUN.format(batch=16, optimizer=_SETTINGS, layout="data = 1\nshard = 4"),
    "tensor": RUN.format(batch=4, optimizer=_SETTINGS, layout="data = 1\ntensor = 4"),
    "1f1b": RUN.format(batch=32, optimizer=_SETTINGS, layout="data = 1\npipeline = 4"),
}


@dataclass
class Side:
    """What one rank saw of one contestant, step by step."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    profiler: cProfile.Profile | None = None
    profile: str = ""
    """What functions took, where that was asked for."""

    def take(self, step: Callable[[], float | None]) -> None:
        """All ranks begin together, and the step ends when the last has."""
        if self.profiler is not None and len(self.seconds) >= WARM:
            step = partial(self.profiler.runcall, step)
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        self.losses.append(step())
        self.cpu.append(time.process_time() - cpu)
        dist.barrier()
        self.seconds.append(time.perf_counter() - begin)

    def told(self) -> Side:
        """Without what cannot leave this process."""
        text = io.StringIO()
        if self.profiler is not None:
            pstats.Stats(self.profiler, stream=text).sort_stats("tottime").print_stats(45)
        return replace(self, profiler=None, profile=text.getvalue())


def turns(mesh: Mesh, run: Run, plan: Plan, technique: str, rounds: int, profile: bool) -> tuple[Side, Side]:
    """One rank: a step of ours, a step of theirs; who begins changes."""
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer(run, plan, mesh, Path(name) / "checkpoints")
        trainer.build()
        model = materialize(build(run.model), run.train.seed, mesh.device)
        loop = LOOPS[technique](model, run)  # type: ignore[arg-type]
        batches = [_batches(trainer, run, mesh, step) for step in range(WARM + rounds)]
        ours, theirs = (Side(profiler=cProfile.Profile() if profile else None) for _ in range(2))
        for step in range(WARM + rounds):
            sides = [(ours, lambda: _loss(trainer)), (theirs, lambda step=step: loop.step(*batches[step]))]
            for side, work in sides if step % 2 else sides[::-1]:
                side.take(work)
        trainer.close()
    return ours.told(), theirs.told()


def _loss(trainer: Trainer) -> float:
    taken = trainer.step()
    assert taken is not None
    return taken.loss


def _batches(trainer: Trainer, run: Run, mesh: Mesh, step: int) -> tuple[list[Micro], int]:
    """The very tokens that the trainer will read, and how many targets of the whole batch count."""
    assert run.train.micro_batch is not None
    share = ReplicaShare(batch=run.batch, replica=mesh.replica, replicas=run.layout.replicas, micro_batch=run.train.micro_batch)
    samples = step * run.batch + np.arange(run.batch)
    counted = int((trainer.data.train.batch(samples).targets >= 0).sum())
    portions = share.cut(trainer.data.train.batch(share.samples(step * run.batch)))
    found = [MicroBatch.prepare(portion, mesh.device, run.data.document_mask) for portion in portions]
    return [Micro(batch.tokens, batch.targets, batch.positions) for batch in found], counted


def quickest(values: list[float]) -> float:
    """Mean of the quickest quarter: what others take from the machine falls mostly on the rest."""
    return fmean(sorted(values)[: max(1, len(values) // 4)])


def mean_losses(ranks: list[Side]) -> list[float]:
    """Of each step; a rank that does not know it says nothing."""
    steps = zip(*(side.losses for side in ranks), strict=True)
    return [fmean([loss for loss in step if loss is not None]) for step in steps]


def told(technique: str, ours: list[Side], theirs: list[Side]) -> str:
    pairs = list(zip(mean_losses(ours), mean_losses(theirs), strict=True))
    apart = [abs(one - other) / abs(other) for one, other in pairs]
    both = [side[0].seconds[WARM:] for side in (ours, theirs)]
    fast, middle = [quickest(seconds) for seconds in both], [median(seconds) for seconds in both]
    cpu = [median(map(sum, zip(*(side.cpu[WARM:] for side in ranks), strict=True))) for ranks in (ours, theirs)]
    turn = median(other / one for one, other in zip(*both, strict=True))
    return (
        f"{technique}: {len(both[0])} steps each. Ours to theirs, steps/s: {fast[1] / fast[0]:.3f} by the quickest quarter "
        f"({1 / fast[0]:.2f} against {1 / fast[1]:.2f}), {middle[1] / middle[0]:.3f} by medians ({1 / middle[0]:.2f} against "
        f"{1 / middle[1]:.2f}), {turn:.3f} by pairs.\n"
        f"  CPU seconds a step, all ranks: {cpu[0]:.3f} against {cpu[1]:.3f}: {cpu[1] / cpu[0]:.3f}.\n"
        f"  Losses: step 1 {pairs[0][0]:.6f} against {pairs[0][1]:.6f}; apart by {max(apart[:WARM]):.1e} in {WARM} steps, by "
        f"{max(apart):.1e} in all; the last {pairs[-1][0]:.4f} against {pairs[-1][1]:.4f}."
    )


def started(technique: str, count: int) -> str:
    run, script = TECHNIQUES[technique], ["handwritten_parallel.py", technique]
    begin = starts(lambda folder: contestants(folder, run, RANKS, script), count)
    return f"  Start-up: {begin['phalanx']:.1f} s against {begin['hand-written']:.1f} s: {begin['ratio']:.2f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TECHNIQUES, default=list(TECHNIQUES))
    parser.add_argument("--rounds", type=int, default=40, help="steps of each that are measured")
    parser.add_argument("--starts", type=int, default=3, help="of each command; 0: none")
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    runs = {technique: loads(TECHNIQUES[technique]) for technique in chosen.only}
    plans = {technique: choose(run, probe(""), RANKS) for technique, run in runs.items()}
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # Read when a process starts: both sides get the allocator's settings that our launcher gives its ranks.
        os.execve(sys.executable, [sys.executable, *sys.argv], worker_env(next(iter(plans.values()))))
    torch.set_num_threads(1)
    with Pool(RANKS, timeout=1800) as pool:
        for technique, run in runs.items():
            plan = plans[technique]
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
            found = pool.run(turns, plan.layout, run, plan, technique, chosen.rounds, chosen.profile)
            ours, theirs = ([sides[which] for sides in found] for which in (0, 1))
            print(told(technique, ours, theirs), flush=True)
            if chosen.profile:
                print(f"ours, rank 0:\n{ours[0].profile}\ntheirs, rank 0:\n{theirs[0].profile}", flush=True)
            elif chosen.starts:
                print(started(technique, chosen.starts), flush=True)
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    main()
