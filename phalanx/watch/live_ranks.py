"""The ranks of a running job as their heartbeats show them: control/beats.json, which the controller writes while somebody touches control/top.

`phalanx top` uses it. Everything in the file is data that anybody may have written: what is broken is missing, never an error.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from phalanx.events.heartbeat import PHASES
from phalanx.events.rundir import RunDir
from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch.follow_lines import read_small
from phalanx.watch.plan_views import AXES
from phalanx.watch.rank_digest import MAX_RANKS
from phalanx.watch.record_values import entries, known, number, parse, table, whole

_MAX_FILE = 64 << 20
_STUCK = 3.0
"""Times the usual duration of a step for which nobody has made progress: then the ranks wait for one of them."""
_STUCK_SECONDS = 2.0
"""At least: the file may be this old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRank:
    """One rank. NaN and None: unknown."""

    rank: int
    node: int | None = None
    phase: str = "no heartbeat"
    since: float = math.nan
    """Seconds in this phase."""
    step: int = -1
    """Last complete step."""
    seconds: float = math.nan
    """Of that step."""
    busy: float = math.nan
    """The part of them in which the rank computed rather than waited for others."""

    @property
    def computing(self) -> float:
        """Fraction of the last step in which the rank did not wait for others."""
        return min(1.0, self.busy / self.seconds) if self.seconds > 0 else math.nan


class LiveRanks:
    """Asks for the heartbeats of a run and reads them."""

    def __init__(self, rundir: RunDir):
        self._rundir = rundir
        self._seen = self._identity()

    def ask(self) -> None:
        """Have them written for the next seconds. A run that has ended, or that this user may not write to, publishes none."""
        with contextlib.suppress(OSError):
            if self._rundir.control.is_dir():
                self._rundir.top_file.touch()

    def read(self) -> list[LiveRank] | None:
        """The ranks; None if nothing was written since the last call."""
        identity = self._identity()
        if identity is None or identity == self._seen:
            return None
        self._seen = identity
        return parse_beats(read_small(self._rundir.beats_file, _MAX_FILE))

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._rundir.beats_file, follow_symlinks=False)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def parse_beats(content: bytes) -> list[LiveRank] | None:
    """The ranks of a beats.json; None if it is not one."""
    record = parse(content)
    if record is None:
        return None
    count = min(whole(record, "ranks") or 0, MAX_RANKS)
    nodes = _nodes(entries(record, "nodes", MAX_RANKS), count)
    dead = {rank for rank in entries(record, "dead", MAX_RANKS) if isinstance(rank, int)}
    beats = table(record, "beats")
    return [_rank(rank, nodes[rank], beats.get(str(rank)), dead=rank in dead) for rank in range(count)]


def _nodes(groups: Sequence[Json], count: int) -> list[int | None]:
    nodes: list[int | None] = []
    for group in groups:
        if isinstance(group, list) and len(group) == 2 and all(type(each) is int for each in group):
            nodes += [group[0]] * max(0, min(group[1], count - len(nodes)))
    return nodes + [None] * (count - len(nodes))


def _rank(rank: int, node: int | None, beat: Json, *, dead: bool) -> LiveRank:
    if dead:
        return LiveRank(rank=rank, node=node, phase="lost")
    if not isinstance(beat, list) or len(beat) != 5 or beat[1] not in PHASES:
        return LiveRank(rank=rank, node=node)
    names = ("step", "phase", "since", "seconds", "busy")
    values: JsonObject = dict(zip(names, beat, strict=True))
    step = whole(values, "step")
    since, seconds, busy = (number(values, name) for name in ("since", "seconds", "busy"))
    phase = str(beat[1])
    return LiveRank(
        rank=rank, node=node, phase=phase, since=since, step=-1 if step is None else step, seconds=seconds, busy=busy
    )


def waited_for(ranks: Iterable[LiveRank]) -> list[LiveRank]:
    """The ranks, those first that all others wait for.

    That is a rank without a sign of life; else, while steps are taken, the one that computes longest in a step: the others compute less and wait for it.
    If nobody has made progress for long, it is the one that is behind, or that does something else than the others.
    """
    everyone = list(ranks)
    silent = [rank for rank in everyone if rank.step < 0]
    living = [rank for rank in everyone if rank.step >= 0]
    if living and is_stuck(living):
        phases = Counter(rank.phase for rank in living)
        living.sort(key=lambda rank: (rank.step, phases[rank.phase], -_finite(rank.since), rank.rank))
    else:
        living.sort(key=lambda rank: (-_finite(rank.busy), rank.rank))
    return [*silent, *living]


def is_stuck(living: Sequence[LiveRank]) -> bool:
    """Whether no rank has made progress for several times the usual duration of a step."""
    usual = median(_finite(rank.seconds) for rank in living)
    return min(_finite(rank.since) for rank in living) > max(_STUCK * usual, _STUCK_SECONDS)


def _finite(value: float) -> float:
    return known(value) or 0.0


def place(rank: int, layout: JsonObject, ranks: int) -> dict[str, int]:
    """Where a rank is in each degree of the layout above 1; empty if the layout is of another number of ranks."""
    sizes = [max(1, whole(layout, axis) or 1) for axis in AXES]
    if math.prod(sizes) != ranks:
        return {}
    found: dict[str, int] = {}
    for axis, degree in reversed(list(zip(AXES, sizes, strict=True))):
        found[axis] = rank % degree
        rank //= degree
    return {axis: found[axis] for axis, degree in zip(AXES, sizes, strict=True) if degree > 1}
