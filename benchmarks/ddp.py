"""Steps per second and start-up time of `phalanx train` next to a hand-written DDP loop of the same model, on 2 and 4 CPU ranks.

    python benchmarks/ddp.py [--ranks 2 4] [--seconds 60] [--starts 5]

Both jobs are alive at once and take turns of a few seconds: one is paused (SIGSTOP) while the other runs, so that other load on the
machine affects both. Only steps that lie completely inside a turn count. On a busy machine turns become longer.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

from common import RUN, Job, job_pair, machine_load, median_steps, start_seconds

TURN = 4.0  # seconds


def jobs(folder: Path, ranks: int) -> tuple[Job, Job]:
    run = RUN.format(batch=4 * ranks, optimizer="", layout=f"data = {ranks}")
    return job_pair(folder, run, ranks, ["handwritten_ddp.py"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of turns for each job")
    parser.add_argument("--starts", type=int, default=5, help="starts of each job; 0: none")
    args = parser.parse_args()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as name:
            step = median_steps(Path(name), jobs(Path(name), ranks), args.seconds, TURN, warm_up=10)
        ours, theirs = step["phalanx"], step["hand-written"]
        line = f"{ranks} ranks: {1 / ours:.2f} steps/s, hand-written {1 / theirs:.2f}: {theirs / ours:.3f}×"
        if args.starts:
            start = start_seconds(partial(jobs, ranks=ranks), args.starts)
            ours, theirs = start["phalanx"], start["hand-written"]
            line += f"; start-up {ours:.1f} s, hand-written {theirs:.1f} s: {ours / theirs:.2f}×"
        print(f"{line} ({machine_load()})", flush=True)


if __name__ == "__main__":
    main()
