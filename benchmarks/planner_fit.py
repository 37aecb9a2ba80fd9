"""Fits the planner's constants to published steps and writes them where plans read them: `make planner-fit`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import phalanx.planning
from phalanx.planning.constants import written
from phalanx.planning.fit import Solved
from phalanx.planning.judge import factors, left_out
from phalanx.planning.published import read

ROWS = Path(__file__).parent / "published" / "steps.csv"
TARGET = Path(phalanx.planning.__path__[0]) / "catalogue" / "constants.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    begin = time.process_time()
    table = read(args.csv, core=False)
    solved = Solved.of(table)
    alone = left_out(solved, table.publications, table.core)
    misses = np.log(table.seconds / alone)
    intervals = {name: factors(misses[table.core & (table.moe == moe)]) for name, moe in (("dense", False), ("moe", True))}
    sources = len(set(table.sources))
    told = f"{len(table.ids)} rows of {sources} sources; intervals: P10 and P90 of the core rows' errors, whole publications left out."
    args.out.write_text(written(solved.fit, intervals, told), encoding="utf-8")
    print(f"{os.path.relpath(args.out)}: {told} {time.process_time() - begin:.0f} s of processor time.")


if __name__ == "__main__":
    main()
