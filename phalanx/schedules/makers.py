"""The named pipeline schedules, and the schedule that a layout asks for. Training, planning, rehearsal and `phalanx schedule` call it.

To add a named schedule: write its maker here with `@_named`, and add the name to `Schedule` in `spec/layout`.

Every maker accepts any number of micro-batches. An action depends only on actions of its own micro-batch, so that a schedule
stays valid when the actions of some micro-batches are removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import get_args

from phalanx.schedules.actions import Action, Schedule, load
from phalanx.spec import layout as spec_layout
from phalanx.spec.errors import RunError
from phalanx.spec.layout import FIXED_STAGES, Layout, default_stages

NAMES: tuple[str, ...] = get_args(spec_layout.Schedule)

_Row = list[Action]
_Work = tuple[int, int]
"""(stage, micro-batch)."""
_Maker = Callable[[int, int, int, int], _Row]
"""(rank, ranks, micro-batches, stages per rank) to the rank's actions."""
_MAKERS: dict[str, _Maker] = {}


def _named(name: str) -> Callable[[_Maker], _Maker]:
    return partial(_MAKERS.setdefault, name)


def schedule_for(layout: Layout, micro_batches: int) -> Schedule | None:
    """The pipeline schedule of a layout; None without a pipeline. Raises RunError where there is none."""
    if layout.pipeline == 1:
        return None
    if layout.schedule_file is None:
        return make(layout.schedule, layout.pipeline, micro_batches, layout.stages_per_rank)
    schedule = load(Path(layout.schedule_file))
    if schedule.ranks != layout.pipeline:
        raise RunError(
            f'layout.schedule_file = "{layout.schedule_file}" is for {schedule.ranks} ranks, but layout.pipeline = {layout.pipeline}: '
            "set layout.pipeline to that number, or name another file."
        )
    if micro_batches > schedule.micro_batches:
        raise RunError(
            f'layout.schedule_file = "{layout.schedule_file}" is for {schedule.micro_batches} micro-batches, but a step has {micro_batches} '
            "(train.batch / layout.data / layout.shard / train.micro_batch): raise train.micro_batch, or write a file for as many with "
            "`phalanx schedule --csv`."
        )
    return resized(schedule, micro_batches)


def problems_for(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[str]:
    """Why there is no such schedule; empty if there is one."""
    if name not in NAMES:
        return [f'there is no pipeline schedule "{name}": use one of {", ".join(NAMES)}']
    problems = [
        f"a pipeline needs at least 1 {what}, not {value}"
        for what, value in (("rank", ranks), ("micro-batch", micro_batches), ("stage per rank", stages_per_rank))
        if value < 1
    ]
    fixed = FIXED_STAGES.get(name)
    if fixed == 1 and stages_per_rank > 1:
        other = "looped-bfs" if name == "gpipe" else "interleaved-1f1b"
        problems.append(f"{name} has 1 stage per rank, not {stages_per_rank}: use {other} for more")
    elif fixed not in (None, 1, stages_per_rank):
        problems.append(f"{name} has {fixed} stages per rank, not {stages_per_rank}: leave the number out")
    return problems


@lru_cache(256)
def make(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """The named schedule. Raises RunError where there is none."""
    per_rank = default_stages(name) if stages_per_rank is None else stages_per_rank
    if problems := problems_for(name, ranks, micro_batches, per_rank):
        raise RunError(problems)
    rows = [_MAKERS[name](rank, ranks, micro_batches, per_rank) for rank in range(ranks)]
    return Schedule(
        name=name,
        ranks=ranks,
        stages=ranks * per_rank,
        micro_batches=micro_batches,
        actions=tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in rows),
    )


def resized(schedule: Schedule, micro_batches: int) -> Schedule:
    """The same schedule for another number of micro-batches; one from a file cannot grow."""
    if micro_batches == schedule.micro_batches:
        return schedule
    if schedule.name in NAMES:
        return make(schedule.name, schedule.ranks, micro_batches, schedule.stages_per_rank)
    if micro_batches > schedule.micro_batches:
        has = f"{schedule.micro_batches} micro-batches, not {micro_batches}"
        raise RunError([f"the pipeline schedule {schedule.name} is for {has}: change the accumulation, or write another file"])
    rows = tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in schedule.actions)
    return replace(schedule, micro_batches=micro_batches, actions=rows)


def forward_only(like: Schedule) -> Schedule:
    """The forwards of one micro-batch, for evaluation, with the stages on the same ranks as in `like`."""
    rows = tuple(tuple(Action("F", stage, 0) for stage in like.stages_of(rank)) for rank in range(like.ranks))
    return replace(like, name="forward", micro_batches=1, actions=rows)


@_named("gpipe")
def _gpipe(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """All forwards, then all backwards."""
    return [Action(kind, rank, m) for kind in "FB" for m in range(micro_batches)]


@_named("1f1b")
def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """Warm up with forwards until the first gradient comes back, then alternate one forward and one backward."""
    work = [(rank, m) for m in range(micro_batches)]
    return _alternate(work, work, ranks - 1 - rank, "B")


@_named("looped-bfs")
def _looped_bfs(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """Breadth first: all micro-batches through the first stage, then the second, and back in the reverse order."""
    stages = range(rank, ranks * per_rank, ranks)
    row = [Action("F", stage, m) for stage in stages for m in range(micro_batches)]
    return row + [Action("B", stage, m) for stage in reversed(stages) for m in reversed(range(micro_batches))]


@_named("interleaved-1f1b")
def _interleaved(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """1F1B over several stages per rank: a round of micro-batches through the first stage, then through the second, and so on."""
    forwards, backwards, round_ = _rounds(rank, ranks, micro_batches, per_rank)
    return _alternate(forwards, backwards, (per_rank - 1) * round_ + 2 * (ranks - 1 - rank), "B")


@_named("interleaved-zero-bubble")
def _interleaved_zero_bubble(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """ZB1P: interleaved 1F1B with split backwards, a shorter warm-up, and weight backwards where a rank would idle."""
    forwards, backwards, round_ = _rounds(rank, ranks, micro_batches, per_rank)
    row: _Row = []
    deferred: deque[_Work] = deque()
    for action in _alternate(forwards, backwards, (per_rank - 1) * round_ + ranks - 1 - rank, "I"):
        row.append(action)
        if action.kind == "I":
            deferred.append((action.stage, action.micro_batch))
            if len(deferred) > rank:  # rank r defers r weight backwards and runs them at the end
                row.append(Action("W", *deferred.popleft()))
    return row + [Action("W", *work) for work in deferred]


def _alternate(forwards: list[_Work], backwards: list[_Work], warmup: int, kind: str) -> _Row:
    """Warm up with forwards, then alternate a forward and a backward of this kind."""
    row = [Action("F", *forward) for forward in forwards[:warmup]]
    for index, backward in enumerate(backwards):
        row += [Action("F", *forward) for forward in forwards[warmup + index : warmup + index + 1]]
        row.append(Action(kind, *backward))
    return row


def _rounds(rank: int, ranks: int, micro_batches: int, per_rank: int) -> tuple[list[_Work], list[_Work], int]:
    """A rank's forwards and its backwards, and the micro-batches of the largest round.

    A round has as many micro-batches as there are ranks, or a few more where they do not divide evenly. Larger rounds come
    first, so that the forwards of each round are far enough ahead of its backwards.
    """
    rounds = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, rounds)
    forwards, backwards, begin = [], [], 0
    for index in range(rounds):
        members = range(begin, begin := begin + size + (index < larger))
        for chunk in range(per_rank):
            forwards += [(chunk * ranks + rank, m) for m in members]
            backwards += [((per_rank - 1 - chunk) * ranks + rank, m) for m in members]
    return forwards, backwards, size + (larger > 0)


class _Writer:
    """Writes one rank of a V-shaped schedule: counts micro-batches and remembers deferred weight backwards.

    Chunk 0 is the rank's stage on the way down the ranks, chunk 1 the one on the way back up.
    """

    def __init__(self, rank: int, ranks: int):
        self.row: _Row = []
        self._stages = rank, 2 * ranks - 1 - rank
        self._done = {(kind, chunk): 0 for kind in "FI" for chunk in (0, 1)}
        self._deferred: list[_Work] = []

    def repeat(self, times: int, *actions: str) -> None:
        """Append actions by name: "F0" is the forward of chunk 0's next micro-batch, "I1" chunk 1's input backward, "W0" chunk 0's
        oldest deferred weight backward, "W" the oldest of both, if there is any."""
        for action in actions * times:
            kind, chunks = action[0], [int(chunk) for chunk in action[1:]] or [0, 1]
            if kind == "W":
                due = next((work for work in self._deferred if work[0] in [self._stages[chunk] for chunk in chunks]), None)
                if due is not None:
                    self._deferred.remove(due)
                    self.row.append(Action("W", *due))
                continue
            stage, key = self._stages[chunks[0]], ("F" if kind == "F" else "I", chunks[0])
            self.row.append(Action(kind, stage, self._done[key]))
            if kind == "I":
                self._deferred.append((stage, self._done[key]))
            self._done[key] += 1

    def count(self, chunk: int) -> int:
        """Forwards of a chunk so far."""
        return self._done["F", chunk]


@_named("zbv")
def _zbv(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """ZB-V (Qi et al. 2024): the memory of 1F1B, and no idle time if all actions take equally long."""
    enough = max(2 * ranks - 1, micro_batches)
    w = _Writer(rank, ranks)
    w.repeat(2 * (ranks - rank) - 1, "F0")
    w.repeat(rank, "F1", "F0")
    w.repeat(ranks - rank, "F1", "I1", "W1")
    while w.count(1) < w.count(0) or w.count(0) < enough:
        w.repeat(w.count(0) < enough, "F0")
        w.repeat(1, "I0", "W0", "F1", "I1", "W1")
    w.repeat(rank, "I0", "I1")
    w.repeat(ranks - rank, "I0", "W0")
    w.repeat(enough, "W1")
    w.repeat(enough, "W0")
    return w.row


@_named("dualpipev")
def _dualpipev(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """DualPipe-V (DeepSeek): forwards of one chunk overlap backwards of the other, so that each hides the other's messages."""
    later_ranks = ranks - rank - 1
    w = _Writer(rank, ranks)
    w.repeat(2 * later_ranks, "F0")
    w.repeat(rank + 1, "F0", "F1")
    w.repeat(later_ranks, "I1", "W", "F1")
    w.repeat(max(micro_batches, 2 * ranks) - 2 * ranks + rank + 1, "F0", "B1", "F1", "B0")
    w.repeat(later_ranks, "B1", "F1", "B0")
    # The second half of these backwards is split; the split begins half a step later from rank to rank.
    middle = (rank + 1) // 2
    for index, chunk in ((index, chunk) for index in range(rank + 1) for chunk in (1, 0)):
        split = index > middle or (index == middle and (rank % 2 == 1 or chunk == 0))
        w.repeat(1, f"{'I' if split else 'B'}{chunk}")
    w.repeat(later_ranks, "W", "I0")
    w.repeat(rank + 1, "W")
    return w.row
