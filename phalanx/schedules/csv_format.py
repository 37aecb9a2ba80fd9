"""Pipeline schedules as CSV: a row per rank, a cell per action, `2F0` for stage 2's forward of micro-batch 0. This is the
compute-only CSV of torch.distributed.pipelining. `layout.schedule_file` and `phalanx schedule` read and write it."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from phalanx.schedules.actions import Action, Schedule
from phalanx.spec.errors import RunError

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def dump(schedule: Schedule) -> str:
    """The schedule as CSV, rank 0 first."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def load(path: Path) -> Schedule:
    """Read and check a file; RunError lists everything that is wrong with it."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RunError([f"{path}: the schedule cannot be read: {reason}"]) from None
    return loads(text, str(path))


def loads(text: str, file: str) -> Schedule:
    """Read and check CSV text; `file` is its name in messages."""
    problems: list[str] = []
    rows: list[tuple[Action, ...]] = []
    for cells in csv.reader(io.StringIO(text)):
        row: list[Action] = []
        for cell in cells:
            try:
                row += _parse(cell.strip())
            except ValueError as error:
                problems.append(f"{file}: row {len(rows) + 1}: {error}")
        rows.append(tuple(row))
    while rows and not rows[-1]:
        rows.pop()
    if not problems and not rows:
        problems.append(f"{file}: a schedule has a row per rank with actions such as 0F0 and 0B0, and this file has none")
    if problems:
        raise RunError(problems[:10])
    schedule = Schedule(
        name=Path(file).name,
        ranks=len(rows),
        stages=1 + max(action.stage for row in rows for action in row),
        micro_batches=1 + max(action.micro_batch for row in rows for action in row),
        actions=tuple(rows),
    )
    if problems := schedule.problems():
        raise RunError([f"{file}: {problem}" for problem in problems])
    return schedule


def _parse(cell: str) -> list[Action]:
    """A cell's actions: none if it is empty (the rank idles), two where torch overlaps a forward with a backward."""
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        return [action for part in pair[1].split(";") for action in _parse(part.strip())]
    match = _ACTION.fullmatch(cell)
    if match is None:
        form = "stage, kind (F, B, I or W) and micro-batch, such as 2F0; messages are derived from these"
        raise ValueError(f'"{cell[:40]}" is not an action: write {form}')
    return [Action(match[2], int(match[1]), int(match[3]))]
