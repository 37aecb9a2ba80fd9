"""How much longer a resumed run takes to its first step than a fresh one: seconds from the command to the end of that step.

    python benchmarks/resume.py [--starts 5] [--run examples/quickstart.toml] [key=value …]

Each round starts the run afresh, lets it take a few steps, stops it as a preemption would, and starts the same command again. One
step in between moves the position in the data by a whole batch, so a large `train.batch` resumes far into the data.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEPS = 3


def first_step(command: list[str], events: Path, stop: bool) -> tuple[float, int]:
    """Seconds from the command to the first step of this launch, and the position in the data after it."""
    before = events.stat().st_size if events.exists() else 0
    started = time.time()
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            text = events.read_bytes()[before:].decode() if events.exists() else ""
            steps = [
                json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and '"event": "step"' in line
            ]
            if len(steps) >= (STEPS if stop else 1):
                return steps[0]["time"] - started, steps[0]["samples"]
            assert job.poll() is None, "the run has ended by itself"
            time.sleep(0.02)
    finally:
        job.send_signal(signal.SIGTERM if stop else signal.SIGKILL)
        job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--run", default="examples/quickstart.toml")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    fresh, resumed, position = [], [], 0
    for _ in range(given.starts):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            program = "from phalanx.cli.main import main; main()"
            command = [sys.executable, "-c", program, "train", given.run, "--run-dir", str(folder), *given.settings]
            fresh.append(first_step(command, folder / "events.jsonl", stop=True)[0])
            seconds, position = first_step(command, folder / "events.jsonl", stop=False)
            resumed.append(seconds)
    print(json.dumps({"fresh": fresh, "resumed": resumed}))
    print(
        f"fresh {median(fresh):.2f} s, resumed at sample {position:,} {median(resumed):.2f} s: {median(resumed) - median(fresh):+.2f} s"
    )


if __name__ == "__main__":
    main()
