"""The command that `calibration/measure_machine` starts for what has to be measured in a process of its own: with the environment that ranks are
given, or as one of several ranks. Not for people.

    python -P -m phalanx.calibration.bench_process steps DEVICE COMPUTE THREADS SECONDS
    python -P -m phalanx.calibration.bench_process links DEVICE RANK RANKS PORT SECONDS

The last line it prints is JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    kind, *words = sys.argv[1:]
    print("\n" + json.dumps(_steps(words) if kind == "steps" else _links(words)), flush=True)


def _steps(words: list[str]) -> Any:
    from phalanx.calibration.step_bench import timed

    device, compute, threads, seconds = words
    assert device in ("cpu", "cuda") and compute in ("fp32", "bf16", "fp8"), words
    return timed(device, compute, int(threads), float(seconds))  # type: ignore[arg-type]


def _links(words: list[str]) -> Any:
    from phalanx.calibration.link_bench import collectives

    device, rank, ranks, port, seconds = words
    return collectives(device, int(rank), int(ranks), int(port), float(seconds))


if __name__ == "__main__":
    main()
