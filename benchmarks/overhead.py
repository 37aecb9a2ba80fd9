"""What being looked after costs when nothing fails: median step time with everything on, beside the same run with it off.

    python benchmarks/overhead.py [--seconds 120] [--ranks 2] [key=value …]

On: as a run file without [resilience] has it: state compared every ten steps, copies in memory where nothing replicates the state, the
vote, heartbeats, supervisors. Off: resilience.restarts = 0 and check_every = 0. Both jobs are alive at once and take turns of a few
seconds, one frozen while the other runs, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import RUN, Contestant

TURN = 6.0
OFF = ("resilience.restarts=0", "resilience.check_every=0")


def job(name: str, folder: Path, run_file: Path, settings: list[str]) -> Contestant:
    events = folder / name / "events.jsonl"

    def ends() -> list[float]:
        lines = events.read_text().splitlines() if events.exists() else []
        return [record["time"] for line in lines if (record := json.loads(line))["event"] == "step"]

    program = "from phalanx.cli.main import main; main()"
    command = [sys.executable, "-c", program, "train", str(run_file), "--run-dir", str(folder / name), *settings]
    return Contestant(name, command, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of turns for each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = folder / "run.toml"
        run_file.write_text(RUN.format(batch=8 * given.ranks, optimizer="", layout=""))
        settings = given.settings or [f"layout.data={given.ranks}"]
        jobs = [job("on", folder, run_file, settings), job("off", folder, run_file, [*settings, *OFF])]
        try:
            for one in jobs:
                one.start(folder / f"{one.name}.txt")
                one.wait_for_step(5)
                one.signal(19)  # SIGSTOP
            for _ in range(round(given.seconds / TURN)):
                for one in jobs:
                    one.turn(TURN)
            seconds = {one.name: one.step_seconds() for one in jobs}
        finally:
            for one in jobs:
                one.end()
    on, off = (median(seconds[name]) for name in ("on", "off"))
    count = min(len(values) for values in seconds.values())
    print(f"on {on:.4f} s, off {off:.4f} s per step (medians of at least {count}): {100 * (on / off - 1):+.2f} %")


if __name__ == "__main__":
    main()
