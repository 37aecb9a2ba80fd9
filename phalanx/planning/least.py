"""How much of the blocks layouts have to recompute at least in order to fit, while how their state is spread is still open: what
`planning/explore` need not look at. Bytes here are a lower bound, of everything spread and offloaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.planning.candidates import Space
from phalanx.planning.footprint import footprint
from phalanx.planning.job_table import RECOMPUTE, SCHEDULES
from phalanx.planning.table import Columns, pick

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SELECTIVE = RECOMPUTE.index("selective")
_FEW = 512
"""Rows up to which asking everything at once takes less time than asking only what is still open."""


def least(space: Space, rows: Columns, levels: list[int]) -> dict[int, Floats]:
    """Bytes by the level of recomputation."""
    ways, count = _ways(space, rows), len(rows["pipeline"])
    found = _bytes(space, rows, [(level, way) for level in levels for way in ways]).reshape(len(levels), len(ways), count)
    return dict(zip(levels, found.min(axis=1), strict=True))


def fitting(space: Space, rows: Columns, known: dict[int, Floats], capacity: float) -> Ints:
    """The level from which on each fits; -1: none. `known`: what `least` said of them."""
    level = np.full(len(rows["pipeline"]), -1)
    for one in sorted(known, reverse=True):
        level = np.where(known[one] <= capacity, one, level)
    return np.where(level == unordered(space), 0, level)


def fitted(space: Space, rows: Columns, capacity: float) -> Ints:
    """The same where nothing is known yet: what the hardest level does not bring onto the device is not asked further."""
    levels, count = len(space.levels), len(rows["pipeline"])
    if count <= _FEW:
        return fitting(space, rows, least(space, rows, list(range(levels))), capacity)
    level, ways = np.full(count, -1), _ways(space, rows)
    for one in (levels - 1, *range(levels - 1)):
        open_ = np.flatnonzero(level == (-1 if one == levels - 1 else levels - 1))
        for way in ways:
            (need,) = _bytes(space, pick(rows, open_), [(one, {name: column[open_] for name, column in way.items()})])
            level[open_[need <= capacity]] = one
            open_ = open_[need > capacity]
    return np.where(level == unordered(space), 0, level)


def unordered(space: Space) -> int | None:
    """The level of selective recomputation, where some of the blocks may be recomputed instead, which can be quicker and smaller."""
    some = any(every > 1 for _, every in space.levels) and len(space.levels) > 1
    return space.levels.index((SELECTIVE, 1)) if some and (SELECTIVE, 1) in space.levels else None


def _ways(space: Space, rows: Columns) -> list[Columns]:
    """To spread a state, of stages as even and as small as they can be where they are still open. Whether spreading parameters spares
    anything over spreading gradients depends on the stages: both are looked at."""
    pipelined = rows["pipeline"] > 1
    ways = [{"zero": np.where(pipelined, 2, 3)}]
    if np.any(pipelined & (rows["replicas"] > 1)):
        ways.append({"zero": np.full(len(pipelined), 3)})
    if "schedule" not in rows and pipelined.any():
        most = np.where(pipelined, np.maximum(space.run.model.layers // rows["pipeline"], 1), 1)
        order = np.where(most > 1, SCHEDULES.index("interleaved-1f1b"), SCHEDULES.index("1f1b"))
        ways.append({"zero": np.full(len(pipelined), 3), "schedule": order, "stages": most})
    return ways


def _bytes(space: Space, rows: Columns, asked: list[tuple[int, Columns]]) -> Floats:
    """Of each row with each level and way."""
    count = len(rows["pipeline"])
    if not count or not asked:
        return np.zeros((len(asked), count))
    rows = {name: column for name, column in rows.items() if name != "level"}
    spread: dict[str, Any] = {"data": 1, "offload": int(space.savings["offload"].max())}
    moe = space.run.model.moe
    if moe is not None and "expert" not in rows:
        rows["expert"] = np.gcd(moe.experts, space.gpus // rows["pipeline"])

    def need(some: Columns, way: Columns, level: Any) -> Floats:
        work = space.work(some, **spread, **way, shard=some["replicas"], level=level)
        return np.broadcast_to(footprint(work).total, len(some["pipeline"]))

    if count > _FEW:
        return np.stack([need(rows, way, level) for level, way in asked])
    usual = {"schedule": SCHEDULES.index("1f1b"), "stages": 1}
    names = list(dict.fromkeys(name for _, way in asked for name in way))
    ways = {name: np.concatenate([way.get(name, np.full(count, usual.get(name, 0))) for _, way in asked]) for name in names}
    level = np.repeat([level for level, _ in asked], count)
    every = {name: np.tile(column, len(asked)) for name, column in rows.items()}
    return need(every, ways, level).reshape(len(asked), count)
