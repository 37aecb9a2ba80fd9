"""The quickest layout of a run on a cluster, or what a given layout comes to. `planning/search/search` puts limits and reasons around it;
`remedies` and `solve` ask it for other runs and clusters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.footprint import footprint
from phalanx.planning.cost.job_table import OFFLOAD, SCHEDULES
from phalanx.planning.cost.run_cost import assumptions
from phalanx.planning.cost.step_time import step_times
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Rates, rates_for
from phalanx.planning.search.bounds import NEAR, Explorer, Front, on_host, smallest
from phalanx.planning.search.candidate import Candidate, SearchResult, one, options
from phalanx.planning.search.space import Columns, Space, all_columns, compute_of, exactly, pick, scores_kept, space
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_DEGREES = ("pipeline", "replicas", "context", "tensor", "expert", "expert_tensor")
_ATTENTION = (
    "Attention runs in a fused kernel that keeps no table of scores.",
    "Windows hold several documents, so every block keeps a mask between them; data.document_mask = false spares that.",
    "No fused kernel of this GPU takes these heads and masks, so every block keeps whole tables of scores; data.document_mask = false or "
    "as many key/value heads as queries may spare that.",
)
"""By what `scores_kept` says."""
SAFE = 0.95
"""Part of a device's memory that plans fill."""
_CURVE = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Parts of the memory at which the trade-off of memory against time is looked at."""
_TRIES = 400
"""Smaller numbers of devices that are tried where the whole cluster cannot be divided."""


Aim = Literal["time", "price"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What an answer has to stay within; None: no limit."""

    fits_in: float | None = None
    """Bytes of a device that may be used."""
    deadline: float | None = None
    """Days for the whole run, failures included."""
    budget: float | None = None
    """US dollars for the whole run."""


NO_LIMITS = Limits()


def find(
    run: Run, hardware: Hardware, fits_in: float | None = None, most: int = 10, *, gpus: int | None = None
) -> SearchResult | None:
    """The quickest on all devices, or on `gpus` of them; None where nothing fits. Without reasons, and, where no more than one is
    wanted, without a curve."""
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
    picked = options(explorer.space, rates, pick(front.columns, np.array([chosen, *others])), fits_in)
    return SearchResult(
        best=picked[0],
        runners_up=tuple(picked[1:]),
        alternatives=(),
        considered=considered,
        fitting=front.fitting,
        timed=front.timed,
        seconds=time.process_time() - began,
        assumptions=assumptions_of(run, hardware),
        curve=_curve(explorer, rates, (capacity, fits_in), picked[0]) if most > 1 else (),
    )


def judge(run: Run, hardware: Hardware, fits_in: float | None = None) -> Candidate:
    """What the layout that the run file gives would come to, with `data` filled in; the micro-batch, recomputation and offload that
    it leaves open are the quickest that fit. Whether it fits is for the caller to see. RunError where it is not legal."""
    here, rates = exactly(run, hardware), rates_of(run, hardware)
    columns = all_columns(here)
    if not len(columns["pipeline"]):
        raise RunError(_illegal(here))
    # So few that all of them are judged at once.
    work, size = here.work(columns), len(columns["pipeline"])
    total = np.broadcast_to(footprint(work).total, size)
    hosted = np.broadcast_to(on_host(here, columns, columns["offload"]), size) <= hardware.host_memory
    fits = hosted & (total <= capacity_of(hardware, fits_in))
    if not fits.any():
        return one(here, rates, columns, int(np.argmin(np.where(hosted | ~hosted.any(), total, np.inf))), fits_in)
    front = Front(1)
    front.add(pick(columns, fits), np.broadcast_to(step_times(work, rates).step, size)[fits], total[fits])
    return one(here, rates, front.columns, _simplest(front), fits_in)


def possible(run: Run, hardware: Hardware, fits_in: float | None = None) -> bool:
    """Whether any layout fits; most of the time without looking at all of them."""
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
    """What neither the run file nor the catalogue says, in sentences."""
    said = []
    if run.precision.compute is None:
        said.append(f"The run computes in {compute_of(run, hardware)}.")
    if compute_of(run, hardware) == "bf16" and hardware.device == "cuda" and hardware.gpu.peak("bf16") is None:
        said.append(f'{hardware.gpu.name} has no bf16, and is counted with its fp16: set precision.compute = "fp16".')
    computing = hardware.gpu.peak(compute_of(run, hardware))
    if hardware.device == "cpu" and computing and (slower := (hardware.gpu.peak("fp32") or 0.0) / computing) > 10:
        said.append(
            f"{hardware.gpu.name} has no instructions for {compute_of(run, hardware)}, which takes about {slower:.0f} times as long there "
            'as fp32: set precision.compute = "fp32".'
        )
    if hardware.device != "cpu" and run.model.module is None:
        said.append(_ATTENTION[scores_kept(run, hardware)])
    if run.model.moe is not None:
        said.append("Every expert gets the same number of tokens.")
    return (*said, *assumptions(hardware))


def capacity_of(hardware: Hardware, fits_in: float | None = None) -> float:
    """Bytes of a device that a plan may fill: not quite all, as it is an estimate, and no more than somebody allows."""
    return SAFE * hardware.gpu.memory if fits_in is None else min(fits_in, SAFE * hardware.gpu.memory)


def _spaces(run: Run, hardware: Hardware, gpus: int | None) -> list[Space]:
    """All devices if the run can be divided among them; else the next smaller numbers that it can, and the next power of two."""
    asked = hardware.gpus if gpus is None else gpus
    whole = space(run, hardware, asked)
    if len(whole.degrees()["pipeline"]) or gpus is not None:
        return [whole]
    step = hardware.node if asked > hardware.node else 1
    found: list[Space] = []
    for number in range((asked - 1) // step * step, 0, -step)[:_TRIES]:
        smaller = space(run, hardware, number)
        if len(smaller.degrees()["pipeline"]):
            found.append(smaller)
        if len(found) == 2:
            break
    power = space(run, hardware, 1 << (asked.bit_length() - 1))
    if len(power.degrees()["pipeline"]) and power.gpus not in [one.gpus for one in found]:
        found.append(power)
    return found or [whole]


def _ranked(front: Front, most: int) -> tuple[int, list[int]]:
    """Rows of the winner and of the runners-up, which differ from it and from each other in their degrees."""
    chosen = _simplest(front)
    table = np.stack([front.columns[name] for name in _DEGREES], axis=1)
    seen, others = {tuple(table[chosen])}, []
    for row, degrees in enumerate(map(tuple, table)):
        if degrees not in seen:
            seen.add(degrees)
            others.append(row)
        if len(others) == most:
            break
    return chosen, others


def _simplest(front: Front) -> int:
    """Of those as quick as the quickest, the one with the fewest techniques, then the one with the lowest degrees; of that, the
    smallest micro-batch, as a larger one would only take memory."""
    near = front.seconds <= NEAR * front.seconds[0]
    columns = {name: column[near] for name, column in front.columns.items()}
    first = np.lexsort((front.seconds[near], _size(columns), _techniques(columns)))[0]
    alike = np.all([column == column[first] for name, column in columns.items() if name != "micro_batch"], axis=0)
    least = np.argmin(np.where(alike, columns["micro_batch"], np.inf))
    return int(np.flatnonzero(near)[least])


def _techniques(columns: Columns) -> npt.NDArray[np.float64]:
    """How many there are. Plain replicas are none; ZeRO-2 is one more than the others, as it sends most often."""
    many = sum((columns[name] > 1) * 1 for name in ("pipeline", "context", "tensor", "expert", "expert_tensor", "shard"))
    order = columns["schedule"] != SCHEDULES.index("1f1b")
    mixed = (columns["data"] > 1) & (columns["shard"] > 1)
    often = (columns["zero"] == 2) * 1
    saved = (columns["recompute"] > 0) + 2 * (columns["offload"] != OFFLOAD.index("none"))
    found: npt.NDArray[np.float64] = many + order + mixed + often + saved
    return found


def _size(columns: Columns) -> npt.NDArray[np.float64]:
    names = ("pipeline", "context", "tensor", "stages", "expert_tensor")
    found: npt.NDArray[np.float64] = np.sum([np.log2(columns[name]) for name in names], axis=0)
    return found


def _curve(explorer: Explorer, rates: Rates, limits: tuple[float, float | None], best: Candidate) -> tuple[Candidate, ...]:
    """The quickest at a few sizes of memory, as far as a glimpse shows; least memory first."""
    found = []
    for part in _CURVE:
        front = explorer.glimpse(part * limits[0])
        if len(front.seconds):
            found.append(one(explorer.space, rates, front.columns, 0, limits[1]))
    slower = sorted(found, key=lambda option: option.bytes)
    kept = [option for place, option in enumerate(slower) if all(option.seconds < before.seconds for before in slower[:place])]
    return (*(option for option in kept if option.bytes < best.bytes and option.seconds > best.seconds), best)


def _illegal(here: Space) -> list[str]:
    """Why the given layout cannot be."""
    run, layout = here.run, here.run.layout
    found = [finding.sentence for finding in layout_findings(run)]
    if run.batch % layout.replicas:
        found.append(
            f"The global batch of {run.batch} sequences is not divisible by {layout.replicas} replicas: change layout.data."
        )
    elif run.train.micro_batch is not None and run.batch // layout.replicas % run.train.micro_batch:
        share = run.batch // layout.replicas
        found.append(
            f"train.micro_batch = {run.train.micro_batch} does not divide the {share} sequences of a replica: change it."
        )
    return found or ["No layout that the run file allows is legal on this cluster: leave more keys of [layout] out."]


def cheaper(run: Run, hardware: Hardware, found: SearchResult, aim: Aim, limits: Limits, most: int) -> SearchResult:
    """Halves of the cluster, if fewer devices are cheaper or the only way to stay within a budget."""
    tried, gpus = [found], found.best.layout.ranks
    while gpus % 2 == 0 and gpus > 1:
        gpus //= 2
        smaller = find(run, hardware, limits.fits_in, most, gpus=gpus)
        if smaller is None:
            break
        tried.append(smaller)
    allowed = [one for one in tried if within(one.best, limits)]
    if not allowed:
        return found
    if aim == "time":
        return min(allowed, key=lambda one: one.best.expected_days)
    return min(allowed, key=lambda one: one.best.expected_days * one.best.layout.ranks)


def within(best: Candidate, limits: Limits) -> bool:
    """Whether an option stays within the limits."""
    return not beyond(best, limits)


def beyond(best: Candidate, limits: Limits) -> list[str]:
    """Limits that the best layout is over, in sentences."""
    said = []
    if limits.deadline is not None and best.expected_days > limits.deadline:
        said.append(
            f"The quickest layout takes {best.expected_days:,.1f} days, more than the deadline of {limits.deadline:,.1f} days: "
            "take more devices, fewer tokens or a smaller model."
        )
    if limits.budget is not None and best.price is not None and best.price > limits.budget:
        said.append(
            f"The run costs ${best.price:,.0f}, more than the budget of ${limits.budget:,.0f}: "
            "take cheaper devices, fewer tokens or a smaller model."
        )
    return said
