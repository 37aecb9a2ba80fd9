"""What a pipeline schedule costs: activations in flight, deferred weight backwards, and the bubble, for every job of a table at once.

The search asks for hundreds of thousands of pipelines, so the known schedules have closed forms here, which tests hold against the
schedules' lists of actions; a schedule without a closed form is counted and simulated from its list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.job_table import SCHEDULES, JobTable
from phalanx.planning.machines.rates import Column
from phalanx.schedules.makers import make
from phalanx.schedules.timing import simulate

CODE = {name: code for code, name in enumerate(SCHEDULES)}
_EXAMPLES = [make(name, 4, 16) for name in SCHEDULES]
FORWARDS_FIRST = np.array([example.all_forwards_first for example in _EXAMPLES])
SPLITS_BACKWARD = np.array([example.splits_backward for example in _EXAMPLES])
V_SHAPED = np.array([example.is_v_shaped for example in _EXAMPLES])
"""Traits by the schedule's code, which all its sizes share."""
_CLOSED_FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
_WITHOUT = [code for name, code in CODE.items() if name not in _CLOSED_FORMS]
"""Codes of schedules that are counted from their lists."""
_ROUNDS = 4
"""Micro-batches per stage from which on more of them change neither the counts nor the bubble."""

_Count = Callable[[str, int, int, int], tuple[int, ...]]
"""(name, ranks, micro-batches, stages per rank) to a number for each rank."""


def in_flight(jobs: JobTable, rank: Column) -> Column:
    """Forwards of a rank's stages that wait for their backward, at most."""
    kind, ranks, stages = jobs.schedule, jobs.pipeline, jobs.stages
    count = np.floor(jobs.accumulation + 0.5)
    # By division: numpy takes far longer for floor division of floats.
    rounds = np.maximum(1, np.floor(count / ranks))
    size = np.ceil(count / rounds)  # micro-batches of a round
    loops = (stages - 1) * size
    most = np.minimum(ranks - rank, count)
    most = np.where(kind == CODE["gpipe"], count, most)
    most = np.where(kind == CODE["looped-bfs"], count * stages, most)
    most = np.where(kind == CODE["interleaved-1f1b"], np.minimum(loops + 2 * (ranks - 1 - rank) + 1, count * stages), most)
    # Deferred weight backwards keep their activations: rank r defers r of them.
    most = np.where(kind == CODE["interleaved-zero-bubble"], np.minimum(loops + ranks, count * stages), most)
    down = 2 * ranks - rank - 1  # forwards on the way down before the first backward; on the way up, rank + 1
    turned = np.minimum(down, count) + np.minimum(rank + 1, count)
    most = np.where(kind == CODE["zbv"], turned, most)
    most = np.where(kind == CODE["dualpipev"], turned + (count > down), most)
    most = _counted(jobs, rank, most, lambda *key: make(*key).forwards_in_flight) if _WITHOUT else most
    return np.where(ranks == 1, 1, most)


def deferred(jobs: JobTable, rank: Column) -> Column:
    """Backwards of a rank whose weight half is deferred, at most. With few micro-batches a V-shaped schedule defers nothing."""
    kind, ranks = jobs.schedule, jobs.pipeline
    many = jobs.accumulation > 2 * ranks - 1.5
    most = np.where(kind == CODE["interleaved-zero-bubble"], np.minimum(rank + 1, jobs.accumulation * jobs.stages), 0)
    most = np.where(kind == CODE["zbv"], np.where(many, 2 * rank + 1, 1), most)
    most = np.where(kind == CODE["dualpipev"], np.where(many, rank + 1, 1), most)
    most = _counted(jobs, rank, most, lambda *key: make(*key).deferred_weight_backwards) if _WITHOUT else most
    return np.where(ranks == 1, 0, most)


def overlapped_fraction(jobs: JobTable) -> Column:
    """Fraction of the forwards that run next to a backward (`schedules/pairs`): all but those that fill and drain the pipeline."""
    ends = np.minimum((2.5 * jobs.pipeline - 0.5) / (2 * np.maximum(jobs.accumulation, 1)), 1.0)
    return np.where((jobs.schedule == CODE["dualpipev"]) & (jobs.pipeline > 1), 1 - ends, 0.0)


def bubble(jobs: JobTable, count: Column, forward: Column, back: Column, weight: Column) -> tuple[Column, Column]:
    """Seconds in which a rank waits for its pipeline, and messages on the longest path. Equal to a simulation of equal stages."""
    ranks, kind = jobs.pipeline, jobs.schedule
    if not np.any(ranks > 1):
        return 0.0, 0.0
    whole = forward + back + weight
    v_shaped = np.maximum(np.maximum(back / 2, back - weight), forward - back / 2)
    zero = forward + back - weight
    short = np.maximum(0.0, 1 - count / (2 * ranks))  # V-shaped schedules need two micro-batches per rank
    each = np.where(kind < CODE["interleaved-1f1b"], whole, whole / jobs.stages)
    each = np.where(kind == CODE["interleaved-zero-bubble"], np.maximum(zero, back) / jobs.stages, each)
    each = np.where(kind == CODE["zbv"], v_shaped + short * back, each)
    each = np.where(kind == CODE["dualpipev"], zero / 2 + short * whole, each)
    later = np.where(kind == CODE["dualpipev"], np.maximum(0.0, (ranks - 1) * (back - forward) - forward) / 2, 0.0)
    hops = 2 * (ranks * jobs.stages - 1)
    hops = np.where(kind == CODE["1f1b"], 2 * (1 - 1 / ranks) * count + 2 * np.maximum(ranks - 2, 0), hops)
    waited = (ranks - 1) * each + later
    if _WITHOUT:
        idle = _counted(jobs, 0 * ranks, np.full(np.shape(waited), np.nan), _idle)
        waited = np.where(np.isnan(idle), waited, idle / 1000 * whole)
    return np.where(ranks > 1, waited, 0.0), np.where(ranks > 1, hops, 0.0)


def _counted(jobs: JobTable, rank: Column, known: Column, count: _Count, codes: list[int] = _WITHOUT) -> Column:
    """`known`, with the jobs of schedules without a closed form counted from their lists."""
    columns = (jobs.schedule, jobs.pipeline, np.floor(jobs.accumulation + 0.5), jobs.stages, rank, known)
    kind, ranks, batches, stages, place, value = (np.atleast_1d(column) for column in np.broadcast_arrays(*columns))
    if not np.isin(kind, codes).any():
        return known
    counts: npt.NDArray[np.float64] = value.astype(np.float64)
    for row in np.flatnonzero(np.isin(kind, codes) & (ranks > 1)):
        pipeline, per_rank = int(ranks[row]), int(stages[row])
        most = min(int(batches[row]), _ROUNDS * pipeline * per_rank)
        counts[row] = count(SCHEDULES[int(kind[row])], pipeline, most, per_rank)[int(place[row])]
    return counts.reshape(np.broadcast(*columns).shape)


@lru_cache(4096)
def _idle(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Time that a rank waits in a step with equal forward, input and weight backward, in thousandths of a micro-batch's time."""
    schedule = make(name, ranks, micro_batches, stages_per_rank)
    seconds = simulate(schedule).stop - 3 * stages_per_rank * micro_batches
    return (round(1000 * seconds / (3 * stages_per_rank)),) * ranks
