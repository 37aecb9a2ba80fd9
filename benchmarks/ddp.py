"""Steps per second and start-up of `phalanx train` beside a hand-written DDP loop of the same model, on 2 and 4 CPU ranks.

    python benchmarks/ddp.py [--ranks 2 4] [--seconds 60] [--starts 5]

Both jobs are alive at once and take turns of a few seconds: one is frozen (SIGSTOP) while the other runs, so that whatever
else the machine does falls on both. Only intervals between two step ends that lie whole inside a turn count.
"""

from __future__ import annotations

import argparse
import math
import signal
import tempfile
from pathlib import Path
from statistics import median

from common import RUN, Contestant, contestants, starts

TURN = 4.0  # seconds


def both(folder: Path, ranks: int) -> tuple[Contestant, Contestant]:
    run = RUN.format(batch=4 * ranks, optimizer="", layout=f"data = {ranks}")
    return contestants(folder, run, ranks, ["handwritten_ddp.py"])


def race(ranks: int, seconds: float) -> dict[str, float]:
    """Median step time of both, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = both(folder, ranks)
        try:
            for contestant, output in zip(jobs, ("phalanx.txt", "hand.txt"), strict=True):
                contestant.start(folder / output)
                contestant.wait_for_step(10)
                contestant.signal(signal.SIGSTOP)
            for _ in range(math.ceil(seconds / TURN)):
                for contestant in jobs:
                    contestant.turn(TURN)
            times = [median(contestant.step_seconds()) for contestant in jobs]
        finally:
            for contestant in jobs:
                contestant.end()
    return {"phalanx": 1 / times[0], "hand-written": 1 / times[1], "ratio": times[1] / times[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns for each contestant")
    parser.add_argument("--starts", type=int, default=5)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        speed, begin = race(ranks, chosen.seconds), starts(lambda folder, ranks=ranks: both(folder, ranks), chosen.starts)
        print(
            f"{ranks} ranks: {speed['phalanx']:.2f} steps/s, hand-written {speed['hand-written']:.2f}: "
            f"{speed['ratio']:.3f}×; start-up {begin['phalanx']:.1f} s, hand-written {begin['hand-written']:.1f} s: "
            f"{begin['ratio']:.2f}×",
            flush=True,
        )


if __name__ == "__main__":
    main()
