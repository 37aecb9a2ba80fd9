"""The seven known pipeline schedules. Training makes one for its number of micro-batches, the CLI shows them.

A schedule made for more micro-batches than there are is still one when those too many are left out: what an action needs is
of its own micro-batch. So none is refused for having few of them, though few keep a pipeline idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from phalanx.schedules.actions import Action, Schedule
from phalanx.spec import layout
from phalanx.spec.errors import RunError

NAMES: tuple[str, ...] = get_args(layout.Schedule)
SINGLE = ("gpipe", "1f1b")
"""One stage on each rank."""
V_SHAPED = ("zbv", "dualpipev")
"""Two stages on each rank: the micro-batches go down the ranks and come back up."""

_Row = list[Action]


def problems_for(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[str]:
    """Why there is no such schedule; nothing if there is one."""
    if name not in NAMES:
        return [f'there is no pipeline schedule "{name}": use one of {", ".join(NAMES)}']
    found = [
        f"a pipeline needs at least 1 {what}, not {value}"
        for what, value in (("rank", ranks), ("micro-batch", micro_batches), ("stage per rank", stages_per_rank))
        if value < 1
    ]
    if name in SINGLE and stages_per_rank > 1:
        other = "looped-bfs" if name == "gpipe" else "interleaved-1f1b"
        found.append(f"{name} has 1 stage per rank, not {stages_per_rank}: use {other} for more")
    if name in V_SHAPED and stages_per_rank != 2:
        found.append(f"{name} has 2 stages per rank, not {stages_per_rank}: leave the number out")
    return found


def stages_by_default(name: str) -> int:
    """Stages per rank where nobody says."""
    return 1 if name in SINGLE else 2


def make(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """The known schedule of that name."""
    per_rank = stages_by_default(name) if stages_per_rank is None else stages_per_rank
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
    """The same for another number of micro-batches; of a file's schedule there are not more than the file has."""
    if micro_batches == schedule.micro_batches:
        return schedule
    if schedule.name in NAMES:
        return make(schedule.name, schedule.ranks, micro_batches, schedule.stages // schedule.ranks)
    if micro_batches > schedule.micro_batches:
        has = f"{schedule.micro_batches} micro-batches, not {micro_batches}"
        raise RunError([f"the pipeline schedule {schedule.name} is for {has}: change the accumulation, or write another file"])
    rows = tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in schedule.actions)
    return replace(schedule, micro_batches=micro_batches, actions=rows)


def forward_only(like: Schedule, micro_batches: int) -> Schedule:
    """Forwards alone, for evaluation, on stages that lie as in `like`.

    A rank that could begin several takes the one farthest along, so that little waits between the stages.
    """
    home = [like.rank_of(stage) for stage in range(like.stages)]
    mine = [like.stages_of(rank)[::-1] for rank in range(like.ranks)]
    passed = [micro_batches] + [0] * like.stages  # micro-batches that have left the stage before
    begun = [0] * like.stages
    rows: list[_Row] = [[] for _ in range(like.ranks)]
    while passed[-1] < micro_batches:
        ready = [next((stage for stage in stages if begun[stage] < passed[stage]), None) for stages in mine]
        for stage in ready:
            if stage is not None:
                rows[home[stage]].append(Action("F", stage, begun[stage]))
                begun[stage] += 1
        for stage in ready:
            if stage is not None:
                passed[stage + 1] += 1
    actions = tuple(tuple(row) for row in rows)
    return Schedule(name="forward", ranks=like.ranks, stages=like.stages, micro_batches=micro_batches, actions=actions)


def _gpipe(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """All forwards, then all backwards."""
    return [Action(kind, rank, m) for kind in "FB" for m in range(micro_batches)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """So many forwards that the first gradient comes back just then; from there on one of each in turn."""
    ahead = min(ranks - 1 - rank, micro_batches)
    row = [Action("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            row.append(Action("F", rank, ahead + m))
        row.append(Action("B", rank, m))
    return row


def _looped_bfs(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """Stage by stage: all micro-batches through the first, then the second, and the same way back."""
    stages = range(rank, ranks * per_rank, ranks)
    row = [Action("F", stage, m) for stage in stages for m in range(micro_batches)]
    return row + [Action("B", stage, m) for stage in reversed(stages) for m in reversed(range(micro_batches))]


def _interleaved(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """1F1B over several stages: a round of micro-batches through the first, the same round through the second …"""
    forwards, backwards, round_ = _rounds(rank, ranks, micro_batches, per_rank)
    ahead = min((per_rank - 1) * round_ + 2 * (ranks - 1 - rank), len(forwards))
    row = [Action("F", *one) for one in forwards[:ahead]]
    for index, backward in enumerate(backwards):
        if ahead + index < len(forwards):
            row.append(Action("F", *forwards[ahead + index]))
        row.append(Action("B", *backward))
    return row


def _interleaved_zero_bubble(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """The same with split backwards (ZB1P): fewer forwards ahead, and weight backwards where a rank would wait."""
    forwards, backwards, round_ = _rounds(rank, ranks, micro_batches, per_rank)
    ahead = min((per_rank - 1) * round_ + ranks - 1 - rank, len(forwards))
    row = [Action("F", *one) for one in forwards[:ahead]]
    for index, backward in enumerate(backwards):
        if ahead + index < len(forwards):
            row.append(Action("F", *forwards[ahead + index]))
        row.append(Action("I", *backward))
        if index >= rank:  # later ranks put off as many more, and fill the end with them
            row.append(Action("W", *backwards[index - rank]))
    return row + [Action("W", *one) for one in backwards[max(len(backwards) - rank, 0) :]]


def _rounds(
    rank: int, ranks: int, micro_batches: int, per_rank: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """(stage, micro-batch) of a rank's forwards and of its backwards, and the micro-batches of a round.

    A round has as many micro-batches as ranks, or a few more where they do not divide; the larger ones come first, so that
    the forwards of each are far enough ahead of its backwards.
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
    """Writes a V schedule: numbers micro-batches by itself, and remembers which weight backwards are still owed."""

    def __init__(self, rank: int, ranks: int):
        self.row: _Row = []
        self._stages = rank, 2 * ranks - 1 - rank
        self._done = {(kind, chunk): 0 for kind in "FI" for chunk in (0, 1)}
        self._owed: list[tuple[int, int]] = []

    def add(self, kind: str, chunk: int) -> None:
        """The next micro-batch's F, B or I of the way down (0) or up (1)."""
        key = ("F" if kind == "F" else "I", chunk)
        micro_batch = self._done[key]
        self._done[key] += 1
        self.row.append(Action(kind, self._stages[chunk], micro_batch))
        if kind == "I":
            self._owed.append((self._stages[chunk], micro_batch))

    def weight(self, chunk: int | None = None) -> None:
        """The oldest weight backward that is owed (of one stage); nothing if none is."""
        owed = [one for one in self._owed if chunk is None or one[0] == self._stages[chunk]]
        if owed:
            self._owed.remove(owed[0])
            self.row.append(Action("W", *owed[0]))

    def count(self, kind: str, chunk: int) -> int:
        return self._done[kind, chunk]


def _zbv(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """ZB-V (Qi and others 2024): as much memory as 1F1B, and no rank waits where all actions take equally long."""
    enough = max(2 * ranks - 1, micro_batches)
    w = _Writer(rank, ranks)
    for _ in range(2 * (ranks - rank) - 1):
        w.add("F", 0)
    for _ in range(rank):
        w.add("F", 1)
        w.add("F", 0)
    for _ in range(ranks - rank):
        _follow(w, "F1", "I1", "W1")
    while w.count("F", 1) < w.count("F", 0) or w.count("F", 0) < enough:
        if w.count("F", 0) < enough:
            w.add("F", 0)
        _follow(w, "I0", "W0", "F1", "I1", "W1")
    for _ in range(rank):
        _follow(w, "I0", "I1")
    for _ in range(ranks - rank):
        _follow(w, "I0", "W0")
    for _ in range(enough):
        w.weight(1)
    for _ in range(enough):
        w.weight(0)
    return w.row


def _dualpipev(rank: int, ranks: int, micro_batches: int, per_rank: int) -> _Row:
    """DualPipe-V (DeepSeek): forwards of one way beside backwards of the other, so that each hides the other's messages."""
    before = ranks - rank - 1
    w = _Writer(rank, ranks)
    for _ in range(2 * before):
        w.add("F", 0)
    for _ in range(rank + 1):
        _follow(w, "F0", "F1")
    for _ in range(before):
        _follow(w, "I1", "W", "F1")
    for _ in range(max(micro_batches, 2 * ranks) - 2 * ranks + rank + 1):
        _follow(w, "F0", "B1", "F1", "B0")
    for _ in range(before):
        _follow(w, "B1", "F1", "B0")
    # The second half of these is split; where that begins differs by one half step from rank to rank.
    for index, chunk in ((index, chunk) for index in range(rank + 1) for chunk in (1, 0)):
        middle = (rank + 1) // 2
        split = index > middle or (index == middle and (rank % 2 == 1 or chunk == 0))
        w.add("I" if split else "B", chunk)
    for _ in range(before):
        _follow(w, "W", "I0")
    for _ in range(rank + 1):
        w.weight()
    return w.row


def _follow(writer: _Writer, *words: str) -> None:
    """Actions in order: "F0" is the way down's forward, "I1" the way up's input backward, "W" any weight backward."""
    for word in words:
        if word[0] != "W":
            writer.add(word[0], int(word[1]))
        else:
            writer.weight(int(word[1]) if len(word) > 1 else None)


_MAKERS: dict[str, Callable[[int, int, int, int], _Row]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved-1f1b": _interleaved,
    "looped-bfs": _looped_bfs,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
