"""A pipeline schedule as a plain value: the list of actions of each rank, in order. The executor runs this list, the simulator
times it, the dashboard draws it and the planner reads its traits. `schedules/makers` builds the named ones.

`layout.schedule_file` and `phalanx schedule` read and write it as the compute-only CSV of torch.distributed.pipelining: a row per rank,
a cell per action, `2F0` for stage 2's forward of micro-batch 0.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from phalanx.spec.errors import RunError

KINDS = {"F": "forward", "B": "whole backward", "I": "input backward", "W": "weight backward"}
"""A whole backward (B) consists of an input backward (I), which the previous stage waits for, and a weight backward (W), which
no stage waits for."""

_MAX_PROBLEMS = 5
"""Problems of one kind to list: a file with stages on wrong ranks has hundreds."""

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: str
    """A key of KINDS."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every pipeline rank. Stage s + 1 consumes the output of stage s; the actions tell which rank holds a stage."""

    name: str
    ranks: int
    stages: int
    """Stages of the whole pipeline."""
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """By rank, in the rank's order."""

    @cached_property
    def _rank_of_stage(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.actions) for action in row}

    def rank_of(self, stage: int) -> int:
        return self._rank_of_stage[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The rank's stages, in the order in which a micro-batch passes them."""
        return tuple(sorted(stage for stage, home in self._rank_of_stage.items() if home == rank))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions, on any rank, that must be done before this one."""
        kind, stage, micro_batch = action
        if kind == "F":
            return (Action("F", stage - 1, micro_batch),) if stage else ()
        if kind == "W":
            return (Action("I", stage, micro_batch),)
        own = Action("F", stage, micro_batch)
        if stage == self.stages - 1:
            return (own,)
        return own, self._input_gradients[stage + 1, micro_batch]

    @cached_property
    def _input_gradients(self) -> dict[tuple[int, int], Action]:
        """(stage, micro-batch) to the action that computes the gradient of the stage's input."""
        return {(a.stage, a.micro_batch): a for row in self.actions for a in row if a.kind in ("B", "I")}

    @property
    def stages_per_rank(self) -> int:
        return self.stages // self.ranks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into input and weight backward."""
        return any(action.kind == "W" for row in self.actions for action in row)

    @cached_property
    def is_v_shaped(self) -> bool:
        """Whether micro-batches pass the ranks first to last and then back, so that rank 0 holds the first and the last stage."""
        return self.ranks > 1 and self.stages == 2 * self.ranks and self.stages_of(0) == (0, self.stages - 1)

    @cached_property
    def all_forwards_first(self) -> bool:
        """Whether every rank does all its forwards before its first backward."""
        return all("F" not in "".join(action.kind for action in row).lstrip("F") for row in self.actions)

    @cached_property
    def forwards_in_flight(self) -> tuple[int, ...]:
        """By rank: the largest number of forwards whose activations wait for a backward; a split backward frees them with W."""
        return tuple(self._peak(row, {"F": 1, "B": -1, "W": -1}) for row in self.actions)

    @cached_property
    def deferred_weight_backwards(self) -> tuple[int, ...]:
        """By rank: the largest number of input backwards whose weight backward is still to come."""
        return tuple(self._peak(row, {"I": 1, "W": -1}) for row in self.actions)

    @staticmethod
    def _peak(row: tuple[Action, ...], change: dict[str, int]) -> int:
        return max(accumulate((change.get(action.kind, 0) for action in row), initial=0))

    def problems(self) -> list[str]:
        """Why the schedule cannot be executed, one sentence each; empty if it can."""
        idle = (f"rank {rank} has nothing to do" for rank, row in enumerate(self.actions) if not row)
        return (
            _first_few(self._unknown_actions())
            or [*_first_few(self._divided_stages()), *_first_few(idle), *_first_few(self._wrong_counts())]
            or _first_few(self._deadlocks())
        )

    def _unknown_actions(self) -> Iterator[str]:
        if len(self.actions) != self.ranks:
            yield f"it has actions for {len(self.actions)} ranks, not for {self.ranks}"
        for rank, row in enumerate(self.actions):
            for a in row:
                if a.kind not in KINDS or not (0 <= a.stage < self.stages and 0 <= a.micro_batch < self.micro_batches):
                    limits = f"stages 0 to {self.stages - 1} and micro-batches 0 to {self.micro_batches - 1}"
                    yield f"rank {rank} has the action {a}, but there are only {limits}, of kinds F, B, I and W"

    def _divided_stages(self) -> Iterator[str]:
        homes: dict[int, set[int]] = {}
        for rank, row in enumerate(self.actions):
            for action in row:
                homes.setdefault(action.stage, set()).add(rank)
        for stage, ranks in sorted(homes.items()):
            if len(ranks) > 1:
                yield f"stage {stage} is on ranks {' and '.join(map(str, sorted(ranks)))}: a stage's weights are on one rank only"

    def _wrong_counts(self) -> Iterator[str]:
        times = Counter(action for row in self.actions for action in row)
        least = 2 * self.stages * self.micro_batches
        if times.total() < least:
            need = f"{self.stages} stages and {self.micro_batches} micro-batches need at least {least}"
            yield f"it has {times.total()} actions, but {need}: both are numbered from 0 without gaps"
            return
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                f, b, i, w = (times[Action(kind, stage, micro_batch)] for kind in "FBIW")
                if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                    has = f"{f} F, {b} B, {i} I and {w} W"
                    yield f"stage {stage} has {has} of micro-batch {micro_batch}: it needs one F, and one B or one I and one W"

    def runnable(self) -> Iterator[tuple[int, Action]]:
        """(rank, action) as the ranks follow their lists, until all are done or none can continue."""
        done: set[Action] = set()
        position = [0] * self.ranks
        progress = True
        while progress:
            progress = False
            for rank, row in enumerate(self.actions):
                while position[rank] < len(row) and done.issuperset(self.needs(row[position[rank]])):
                    action = row[position[rank]]
                    yield rank, action
                    done.add(action)
                    position[rank] += 1
                    progress = True

    def _deadlocks(self) -> Iterator[str]:
        """The ranks that are stuck when all ranks follow their lists, and the action each one waits for."""
        run = list(self.runnable())
        done, progress = {action for _, action in run}, Counter(rank for rank, _ in run)
        for rank, row in enumerate(self.actions):
            if progress[rank] < len(row):
                action = row[progress[rank]]
                missing = next(need for need in self.needs(action) if need not in done)
                where = f"{action}, its action {progress[rank] + 1}"
                yield f"rank {rank} waits forever: {where}, needs {missing}, which never comes before it"


def _first_few(problems: Iterable[str]) -> list[str]:
    every = list(problems)
    more = len(every) - _MAX_PROBLEMS
    return every if more <= 0 else [*every[:_MAX_PROBLEMS], f"and {more} more of the kind"]


def dump(schedule: Schedule) -> str:
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
