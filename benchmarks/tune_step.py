"""What `phalanx tune` finds on one GPU, for the shapes of docs/performance.md.

    python benchmarks/tune_step.py                      # gpt2-124m, then llama3.2-1b untied, four minutes each
    python benchmarks/tune_step.py --only gpt2-124m --minutes 3

The run files set nothing that tune varies, except that a step is one micro-batch of the shape: `train.batch` sequences. Text is Python's own
source code; nothing is downloaded. Plans do not learn from it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHAPES = {
    "gpt2-124m": 'preset = "gpt2-124m"\n[train]\nbatch = 16\nsequence_length = 1024',
    "llama3.2-1b": 'preset = "llama3.2-1b"\ntied = false\n[train]\nbatch = 8\nsequence_length = 4096',
}
"""The beginning of each run file, from the keys of [model] on."""


def run_file(shape: str) -> str:
    return f"[model]\n{SHAPES[shape]}\nsteps = 1000\n[data]\ndocument_mask = false\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=4.0, help="of each shape")
    options.add_argument("--only", choices=list(SHAPES), action="append")
    options.add_argument("--out", type=Path, help="a folder for trials.csv and report.json of each shape")
    given = options.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="tune-step-"))
    folder.mkdir(parents=True, exist_ok=True)
    for shape in given.only or SHAPES:
        file = folder / f"{shape}.toml"
        file.write_text(run_file(shape))
        print(f"\n{shape}", flush=True)
        words = [sys.executable, "-m", "phalanx", "tune", file.name, "--minutes", str(given.minutes), "--no-learn"]
        subprocess.run(words, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    print(f"\nmeasurements are in {folder / 'tune'}")


if __name__ == "__main__":
    main()
