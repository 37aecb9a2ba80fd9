"""The cost of resilience without failures: the median step time with all of it on, next to the same run with it off.

    python benchmarks/overhead.py [--seconds 120] [--ranks 2] [key=value …]

On: the defaults of a run file without [resilience]: comparison of replicas every ten steps, in-memory replicas where no other rank holds
the same state, agreement on every step, heartbeats, supervisors. Off: resilience.restarts = 0 and check_every = 0. Both jobs are alive
at once and take turns of a few seconds, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import RUN, machine_load, median_steps, train_job

TURN = 6.0  # seconds
OFF = ("resilience.restarts=0", "resilience.check_every=0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of turns for each job")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = folder / "run.toml"
        run_file.write_text(RUN.format(batch=8 * args.ranks, optimizer="", layout=""))
        settings = args.settings or [f"layout.data={args.ranks}"]
        jobs = [
            train_job("on", run_file, folder / "on", settings),
            train_job("off", run_file, folder / "off", [*settings, *OFF]),
        ]
        step = median_steps(folder, jobs, args.seconds, TURN, warm_up=5)
        fewest = min(len(job.step_seconds()) for job in jobs)
    on, off = step["on"], step["off"]
    print(
        f"on {on:.4f} s, off {off:.4f} s per step (medians of at least {fewest} steps): {100 * (on / off - 1):+.2f} % "
        f"({machine_load()})"
    )


if __name__ == "__main__":
    main()
