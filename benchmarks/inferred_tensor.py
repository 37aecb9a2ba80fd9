"""Tensor parallelism that is inferred next to that of the built-in decoder: the same Llama, once as transformers has it (`model.config`), once as a
preset would be, on 2 CPU ranks with one thread each.

    python benchmarks/inferred_tensor.py [--rounds 40]

Every rank holds both trainers and alternates their steps, so that other load on the machine affects both. The two draw their initial weights under
different names, so their losses differ; both are printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import RUN, machine_load
from parallel import WARM_UP, Side, report

from phalanx.host.env import worker_env
from phalanx.host.probe import probe
from phalanx.launch.model_check import measure
from phalanx.parallel.mesh import Mesh
from phalanx.planning.planner import choose, plan_run
from phalanx.spec.config_text import spec_of
from phalanx.spec.hf_config_write import config
from phalanx.spec.load import loads
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer
from phalanx.verification.rank_pool import RankPool

RANKS = 2
_RUN = RUN.format(batch=4, optimizer='schedule = "constant"', layout=f"data = 1\ntensor = {RANKS}")


def inferred(run: Run) -> Run:
    """The same model, as transformers builds it."""
    return replace(run, model=spec_of(config(run.model)))


def alternate(mesh: Mesh, sides: tuple[tuple[Run, Plan], tuple[Run, Plan]], rounds: int) -> tuple[Side, Side]:
    """Runs on every rank: alternates steps of both sides; the side that begins changes."""
    with tempfile.TemporaryDirectory() as name:
        trainers = [Trainer(run, plan, mesh, Path(name) / str(index)) for index, (run, plan) in enumerate(sides)]
        for trainer in trainers:
            begin = time.perf_counter()
            trainer.build()
            if mesh.rank == 0:
                print(f"built in {time.perf_counter() - begin:.1f} s: {trainer.sharded.applied['tensor']}", flush=True)
        both = (Side(), Side())
        for step in range(WARM_UP + rounds):
            pairs = list(zip(both, trainers, strict=True))
            for side, trainer in pairs if step % 2 else pairs[::-1]:
                side.measure(partial(_loss, trainer))
        for trainer in trainers:
            trainer.close()
    return both


def _loss(trainer: Trainer) -> float:
    result = trainer.step()
    assert result is not None
    return result.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="measured steps of each side")
    args = parser.parse_args()
    builtin, machine = loads(_RUN), probe("")
    other = inferred(builtin)
    plans = plan_run(other, machine, RANKS, measure(other, machine, trace=False)).plan, choose(builtin, machine, RANKS)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # The allocator reads its settings when a process starts: the ranks get those that our launcher gives them.
        os.execve(sys.executable, [sys.executable, *sys.argv], worker_env(plans[1]))
    torch.set_num_threads(1)
    with RankPool(RANKS, timeout=1800) as pool:
        print(machine_load(), flush=True)
        sides = pool.run(alternate, plans[1].layout, ((other, plans[0]), (builtin, plans[1])), args.rounds)
        ours, theirs = ([pair[which] for pair in sides] for which in (0, 1))
        print(report("inferred against built-in", ours, theirs), flush=True)
        print(machine_load(), flush=True)


if __name__ == "__main__":
    main()
