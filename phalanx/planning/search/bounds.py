"""Branch and bound: the fastest layouts of a space that fit into memory, with every layout considered.

A space has millions to billions of layouts, so it is opened level by level: degrees, micro-batches and experts; then schedules;
then shards; then recomputation and offload. At each level a row is judged as if everything still open cost nothing: where that
is slower than the best layouts so far, the row is not opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.footprint import footprint
from phalanx.planning.cost.job_table import OFFLOAD, SCHEDULES
from phalanx.planning.cost.schedule_cost import SPLITS_BACKWARD
from phalanx.planning.cost.step_time import step_times
from phalanx.planning.machines.rates import Rates
from phalanx.planning.search.space import SELECTIVE, Columns, Space, pick, stack
from phalanx.spec.adapted_layers import trained_parameters

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NEAR = 1.01
"""Layouts within this factor of the fastest count as equal, and the simplest of them is taken."""
_BEAMS, _BEAMS_SPARSE = (60, 600), (200, 2000)
"""Rows of each level that are opened first, to get a good limit early; experts have more combinations."""
_FIRST, _LARGEST = 16, 2048
"""Rows that are opened at a time: few at first, as their results rule out others."""
_SLACK = 0.9
"""Factor on the memory bound of a row whose stages are still open: stages can be split slightly better than the bound
assumes."""
_ALMOST = 0.97
"""The same where stages are known: the best sharding differs little from the one that the bound assumes."""
_NEAREST = 32
"""Of the smallest layouts with plain schedules, this many are tried with all schedules."""
KIND = ("pipeline", "replicas", "context", "tensor", "expert", "expert_tensor")
"""Columns in which the best and the runners-up differ."""
_FEW = 512
"""Rows up to which judging all levels at once is faster than judging only what is still open."""


@dataclass(slots=True)
class Front:
    """The best layouts so far."""

    most: int
    columns: Columns = field(default_factory=dict)
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    timed: int = 0
    """Layouts that were timed one by one."""
    fitting: int = 0
    """Layouts that were judged one by one and fit."""
    limit: float = np.inf
    """A slower layout does not matter."""

    def _limit(self) -> float:
        kinds = np.stack([self.columns[name] for name in KIND])
        _, first = np.unique(kinds, axis=1, return_index=True)  # rows are sorted by time, so the first is the best of its kind
        ranked = np.sort(self.seconds[first])
        last = ranked[self.most - 1] if len(ranked) >= self.most else np.inf
        return float(max(last, NEAR * self.seconds[0]))

    def add(self, columns: Columns, seconds: Floats) -> None:
        """Adds layouts that fit, and drops those that no longer matter."""
        if not len(seconds):
            return
        if self.columns:
            columns = stack([self.columns, {name: columns[name] for name in self.columns}])
            seconds = np.concatenate((self.seconds, seconds))
        order = np.argsort(seconds, kind="stable")
        self.columns, self.seconds = pick(columns, order), seconds[order]
        self.limit = min(self.limit, self._limit())
        keep = self.seconds <= self.limit
        self.columns, self.seconds = pick(self.columns, keep), self.seconds[keep]


class Explorer:
    """A space that can be searched several times with different memory limits."""

    def __init__(self, space: Space, rates: Rates):
        self.space, self._rates = space, rates
        self._bases = space.joined(space.degrees(), "micro_batches")
        self.count = space.count(self._bases)
        """Number of legal layouts."""
        self._least: dict[int, Floats] = {}
        if self.count:  # what not even the most recomputation brings onto the device is never looked at again
            levels = list(range(len(space.levels)))
            hardest = least_bytes(space, self._bases, levels[-1:])[levels[-1]]
            small = hardest * _SLACK <= space.hardware.gpu.memory
            self._bases = pick(self._bases, small)
            self._least = {levels[-1]: hardest[small]} | least_bytes(space, self._bases, levels[:-1])

    def best(self, capacity: float, most: int = 10) -> Front:
        """The fastest layouts that fit into `capacity` bytes, with all that are nearly as fast."""
        front = Front(most)
        bases, bound = self._ordered(capacity)
        beams = _BEAMS if self.space.run.model.moe is None else _BEAMS_SPARSE
        for beam in beams if len(bound) else ():  # something good to begin with spares opening much else
            _open(self.space, self._rates, capacity, pick(bases, slice(beam)), front, beam)
        first = front.columns, front.seconds
        front.columns, front.seconds = {}, front.seconds[:0]
        at, size = 0, _FIRST
        while at < len(bound):
            stop = min(at + size, int(np.searchsorted(bound, front.limit, side="right")))
            if stop <= at:
                break
            _open(self.space, self._rates, capacity, pick(bases, slice(at, stop)), front)
            at, size = at + size, min(2 * size, _LARGEST)
        if len(first[1]) and not (len(front.seconds) and front.seconds[0] <= first[1][0]):
            front.add(*first)  # judged already, whatever a bound says of it
        if not len(front.seconds):
            self._last(capacity, front)
        return front

    def _last(self, capacity: float, front: Front) -> None:
        """Adds the smallest layout, if it fits: a bound that is slightly too high must not make a run unplannable."""
        need, row = smallest(self.space) if self.count else (np.inf, {})
        if need > capacity:
            return
        place = int(row["offload"][0])
        if host_bytes(self.space, row, place) > self.space.hardware.host_memory:
            place = OFFLOAD.index("nvme")
        if place in self.space.savings["offload"]:
            row = row | {"offload": np.array([place])}
            front.fitting += 1
            front.add(row, seconds_of(self.space, self._rates, row))

    def glimpse(self, capacity: float) -> Front:
        """A good layout that fits into `capacity` bytes, quickly: the best of the rows with the lowest bounds."""
        front = Front(1)
        bases, bound = self._ordered(capacity)
        if len(bound):
            _open(self.space, self._rates, capacity, pick(bases, slice(_BEAMS[0])), front, _BEAMS[0])
        return front

    def _ordered(self, capacity: float) -> tuple[Columns, Floats]:
        """Rows that could fit, lowest bound first."""
        if not len(self._bases["pipeline"]):
            return self._bases, np.zeros(0)
        level = first_fitting_level(self.space, self._bases, self._least, capacity / _SLACK)
        bases = pick(self._bases | {"level": level}, level >= 0)
        bound = _base_bound(self.space, self._rates, bases)
        order = np.argsort(bound, kind="stable")
        return pick(bases, order), bound[order]


def smallest(space: Space) -> tuple[float, Columns]:
    """The smallest layout, whether it fits or not: its bytes and its columns."""
    bases = space.joined(space.degrees(), "micro_batches")
    if not len(bases["pipeline"]):
        return np.inf, {}
    bases = space.joined(pick(bases, bases["micro_batch"] == bases["micro_batch"].min()), "experts")
    places = sorted(set(space.savings["offload"].tolist()))
    cpu = OFFLOAD.index("cpu")  # files spare a device no more than its host does
    hard = {"level": len(space.levels) - 1, "offload": cpu if cpu in places else places[-1]}
    rows = space.joined(bases, "orders")
    lean = np.isin(rows["schedule"], [SCHEDULES.index("1f1b"), SCHEDULES.index("zbv")])
    rows, total = _spread(space, pick(rows, lean) if lean.any() else rows, hard)
    if not len(total):
        return np.inf, {}
    # With more stages the rank of the head can have fewer layers, which decides between the smallest.
    near = np.argsort(total, kind="stable")[:_NEAREST]
    rows, total = _spread(space, space.joined({name: rows[name][near] for name in bases}, "orders"), hard)
    best = int(np.argmin(total))
    row = pick(rows, slice(best, best + 1))
    return float(total[best]), row | _codes(space, hard["level"], hard["offload"], 1)


def _spread(space: Space, rows: Columns, hard: dict[str, int]) -> tuple[Columns, Floats]:
    """Each row with every split of its replicas, and its bytes."""
    rows = space.joined(rows, "spreads")
    rows = pick(rows, rows["shard"] * 4 >= rows["replicas"]) if len(rows["pipeline"]) > 1 << 16 else rows
    return rows, bytes_of(space, rows, **hard)


def _codes(space: Space, level: int, offload: int, count: int) -> Columns:
    """Columns of recomputation and offload, the same in `count` rows."""
    codes = space.of_level(level) | {"offload": offload}
    return {name: np.full(count, code) for name, code in codes.items()}


def _base_bound(space: Space, rates: Rates, bases: Columns) -> Floats:
    """A lower bound in seconds: computing and communication inside blocks, spread evenly over the pipeline. Where experts are not
    joined yet, they compute at their best and nothing is sent to them."""
    if not len(bases["pipeline"]):
        return np.zeros(0)
    easy: dict[str, Any] = {"offload": int(space.savings["offload"].min())}
    undealt = space.run.model.moe is not None and "expert" not in bases
    if undealt:
        easy["expert"] = 1 << 40
    jobs = space.jobs(bases, data=bases["replicas"], **easy)
    times = step_times(jobs, _unadded(rates))
    layers = np.ceil(jobs.layers / jobs.pipeline)
    even = jobs.layers / (jobs.pipeline * layers)
    pieces = times.pieces
    each = (pieces["forward"] + pieces["input"] + pieces["weight"]) * jobs.accumulation
    if undealt:
        each = np.maximum(each - times.parts["expert"], 0.0)
    each = each * even + np.where(jobs.pipeline == 1, pieces["head"] * jobs.accumulation, 0.0)
    spread = rates.spread * np.log2(max(space.gpus / 8, 1.0))
    return np.broadcast_to(each * (1 + spread), len(bases["pipeline"]))


def _unadded(rates: Rates) -> Rates:
    """Constants for bounds: adding gradients takes no time. Rows are judged as whole replicas, which add more than shards do."""
    return replace(rates, adding=0.0)


def _open(space: Space, rates: Rates, capacity: float, bases: Columns, front: Front, beam: int | None = None) -> None:
    """Judges every layout of these rows that could matter; with `beam`, only that many rows of each level, lowest bound
    first."""
    rows = space.joined(bases, "experts")
    if space.run.model.moe is not None:
        rows, _ = _promising(rows, _base_bound(space, rates, rows), front, beam)
    rows = space.joined(rows, "orders")
    rows, bound = _promising(rows, _order_bound(space, rates, rows, front), front, beam)
    before, fits = rows["level"], find_fitting_level(space, rows, capacity / _ALMOST)
    rows, bound, more = pick(rows | {"level": fits}, fits >= 0), bound[fits >= 0], (fits != before)[fits >= 0]
    bound[more] = _order_bound(space, rates, pick(rows, more), front)
    rows, _ = _promising(rows, bound, front, beam)
    rows = space.joined(rows, "spreads")
    seconds = seconds_of(space, rates, rows, offload=int(space.savings["offload"].min()))
    front.timed += len(seconds)
    rows, seconds = _promising(rows, seconds, front, None)
    if len(rows["pipeline"]):
        _save(space, rates, capacity, rows, seconds, front)


def _promising(rows: Columns, bound: Floats, front: Front, beam: int | None) -> tuple[Columns, Floats]:
    """Rows that could still be among the best, with their bounds; with `beam`, at most that many."""
    if beam is not None and len(bound) > beam:
        kept = np.argpartition(bound, beam)[:beam]
        rows, bound = pick(rows, kept), bound[kept]
    keep = bound <= front.limit
    return pick(rows, keep), bound[keep]


def _order_bound(space: Space, rates: Rates, rows: Columns, front: Front) -> Floats:
    """A lower bound in seconds: a step in which replicas exchange nothing."""
    if not len(rows["pipeline"]):
        return np.zeros(0)
    jobs = space.jobs(rows, data=rows["replicas"], offload=int(space.savings["offload"].min()))
    times = step_times(jobs, _unadded(rates))
    front.timed += len(rows["pipeline"])
    parts = times.parts
    stragglers = 1 + parts["other"] / (times.step - parts["other"])
    bound = (times.step - parts["other"] - parts["data"] - parts["optimizer"] - parts["offload"]) * stragglers
    return np.broadcast_to(bound, len(rows["pipeline"]))


def seconds_of(space: Space, rates: Rates, rows: Columns, **more: Any) -> Floats:
    """Seconds of a step of each row."""
    count = len(rows["pipeline"])
    return np.broadcast_to(step_times(space.jobs(rows, **more), rates).step, count) if count else np.zeros(0)


def bytes_of(space: Space, rows: Columns, **more: Any) -> Floats:
    """Bytes of the fullest rank of each row."""
    count = len(rows["pipeline"])
    return np.broadcast_to(footprint(space.jobs(rows, **more)).total, count) if count else np.zeros(0)


def _save(space: Space, rates: Rates, capacity: float, rows: Columns, first: Floats, front: Front) -> None:
    """Tries recomputation and offload, the cheapest first: once a layout fits, more of it only costs time. But selective
    recomputation undoes split backwards, so schedules with split backwards are also tried with full recomputation, as is
    recomputing only some of the blocks. `first`: seconds of each row with its least recomputation and offload."""
    loose, lowest = selective_level(space), rows["level"]
    rows = {name: column for name, column in rows.items() if name != "level"}
    splits = SPLITS_BACKWARD[rows["schedule"]]
    reached = np.full(len(lowest), len(space.levels))  # the least recomputation that fits, with less offloaded
    places = sorted(set(space.savings["offload"].tolist()))
    for offload in places:
        open_ = np.ones(len(lowest), bool)
        for level, (mode, _) in enumerate(space.levels):
            trying = np.flatnonzero(open_ & (reached > level) & (lowest <= level))
            taken = {"level": level, "offload": offload}
            seconds = first[trying]
            new = lowest[trying] < level if offload == places[0] else np.ones(len(trying), bool)
            seconds[new] = seconds_of(space, rates, pick(rows, trying[new]), **taken)
            quick = seconds <= front.limit
            trying, seconds = trying[quick], seconds[quick]
            front.timed += int(new.sum())
            if not len(trying):
                continue
            some = pick(rows, trying)
            fits = (bytes_of(space, some, **taken) <= capacity) & (
                host_bytes(space, some, offload) <= space.hardware.host_memory
            )
            done = trying[fits]
            codes = _codes(space, level, offload, len(done))
            front.fitting += len(done)
            front.add(pick(some, fits) | codes, seconds[fits])
            final = done[~((mode == SELECTIVE) & (splits[done] | (level == loose)))]
            open_[final] = False
            reached[final] = level


def host_bytes(space: Space, rows: Columns, offload: Any) -> Any:
    """Bytes of one host's memory that offloaded states take: master weights and moments of every parameter that its ranks
    own."""
    moments = 4 if space.run.precision.optimizer == "bf16" else 8
    everywhere = trained_parameters(space.run.model, space.run.lora) * (4 + moments) * rows["data"] * rows["context"]
    return np.where(offload == OFFLOAD.index("cpu"), everywhere / space.gpus * min(space.hardware.node, space.gpus), 0.0)


def least_bytes(space: Space, rows: Columns, levels: list[int]) -> dict[int, Floats]:
    """Lower bound on the bytes of each row, by level of recomputation: everything sharded and offloaded."""
    ways, count = _ways(space, rows), len(rows["pipeline"])
    need = _bytes(space, rows, [(level, way) for level in levels for way in ways]).reshape(len(levels), len(ways), count)
    return dict(zip(levels, need.min(axis=1), strict=True))


def first_fitting_level(space: Space, rows: Columns, known: dict[int, Floats], capacity: float) -> Ints:
    """The first level at which each row fits; -1: none. `known`: the bytes by level, from `least_bytes`."""
    level = np.full(len(rows["pipeline"]), -1)
    for tried in sorted(known, reverse=True):
        level = np.where(known[tried] <= capacity, tried, level)
    return np.where(level == selective_level(space), 0, level)


def find_fitting_level(space: Space, rows: Columns, capacity: float) -> Ints:
    """The same, computing the bytes on the way: rows that do not fit at the last level are not judged further."""
    last, count = len(space.levels) - 1, len(rows["pipeline"])
    if count <= _FEW:
        return first_fitting_level(space, rows, least_bytes(space, rows, list(range(last + 1))), capacity)
    level = np.full(count, -1)
    for tried in (last, *range(last)):
        open_ = np.flatnonzero(level == (-1 if tried == last else last))
        need = least_bytes(space, pick(rows, open_), [tried])[tried]
        level[open_[need <= capacity]] = tried
    return np.where(level == selective_level(space), 0, level)


def selective_level(space: Space) -> int | None:
    """The level of selective recomputation where recomputing only some of the blocks is possible too, which can be faster
    and smaller."""
    some = any(every > 1 for _, every in space.levels) and len(space.levels) > 1
    return space.levels.index((SELECTIVE, 1)) if some and (SELECTIVE, 1) in space.levels else None


def _ways(space: Space, rows: Columns) -> list[Columns]:
    """Ways to shard the state that the bound has to consider, with stages as even and small as possible where they are
    still open. Whether sharding parameters saves anything over sharding gradients depends on the stages, so both are tried."""
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
    """Bytes of each row with each level and way."""
    count = len(rows["pipeline"])
    if not count or not asked:
        return np.zeros((len(asked), count))
    rows = {name: column for name, column in rows.items() if name != "level"}
    spread: dict[str, Any] = {"data": 1, "offload": int(space.savings["offload"].max())}
    moe = space.run.model.moe
    if moe is not None and "expert" not in rows:
        rows["expert"] = np.gcd(moe.experts, space.gpus // rows["pipeline"])

    def need(some: Columns, way: Columns, level: Any) -> Floats:
        return bytes_of(space, some, **spread, **way, shard=some["replicas"], level=level)

    if count > _FEW:
        return np.stack([need(rows, way, level) for level, way in asked])
    default = {"schedule": SCHEDULES.index("1f1b"), "stages": 1}
    names = list(dict.fromkeys(name for _, way in asked for name in way))
    ways = {name: np.concatenate([way.get(name, np.full(count, default.get(name, 0))) for _, way in asked]) for name in names}
    level = np.repeat([level for level, _ in asked], count)
    every = {name: np.tile(column, len(asked)) for name, column in rows.items()}
    return need(every, ways, level).reshape(len(asked), count)
