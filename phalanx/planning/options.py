"""Options out of columns: a layout with everything that is promised of it. `planning/search`, `why` and `solve` make theirs here."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import numpy as np

from phalanx.planning.candidate import Candidate
from phalanx.planning.candidates import Space, layout_of
from phalanx.planning.footprint import Footprint, footprint
from phalanx.planning.goodput import upkeep
from phalanx.planning.job_table import OFFLOAD, RECOMPUTE, Work
from phalanx.planning.price import cost
from phalanx.planning.rates import Rates
from phalanx.planning.table import Columns, pick
from phalanx.planning.time import step_times
from phalanx.planning.times import PARTS, Times

_DAY = 86400.0
_PIECES = ("forward", "input", "weight", "head", "hop", "tail")


class _Judged(NamedTuple):
    """All rows, judged together."""

    work: Work
    held: Footprint
    times: Times


def options(space: Space, rates: Rates, columns: Columns, capacity: float | None = None) -> list[Candidate]:
    """One of each row. `capacity`: bytes that it may take, where those are fewer than the device has."""
    if not len(columns["pipeline"]):
        return []
    work = space.work(columns)
    judged = _Judged(work, footprint(work), step_times(work, rates))
    return [_option(space, judged, row, capacity) for row in range(len(columns["pipeline"]))]


def _option(space: Space, judged: _Judged, row: int, capacity: float | None) -> Candidate:
    work, held, times = judged
    seconds = _real(times.step, row)
    run, hardware = space.run, space.hardware
    layout = layout_of(run, work, row)
    tokens = run.batch_tokens / seconds
    own = 12.0 * run.model.parameters() / (layout.pipeline * layout.tensor * layout.shard)
    kept = upkeep(hardware, state=own, ranks=space.gpus, step=seconds)
    counts = float(kept.goodput)
    spent = cost(hardware, step=seconds, steps=run.steps, goodput=counts, devices=space.gpus)
    peak = float(work.peak) * space.gpus
    return Candidate(
        layout=layout,
        micro_batch=_at(work.micro_batch, row),
        accumulation=run.batch // layout.replicas // _at(work.micro_batch, row),
        compute=cast(Literal["fp32", "bf16", "fp16", "fp8"], space.compute),
        recompute=cast(Literal["none", "selective", "full"], RECOMPUTE[_at(work.recompute, row)]),
        recompute_every=_at(work.recompute_every, row) if _at(work.recompute, row) else 1,
        offload=cast(Literal["none", "cpu", "nvme"], OFFLOAD[_at(work.offload, row)]),
        memory=held.at(row),
        fullest=_at(held.fullest, row),
        capacity=float(work.memory) if capacity is None else min(capacity, float(work.memory)),
        seconds=seconds,
        low=_real(times.low, row),
        high=_real(times.high, row),
        split={part: _real(getattr(times, part), row) for part in PARTS},
        pieces={piece: _real(getattr(times, piece), row) for piece in _PIECES},
        tokens_per_second=tokens,
        mfu=tokens * run.model.flops_per_token(run.train.sequence_length) / peak if peak else None,
        days=seconds * run.steps / _DAY,
        goodput=counts,
        save_every=None if kept.save_every is None else float(kept.save_every),
        price=spent.dollars,
        energy=spent.joules,
        compiled=run.memory.compile,
    )


def one(space: Space, rates: Rates, columns: Columns, row: int, capacity: float | None = None) -> Candidate:
    """Of one row."""
    return options(space, rates, pick(columns, slice(row, row + 1)), capacity)[0]


def _at(column: Any, row: int) -> int:
    return int(column[row] if np.ndim(column) else column)


def _real(column: Any, row: int) -> float:
    return float(column[row] if np.ndim(column) else column)
