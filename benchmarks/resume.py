"""How much longer a resumed run takes to its first step than a new run: seconds from the command to the end of that step.

    python benchmarks/resume.py [--starts 5] [--run examples/quickstart.toml] [key=value …]

Each round starts a new run, lets it take a few steps, stops it like a preemption, and starts the same command again. A step moves the
position in the data by one batch, so a large `train.batch` resumes far into the data.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import machine_load, train_command

STEPS = 3
LIMIT = 600.0  # seconds


def first_step(command: list[str], events: Path, preempt: bool) -> tuple[float, int]:
    """Seconds from the command to the first step of this launch, and the position in the data after it.

    `preempt`: let the run take STEPS steps, then stop it with SIGTERM; otherwise kill it after its first step.
    """
    before = events.stat().st_size if events.exists() else 0
    started = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(steps := _steps(events, before)) < (STEPS if preempt else 1):
            if process.poll() is not None:
                raise SystemExit(f"The run ended with exit code {process.returncode} before its first steps.")
            if time.time() > started + LIMIT:
                raise SystemExit(f"The run did not take {STEPS} steps within {LIMIT:.0f} s ({machine_load()}).")
            time.sleep(0.02)
        return steps[0]["time"] - started, steps[0]["samples"]
    finally:
        process.send_signal(signal.SIGTERM if preempt else signal.SIGKILL)
        process.wait()


def _steps(events: Path, offset: int) -> list[dict[str, Any]]:
    text = events.read_bytes()[offset:].decode() if events.exists() else ""
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if record["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--run", default="examples/quickstart.toml")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    new, resumed, position = [], [], 0
    for _ in range(args.starts):
        with tempfile.TemporaryDirectory() as name:
            run_dir = Path(name) / "run"
            command = train_command(args.run, run_dir, args.settings)
            new.append(first_step(command, run_dir / "events.jsonl", preempt=True)[0])
            seconds, position = first_step(command, run_dir / "events.jsonl", preempt=False)
            resumed.append(seconds)
    print(json.dumps({"fresh": new, "resumed": resumed}))
    difference = median(resumed) - median(new)
    print(
        f"new {median(new):.2f} s, resumed at sample {position:,} {median(resumed):.2f} s: {difference:+.2f} s ({machine_load()})"
    )


if __name__ == "__main__":
    main()
