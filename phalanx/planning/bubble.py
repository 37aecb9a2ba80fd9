"""How long a pipeline's ranks wait for each other, in closed form. `planning/time` calls it; a test holds it against a simulation."""

from __future__ import annotations

import numpy as np

from phalanx.planning.job_table import SCHEDULES, Column, Work


def bubble(work: Work, count: Column, forward: Column, back: Column, weight: Column) -> tuple[Column, Column]:
    """Seconds in which a rank waits for its pipeline, and messages on the way that is longest. Equal to a simulation of equal stages."""
    ranks, kind = np.asarray(work.pipeline), np.asarray(work.schedule)
    if not np.any(ranks > 1):
        return 0.0, 0.0
    code = {name: place for place, name in enumerate(SCHEDULES)}
    whole = forward + back + weight
    v_shaped = np.maximum(np.maximum(back / 2, back - weight), forward - back / 2)
    zero = forward + back - weight
    short = np.maximum(0.0, 1 - count / (2 * ranks))  # V-shaped schedules want two micro-batches a rank
    each = np.where(kind < code["interleaved-1f1b"], whole, whole / work.stages)
    each = np.where(kind == code["interleaved-zero-bubble"], np.maximum(zero, back) / work.stages, each)
    each = np.where(kind == code["zbv"], v_shaped + short * back, each)
    each = np.where(kind == code["dualpipev"], zero / 2 + short * whole, each)
    later = np.where(kind == code["dualpipev"], np.maximum(0.0, (ranks - 1) * (back - forward) - forward) / 2, 0.0)
    hops = 2 * (ranks * work.stages - 1)
    hops = np.where(kind == code["1f1b"], 2 * (1 - 1 / ranks) * count + 2 * np.maximum(ranks - 2, 0), hops)
    return np.where(ranks > 1, (ranks - 1) * each + later, 0.0), np.where(ranks > 1, hops, 0.0)
