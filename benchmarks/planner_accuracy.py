"""The errors of predicted step times on published steps: `make planner-accuracy [CSV=FILE] [FIT=FILE] [BY=publication]`.

Without CSV: the repository's file, each source predicted by a fit without it. With CSV, any file of the same columns: constants are
fitted to the repository's file, or to FIT, without the sources that both files have.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from phalanx.spec.errors import RunError
from planner.fit import Solved, predict
from planner.steps import Table, read
from planner.validation import (
    LEAST,
    by_family,
    by_peak,
    by_source,
    covered,
    doubts,
    factors,
    known_by,
    left_out,
    summary,
    sweeps,
)

OWN = Path(__file__).parent / "published" / "steps.csv"
TARGETS = {False: (0.08, 0.20), True: (0.13, 0.35)}
NAMES = {False: "dense", True: "MoE"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=OWN, help="rows to predict")
    parser.add_argument("--fit", type=Path, default=OWN, help="rows to fit constants to")
    parser.add_argument("--by", choices=("source", "publication"), default="source", help="what each fit leaves out")
    parser.add_argument("--rows", action="store_true", help="print every row's error")
    args = parser.parse_args()
    start = time.process_time()
    try:
        known, rows = read(args.fit, core=False), read(args.csv, core=False)
    except RunError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if args.csv.resolve() == args.fit.resolve():
        summary_line, predicted, inside = _own(known, args.by)
    else:
        summary_line, predicted, inside = _other(known, rows, args.by)
    print(f"Constants fitted to {_path(args.fit)}: {summary_line}.")
    judged = rows.core & ~np.isnan(predicted)
    table, seconds = rows.take(judged), predicted[judged]
    print(f"Judged: {len(table.ids)} core rows of {len(set(table.sources))} sources in {_path(args.csv)}.\n")
    _overall(table, seconds, inside[judged], _groups(table, args.by))
    _by_source(table, seconds, inside[judged])
    _sweeps(rows.take(~np.isnan(predicted)), predicted[~np.isnan(predicted)])
    _left(rows, args.csv)
    if args.rows:
        print("\nEvery row, the farthest first")
        for place in np.argsort(-np.abs(np.log(seconds / table.seconds))):
            print(f"  {seconds[place] / table.seconds[place] - 1:+8.1%} {seconds[place]:10.3f} s  {table.ids[place]}")
    print(f"\n{time.process_time() - start:.0f} s of processor time.")
    return 0


def _path(path: Path) -> str:
    return os.path.relpath(path)


def _groups(table: Table, by: str) -> np.ndarray:
    return table.sources if by == "source" else table.publications


def _own(table: Table, by: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Predicts each source by a fit without it; its interval follows from the errors of the others."""
    groups, jobs = _groups(table, by), Counter(table.jobs)
    wanted = table.core | np.array([jobs[job] >= LEAST for job in table.jobs])
    solved = Solved.of(table)
    predicted = left_out(solved, groups, wanted)
    core = np.where(table.core, predicted, np.nan)
    return (
        f"its {len(table.ids)} usable rows, without the {by} that is being predicted",
        predicted,
        covered(table, core, groups, doubts(solved.fit, table)),
    )


def _other(known: Table, asked: Table, by: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Predicts another file by a fit without the sources that both files have. Intervals come from cross-validation of the fit's own
    publications, because those of a new file are equally unknown to it."""
    mine = np.isin(_groups(known, by), _groups(asked, by))
    rest = known.take(~mine)
    solved = Solved.of(rest)
    predicted = predict(solved.fit, asked)
    own = left_out(solved, rest.publications, rest.core)
    wide = doubts(solved.fit, rest)
    for publication in np.unique(rest.publications):
        there = rest.publications == publication
        wide[there] *= known_by(rest.family[there], rest, there)
    misses, inside = np.log(rest.seconds / own) / wide, np.zeros(len(asked.ids), dtype=bool)
    ratio = np.log(asked.seconds / predicted) / (doubts(solved.fit, asked) * known_by(asked.family, rest))
    for kind in (False, True):
        rows = rest.core & (rest.moe == kind)
        low, high = factors(misses[rows], rest.publications[rows])
        inside |= (asked.moe == kind) & (ratio >= low) & (ratio <= high)
    both = len(set(_groups(known, by)[mine]))
    return f"{len(rest.ids)} usable rows; {both} {by}s that both files have were left out", predicted, inside


def _overall(table: Table, seconds: np.ndarray, inside: np.ndarray, groups: np.ndarray) -> None:
    print("Error of step time                 rows  median     p90   bias  in P10-P90")
    ways = (
        ("40 % of the vendor's peak", by_peak(table)),
        ("median MFU of the same source", by_source(table)),
        ("6ND at the family's median", by_family(table, groups)),
    )
    for kind in (False, True):
        rows = table.moe == kind
        if not rows.any():
            continue
        own = summary(table.seconds[rows], seconds[rows])
        hold = own.median <= TARGETS[kind][0] and own.ninetieth <= TARGETS[kind][1]
        text = f"{own.rows:6d}  {own.median:6.1%}  {own.ninetieth:6.1%} {own.bias:+6.1%}  {inside[rows].mean():6.1%}"
        goal = f"target {TARGETS[kind][0]:.0%} / {TARGETS[kind][1]:.0%}: {'holds' if hold else 'DOES NOT HOLD'}"
        print(f"{NAMES[kind]:5s} planner                    {text}   {goal}")
        for name, other in ways:
            can = rows & ~np.isnan(other)
            if can.any():
                line = summary(table.seconds[can], other[can])
                print(f"      {name:28s}{line.rows:6d}  {line.median:6.1%}  {line.ninetieth:6.1%} {line.bias:+6.1%}")


def _by_source(table: Table, seconds: np.ndarray, inside: np.ndarray) -> None:
    print(
        "\nEach source                                                                    rows  median     p90   bias  inside"
    )
    for source in dict.fromkeys(table.sources):
        for kind in (False, True):
            rows = (table.sources == source) & (table.moe == kind)
            if rows.any():
                line = summary(table.seconds[rows], seconds[rows])
                name = f"{NAMES[kind]:5s} {_short(source)}"
                figures = (
                    f"{line.rows:5d}  {line.median:6.1%}  {line.ninetieth:6.1%} {line.bias:+6.1%}  {inside[rows].mean():4.0%}"
                )
                print(f"  {name:76s} {figures}")


def _short(text: str, size: int = 70) -> str:
    return text if len(text) <= size else f"{text[: size // 2 - 2]} .. {text[-(size // 2 - 2) :]}"


def _sweeps(table: Table, seconds: np.ndarray) -> None:
    """A job has the same source, model, devices, sequence, batch and format. Layouts measured twice count once."""
    found = sweeps(table, seconds)
    print(f"\nChoosing among measured layouts of one job ({LEAST} or more, each predicted without its source)")
    if not found:
        print("  no such job in this file")
        return
    print("  layouts  first  best of three   job")
    for sweep in found:
        source, rest = sweep.job.split("|", 1)
        print(f"  {sweep.layouts:7d} {sweep.first:6.1%} {sweep.third:14.1%}   {_short(source, 60)}: {rest.replace('|', ' ')}")
    first, third = [sweep.first for sweep in found], [sweep.third for sweep in found]
    hold = np.mean(first) <= 0.03 and max(first) <= 0.08 and np.mean(third) <= 0.015
    text = f"mean {np.mean(first):.1%}, most {max(first):.1%} slower than the best measured; best of three {np.mean(third):.1%}"
    print(f"  {text}   target 3 % / 8 % / 1.5 %: {'holds' if hold else 'DOES NOT HOLD'}")


def _left(asked: Table, path: Path) -> None:
    core = set(asked.excluded_core)
    print(f"\nExcluded core rows of {path.name}, by rules that name no row")
    reasons: dict[str, list[str]] = {}
    for row, reason in asked.excluded:
        if row in core:
            reasons.setdefault(reason, []).append(row)
    for reason, rows in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        print(f"  {len(rows):4d}  {reason}: {', '.join(rows[:3])}{', ..' if len(rows) > 3 else ''}")
    print("\nAssumed, where rows say nothing")
    for what, count in asked.assumed.most_common():
        print(f"  {count:4d}  {what}")


if __name__ == "__main__":
    sys.exit(main())
