"""The cost of `watch.timeline`: steps of one trainer with and without it, in turns.

    python benchmarks/timeline_overhead.py [--ranks 2] [--steps 200] [RUN.toml] [key=value …]

The recorder is taken off the trainer for two of three groups of steps, in an order that is drawn. One of these two is the control: what its
ratio differs from 1 is the noise of the machine. A group is timed until the device has finished it. Without a run file: a small decoder on CPU ranks. Prints ratios of the medians with 95 % intervals
(bootstrap), as rank 0 sees them.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import RUN, machine_load

import phalanx as px
from phalanx import accelerator
from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.training.step import StepObserver
from phalanx.training.trainer import Trainer

GROUP = 5
"""Steps that are timed together."""
WARM_UP = 2
"""Groups of each kind."""


def steps_in_turns(run: px.Run, folder: Path, steps: int) -> dict[str, list[float]]:
    """Seconds per step "with" a timeline, "without", and of a "control" without one either, on this rank: one number per group of steps."""
    trainer = px.trainer(replace(run, watch=replace(run.watch, timeline=True)), checkpoints=folder / "checkpoints")
    assert isinstance(trainer, Trainer)
    trainer.load_initial_weights()
    timeline, observer, recorder = COMM_TIMER.timeline, trainer.stepper.observer, trainer._timeline
    assert timeline is not None and recorder is not None
    device = accelerator.of(trainer.mesh.device)
    seconds: dict[str, list[float]] = {"with": [], "without": [], "control": []}
    dice = random.Random(0)  # the same order on all ranks
    for turn in range(WARM_UP + -(-steps // GROUP)):
        for kind in dice.sample(list(seconds), len(seconds)):
            trainer.hooks.remove(recorder)
            COMM_TIMER.timeline, trainer.stepper.observer = None, StepObserver()
            if kind == "with":
                trainer.hooks.add(recorder)
                COMM_TIMER.timeline, trainer.stepper.observer = timeline, observer
            trainer.mesh.barrier()
            device.synchronize()
            begin = time.perf_counter()
            for _ in range(GROUP):
                trainer.step()
            device.synchronize()
            if turn >= WARM_UP:
                seconds[kind].append((time.perf_counter() - begin) / GROUP)
            if kind != "with":
                trainer.hooks.add(recorder)
    trainer.close()
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
        # In place of this process, so that a signal to it ends the ranks too.
        os.execve(sys.executable, [*torchrun, *sys.argv], dict(os.environ, OMP_NUM_THREADS="1"))
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
        off = median(seconds["without"])
        shown = [f"{1e3 * off:.2f} ms per step without a timeline"]
        for kind in ("with", "control"):
            low, high = interval(seconds[kind], seconds["without"])
            ratio = median(seconds[kind]) / off
            shown.append(f"{kind} {100 * (ratio - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %)")
        print(f"{args.ranks} ranks {' '.join(settings)}: {', '.join(shown)}; {args.steps} steps of each; {machine_load()}")


if __name__ == "__main__":
    main()
