"""The search: the fastest layout of a run on a cluster, within limits, and what a given layout costs. `planning/planner`
adds the alternatives and the report; `planning/solve` searches other runs and clusters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from phalanx.planning.cost.job_table import OFFLOAD, SCHEDULES
from phalanx.planning.cost.run_cost import failure_assumptions
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Rates, rates_for
from phalanx.planning.search.bounds import KIND, NEAR, Explorer, Floats, Front, bytes_of, host_bytes, seconds_of, smallest
from phalanx.planning.search.candidate import Candidate, SearchResult, candidate_at, candidates_of
from phalanx.planning.search.space import (
    Columns,
    Space,
    all_columns,
    compute_of,
    engine_of,
    given_space,
    kept_scores,
    pick,
    space,
)
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_ATTENTION = (
    "Attention runs in a fused kernel that keeps no table of scores.",
    "Windows hold several documents, so every block keeps a mask between them; data.document_mask = false spares that.",
    "No fused kernel of this GPU takes these heads and masks, so every block keeps whole tables of scores; data.document_mask = false or "
    "as many key/value heads as queries may spare that.",
)
"""By the code that `kept_scores` returns."""
_XLA = (
    'The step is one program of XLA (engine.name = "xla"): what its compiler fuses, reorders and keeps is estimated, and seconds of compiling are not '
    "counted. `phalanx rehearse` compiles the step."
)
_XLA_TIMES = {
    "tpu": "Times rest on published steps of other programs on TPUs; this engine was not measured there.",
    "cuda": "Times are those of compiled PyTorch blocks on such GPUs; steps of this engine were not fitted.",
    "cpu": "Times are those of PyTorch on these cores. Virtual devices share them: they prove a layout, and are no faster.",
}
SAFE = 0.95
"""Fraction of a device's memory that plans fill."""
_CURVE = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Fractions of the memory at which the trade-off of memory against time is computed."""
_TRIES = 400
"""Most smaller numbers of devices that are tried where the run cannot be divided among all."""


Aim = Literal["time", "price"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an answer; None: no limit."""

    fits_in: float | None = None
    """Bytes of a device that may be used."""
    deadline: float | None = None
    """Days for the whole run, with failures."""
    budget: float | None = None
    """US dollars for the whole run."""


NO_LIMITS = Limits()


def find(
    run: Run, hardware: Hardware, fits_in: float | None = None, most: int = 10, *, gpus: int | None = None
) -> SearchResult | None:
    """The fastest layout on all devices, or on `gpus` of them; None where nothing fits. Without alternatives and, for
    `most` = 1, without the memory curve."""
    began = time.process_time()
    rates, capacity = rates_of(run, hardware), capacity_of(hardware, fits_in)
    best: tuple[Explorer, Front] | None = None
    considered = 0
    for here in _spaces(run, hardware, gpus):
        explorer = Explorer(here, rates)
        considered += explorer.count
        front = explorer.best(capacity, most)
        if len(front.seconds) and (best is None or front.seconds[0] < best[1].seconds[0]):
            best = explorer, front
    if best is None:
        return None
    explorer, front = best
    chosen, others = _ranked(front, most)
    picked = candidates_of(explorer.space, rates, pick(front.columns, np.array([chosen, *others])), fits_in)
    return SearchResult(
        best=picked[0],
        runners_up=tuple(picked[1:]),
        considered=considered,
        fitting=front.fitting,
        timed=front.timed,
        seconds=time.process_time() - began,
        assumptions=assumptions_of(run, hardware),
        curve=_curve(explorer, rates, (capacity, fits_in), picked[0]) if most > 1 else (),
    )


def judge(run: Run, hardware: Hardware, fits_in: float | None = None) -> Candidate:
    """What the run file's layout costs, with `data` filled in; what it leaves open of micro-batch, recomputation and
    offload is the fastest that fits. The result may not fit. RunError where the layout is not legal."""
    here, rates = given_space(run, hardware), rates_of(run, hardware)
    columns = all_columns(here)
    if not len(columns["pipeline"]):
        raise RunError(_illegal(here))
    # Few enough to judge all of them at once.
    total = bytes_of(here, columns)
    hosted = host_bytes(here, columns, columns["offload"]) <= hardware.host_memory
    fits = hosted & (total <= capacity_of(hardware, fits_in))
    if not fits.any():
        return candidate_at(here, rates, columns, int(np.argmin(np.where(hosted | ~hosted.any(), total, np.inf))), fits_in)
    front = Front(1)
    front.add(pick(columns, fits), seconds_of(here, rates, columns)[fits])
    return candidate_at(here, rates, front.columns, _simplest(front), fits_in)


def possible(run: Run, hardware: Hardware, fits_in: float | None = None) -> bool:
    """Whether any layout fits, in most cases without a full search."""
    capacity = capacity_of(hardware, fits_in)
    for here in _spaces(run, hardware, None):
        if smallest(here)[0] <= capacity:
            explorer = Explorer(here, rates_of(run, hardware))
            if len(explorer.glimpse(capacity).seconds) or len(explorer.best(capacity, 1).seconds):
                return True
    return False


def rates_of(run: Run, hardware: Hardware) -> Rates:
    """The constants for a run's number format and kind of model."""
    return rates_for(hardware, compute_of(run, hardware), moe=run.model.moe is not None)


def assumptions_of(run: Run, hardware: Hardware) -> tuple[str, ...]:
    """Sentences on what neither the run file nor the catalogue says."""
    sentences = []
    if run.precision.compute is None:
        sentences.append(f"The run computes in {compute_of(run, hardware)}.")
    if compute_of(run, hardware) == "bf16" and hardware.device == "cuda" and hardware.gpu.peak("bf16") is None:
        sentences.append(f'{hardware.gpu.name} has no bf16, and is counted with its fp16: set precision.compute = "fp16".')
    computing = hardware.gpu.peak(compute_of(run, hardware))
    if hardware.device == "cpu" and computing and (slower := (hardware.gpu.peak("fp32") or 0.0) / computing) > 10:
        sentences.append(
            f"{hardware.gpu.name} has no instructions for {compute_of(run, hardware)}, which takes about {slower:.0f} times as long there "
            'as fp32: set precision.compute = "fp32".'
        )
    if engine_of(run, hardware) == "xla":
        sentences += [_XLA, _XLA_TIMES[hardware.device]]
    elif hardware.device != "cpu" and run.model.is_builtin:
        sentences.append(_ATTENTION[kept_scores(run, hardware)])
    if run.model.moe is not None:
        sentences.append("Every expert gets the same number of tokens.")
    return (*sentences, *failure_assumptions(hardware, saves=run.checkpoint.save))


def capacity_of(hardware: Hardware, fits_in: float | None = None) -> float:
    """Bytes of a device that a plan may fill: less than all, as it is an estimate, and no more than `fits_in`."""
    return SAFE * hardware.gpu.memory if fits_in is None else min(fits_in, SAFE * hardware.gpu.memory)


def _spaces(run: Run, hardware: Hardware, gpus: int | None) -> list[Space]:
    """The space of all devices if they divide the run; else those of the next smaller numbers that do, and of the next
    power of two."""
    whole = space(run, hardware, gpus)
    asked = whole.gpus
    if len(whole.degrees()["pipeline"]) or gpus is not None:
        return [whole]
    step = hardware.node if asked > hardware.node else 1
    spaces: list[Space] = []
    for number in range((asked - 1) // step * step, 0, -step)[:_TRIES]:
        smaller = space(run, hardware, number)
        if len(smaller.degrees()["pipeline"]):
            spaces.append(smaller)
        if len(spaces) == 2:
            break
    power = space(run, hardware, 1 << (asked.bit_length() - 1))
    if len(power.degrees()["pipeline"]) and power.gpus not in [smaller.gpus for smaller in spaces]:
        spaces.append(power)
    return spaces or [whole]


def _ranked(front: Front, most: int) -> tuple[int, list[int]]:
    """Rows of the best and of the runners-up, which differ from it and from each other in their degrees."""
    chosen = _simplest(front)
    table = np.stack([front.columns[name] for name in KIND], axis=1)
    seen, others = {tuple(table[chosen])}, []
    for row, degrees in enumerate(map(tuple, table)):
        if degrees not in seen:
            seen.add(degrees)
            others.append(row)
        if len(others) == most:
            break
    return chosen, others


def _simplest(front: Front) -> int:
    """Chooses among the rows that are as fast as the fastest: the fewest techniques, then the lowest degrees, then the smallest
    micro-batch, because a larger one would only take memory."""
    near = front.seconds <= NEAR * front.seconds[0]
    columns = {name: column[near] for name, column in front.columns.items()}
    degrees = [np.log2(columns[name]) for name in ("pipeline", "context", "tensor", "stages", "expert_tensor")]
    first = np.lexsort((front.seconds[near], np.sum(degrees, axis=0), _techniques(columns)))[0]
    alike = np.all([column == column[first] for name, column in columns.items() if name != "micro_batch"], axis=0)
    least = np.argmin(np.where(alike, columns["micro_batch"], np.inf))
    return int(np.flatnonzero(near)[least])


def _techniques(columns: Columns) -> Floats:
    """Number of parallel techniques of each row. Replicas count as none; ZeRO-2 counts as one more than ZeRO-1 and 3, as it
    sends most often."""
    many = sum((columns[name] > 1) * 1 for name in ("pipeline", "context", "tensor", "expert", "expert_tensor", "shard"))
    order = columns["schedule"] != SCHEDULES.index("1f1b")
    mixed = (columns["data"] > 1) & (columns["shard"] > 1)
    often = (columns["zero"] == 2) * 1
    saved = (columns["recompute"] > 0) + 2 * (columns["offload"] != OFFLOAD.index("none"))
    return cast(Floats, many + order + mixed + often + saved)


def _curve(explorer: Explorer, rates: Rates, limits: tuple[float, float | None], best: Candidate) -> tuple[Candidate, ...]:
    """The fastest candidate at a few memory sizes, by quick searches; least memory first."""
    fastest = []
    for part in _CURVE:
        front = explorer.glimpse(part * limits[0])
        if len(front.seconds):
            fastest.append(candidate_at(explorer.space, rates, front.columns, 0, limits[1]))
    slower = sorted(fastest, key=lambda candidate: candidate.bytes)
    useful = [
        candidate
        for place, candidate in enumerate(slower)
        if candidate.bytes < best.bytes
        and candidate.seconds > best.seconds
        and all(candidate.seconds < before.seconds for before in slower[:place])
    ]
    return (*useful, best)


def _illegal(layouts: Space) -> list[str]:
    """Why the given layout is not legal."""
    run, layout = layouts.run, layouts.run.layout
    problems = [finding.sentence for finding in layout_findings(run)]
    if run.batch % layout.replicas:
        problems.append(
            f"The global batch of {run.batch} sequences is not divisible by {layout.replicas} replicas: change layout.data."
        )
    elif run.train.micro_batch is not None and run.batch // layout.replicas % run.train.micro_batch:
        share = run.batch // layout.replicas
        problems.append(
            f"train.micro_batch = {run.train.micro_batch} does not divide the {share} sequences of a replica: change it."
        )
    return problems or ["No layout that the run file allows is legal on this cluster: leave more keys of [layout] out."]


def cheaper(run: Run, hardware: Hardware, result: SearchResult, aim: Aim, limits: Limits, most: int) -> SearchResult:
    """The best on halves of the cluster, if fewer devices are cheaper or the only way to stay within the budget."""
    tried, gpus = [result], result.best.layout.ranks
    while gpus % 2 == 0 and gpus > 1:
        gpus //= 2
        smaller = find(run, hardware, limits.fits_in, most, gpus=gpus)
        if smaller is None:
            break
        tried.append(smaller)
    allowed = [other for other in tried if not beyond(other.best, limits)]
    if not allowed:
        return result
    if aim == "time":
        return min(allowed, key=lambda other: other.best.expected_days)
    return min(allowed, key=lambda other: other.best.expected_days * other.best.layout.ranks)


def beyond(best: Candidate, limits: Limits) -> list[str]:
    """Sentences on the limits that a candidate exceeds."""
    sentences = []
    if limits.deadline is not None and best.expected_days > limits.deadline:
        sentences.append(
            f"The fastest layout takes {best.expected_days:,.1f} days, more than the deadline of {limits.deadline:,.1f} days: "
            "take more devices, fewer tokens or a smaller model."
        )
    if limits.budget is not None and best.price is not None and best.price > limits.budget:
        sentences.append(
            f"The run costs ${best.price:,.0f}, more than the budget of ${limits.budget:,.0f}: "
            "take cheaper devices, fewer tokens or a smaller model."
        )
    return sentences
