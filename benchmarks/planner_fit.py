"""Fits the planner's constants to published steps and writes catalogue/constants.toml: `make planner-fit`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import phalanx.planning
from planner.constants import FAMILIES, constants_file
from planner.fit import Solved
from planner.steps import read
from planner.validation import doubts, factors, known_by, left_out

ROWS = Path(__file__).parent / "published" / "steps.csv"
TARGET = Path(phalanx.planning.__path__[0]) / "catalogue" / "constants.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    start = time.process_time()
    table = read(args.csv, core=False)
    solved = Solved.of(table)
    held_out = left_out(solved, table.publications, table.core)
    wide = doubts(solved.fit, table)
    for publication in np.unique(table.publications):
        mine = table.publications == publication
        wide[mine] *= known_by(table.family[mine], table, mine)
    misses = np.log(table.seconds / held_out) / wide
    intervals = {}
    for name, moe in (("dense", False), ("moe", True)):
        rows = table.core & (table.moe == moe)
        low, high = np.exp(factors(misses[rows], table.publications[rows]))
        intervals[name] = (float(low), float(high))
    known = dict(zip((*FAMILIES, "other"), known_by(np.array([*FAMILIES, "other"]), table).tolist(), strict=True))
    sources = len(set(table.sources))
    summary = f"{len(table.ids)} rows of {sources} sources; intervals: P10 and P90 of the core rows' errors, whole publications left out."
    args.out.write_text(constants_file(solved.fit, intervals, known, summary), encoding="utf-8")
    print(f"{os.path.relpath(args.out)}: {summary} {time.process_time() - start:.0f} s of processor time.")


if __name__ == "__main__":
    main()
