"""The cost of `watch.timeline`: steps with and without it, in turns, in the same processes.

    python benchmarks/timeline_overhead.py [--ranks 2] [--steps 200] [RUN.toml] [key=value …]

Two trainers of the same run live in the same ranks, one of them records. They take steps in the order A B B A, so that other load on the
machine affects both. Without a run file: a small decoder on CPU ranks. Prints the ratio of the medians with a 95 % interval (bootstrap), for
steps as rank 0 sees them.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import RUN, machine_load

import phalanx as px
from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.training.trainer import Trainer

WARM_UP = 10


def steps_in_turns(run: px.Run, folder: Path, steps: int) -> dict[bool, list[float]]:
    """Seconds of steps with and without a timeline, on this rank."""
    recorded = px.trainer(replace(run, watch=replace(run.watch, timeline=True)), checkpoints=folder / "on" / "checkpoints")
    recorded.load_initial_weights()
    timeline = COMM_TIMER.timeline
    plain = Trainer(replace(recorded.run, watch=run.watch), recorded.plan, recorded.mesh, folder / "off" / "checkpoints")
    plain.build()
    plain.load_initial_weights()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(WARM_UP + steps):
        for on in (True, False) if turn % 2 else (False, True):
            COMM_TIMER.timeline = timeline if on else None
            recorded.mesh.barrier()
            begin = time.perf_counter()
            (recorded if on else plain).step()
            if turn >= WARM_UP:
                seconds[on].append(time.perf_counter() - begin)
    COMM_TIMER.timeline = timeline
    recorded.close()
    plain.close()
    return seconds


def interval(on: list[float], off: list[float], draws: int = 2000) -> tuple[float, float]:
    dice = random.Random(0)
    ratios = sorted(median(dice.choices(on, k=len(on))) / median(dice.choices(off, k=len(off))) for _ in range(draws))
    return ratios[draws // 40], ratios[-draws // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("run", nargs="*", help="a run file and settings, or settings alone")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ and args.ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        sys.exit(subprocess.run([*torchrun, *sys.argv], env=dict(os.environ, OMP_NUM_THREADS="1")).returncode)
    settings = [word for word in args.run if "=" in word]
    with tempfile.TemporaryDirectory() as name:
        path = next((Path(word) for word in args.run if "=" not in word), None)
        if path is None:
            path = Path(name) / "run.toml"
            path.write_text(RUN.format(batch=8 * args.ranks, optimizer="", layout=""))
            settings = settings or [f"layout.data={args.ranks}"]
        run = px.load(path, overrides=settings)
        seconds = steps_in_turns(run, Path(name), args.steps)
    if os.environ.get("RANK", "0") == "0":
        on, off = median(seconds[True]), median(seconds[False])
        low, high = interval(seconds[True], seconds[False])
        print(
            f"{args.ranks} ranks {' '.join(settings)}: with a timeline {1e3 * on:.2f} ms, without {1e3 * off:.2f} ms per step (medians of "
            f"{args.steps}): {100 * (on / off - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %; {machine_load()})"
        )


if __name__ == "__main__":
    main()
