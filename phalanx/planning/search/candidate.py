"""One layout of a run with everything that the cost model predicts of it, and the result of a search. `search/search` makes
candidates; what shows, compares, simulates or trains a plan reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from phalanx.planning.cost.footprint import Footprint, footprint
from phalanx.planning.cost.job_table import OFFLOAD, RECOMPUTE, JobTable
from phalanx.planning.cost.run_cost import price_and_energy, saved_bytes, upkeep
from phalanx.planning.cost.step_time import Times, step_times
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Rates
from phalanx.planning.search.space import Columns, Space, at, engine_of, layout_of, pick
from phalanx.recovery.relayout import replicated_elsewhere
from phalanx.spec.adapted_layers import flops_per_token, trained_parameters
from phalanx.spec.layout import FIXED_STAGES, Layout
from phalanx.spec.run import Memory, Run

_SCHEDULE_SUFFIXES = {"1f1b": "", "interleaved-1f1b": "", "looped-bfs": "-bfs", "interleaved-zero-bubble": "-zb"}
"""Short names of schedules in the name of a layout; the other schedules keep their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with every other choice made, and its predicted memory, time and price."""

    layout: Layout
    micro_batch: int
    accumulation: int
    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    recompute: Literal["none", "selective", "full"]
    recompute_every: int
    """Only every N-th block is recomputed."""
    offload: Literal["none", "cpu", "nvme"]

    memory: dict[str, float]
    """Bytes of the fullest rank by component: parameters, gradients, optimizer, activations, logits, gathered, buffers, fixed."""
    fullest: int
    """The pipeline rank that uses most memory."""
    capacity: float
    """Bytes of the device."""

    seconds: float
    """Time of a step."""
    low: float
    """P10 of the step."""
    high: float
    """P90 of the step."""
    split: dict[str, float]
    """Seconds of a step by part, as `planning/cost/step_time` names the parts."""
    pieces: dict[str, float]
    """Seconds of forward, input, weight, head, hop and tail of one micro-batch: what a simulation of the step starts from."""

    tokens_per_second: float
    mfu: float | None
    days: float
    """Time of the whole run without failures."""
    goodput: float
    """Fraction of the time that becomes progress, with failures and saving."""
    save_every: float | None
    """Seconds between checkpoints that give this goodput; None: nothing fails, or nothing is saved."""
    price: float | None
    """US dollars of the whole run, with failures; None: no price is known."""
    energy: float | None
    """Joules of the whole run; None: no power is known."""

    engine: Literal["torch", "xla"] = "torch"
    compiled: bool = False
    """Whether blocks are compiled."""
    loss_chunk: int = 0
    """Tokens whose logits exist at the same time; 0: all of a micro-batch."""

    @property
    def name(self) -> str:
        return layout_name(self.layout)

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.capacity

    @property
    def expected_days(self) -> float:
        """Time of the whole run with failures and saving."""
        return self.days / self.goodput

    @property
    def gpu_hours(self) -> float:
        """Device-hours of the whole run with failures and saving."""
        return 24 * self.expected_days * self.layout.ranks

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """P10 and P90 of everything that follows from the step's time, by field name."""
        low, high = self.low / self.seconds, self.high / self.seconds
        ranges: dict[str, tuple[float, float]] = {}
        for name in ("seconds", "days", "expected_days", "gpu_hours", "price", "energy", "tokens_per_second", "mfu"):
            if (value := getattr(self, name)) is not None:
                shrinks = name in ("tokens_per_second", "mfu")
                ranges[name] = (value / high, value / low) if shrinks else (value * low, value * high)
        return ranges

    def with_savings(self, memory: Memory) -> Memory:
        """The run file's [memory] with what this candidate has chosen."""
        chunk = self.loss_chunk if memory.loss_chunk is None and self.loss_chunk else memory.loss_chunk
        if self.engine == "xla":
            recompute, every = self.recompute, self.recompute_every
            return replace(memory, recompute=recompute, recompute_every=every, offload="none", loss_chunk=chunk)
        savings = replace(memory, recompute=self.recompute, recompute_every=self.recompute_every, offload=self.offload)
        return replace(savings, compile=self.compiled, loss_chunk=chunk)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A layout that a reader may expect, and why it is not the best."""

    candidate: Candidate | None
    """None: the layout is not legal."""
    name: str
    """Such as "TP16"."""
    reason: str
    """Such as "leaves the NVLink island, +38 % exposed communication"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best candidate of a search and the candidates it was compared with."""

    best: Candidate
    runners_up: tuple[Candidate, ...] = ()
    """The next candidates, each with another layout, fastest first."""
    alternatives: tuple[Alternative, ...] = ()
    considered: int
    """Legal candidates that the search covered. Most are ruled out in groups, by bounds that no member can beat."""
    fitting: int
    """Candidates that were judged one by one and fit."""
    seconds: float = 0.0
    """CPU time of the search."""
    timed: int = 0
    """Candidates that were judged one by one."""
    assumptions: tuple[str, ...] = ()
    """Sentences on what neither the run file nor the catalogue says."""
    curve: tuple[Candidate, ...] = ()
    """Trade-off of memory against time: the fastest candidate at each memory, least memory first."""


def layout_name(layout: Layout) -> str:
    """The layout in the field's shorthand: PP16v8 ZeRO1×128 TP8+SP."""
    expert = f"EP{layout.expert}" + (f"×{layout.expert_tensor}" if layout.expert_tensor > 1 else "")
    order = _SCHEDULE_SUFFIXES.get(layout.schedule_file or layout.schedule, f"-{layout.schedule_file or layout.schedule}")
    # V-shaped schedules always have two stages per rank.
    stages = f"v{layout.stages_per_rank}" if layout.stages_per_rank > 1 and layout.schedule not in FIXED_STAGES else ""
    method = "" if layout.context_method == "ring" else f"-{layout.context_method}"
    parts = [
        f"PP{layout.pipeline}{stages}{order}" if layout.pipeline > 1 else "",
        f"DP{layout.data}" if (layout.data or 1) > 1 else "",
        (f"FSDP{layout.shard}" if layout.zero == 3 else f"ZeRO{layout.zero}×{layout.shard}") if layout.shard > 1 else "",
        f"CP{layout.context}{method}" if layout.context > 1 else "",
        f"TP{layout.tensor}{'+SP' if layout.sequence else ''}" if layout.tensor > 1 else "",
        expert if layout.expert * layout.expert_tensor > 1 else "",
    ]
    return " ".join(part for part in parts if part) or "one device"


_DAY = 86400.0


def candidates_of(space: Space, rates: Rates, columns: Columns, capacity: float | None = None) -> list[Candidate]:
    """One candidate per row. `capacity`: bytes that may be used, where that is less than the device has."""
    if not len(columns["pipeline"]):
        return []
    jobs = space.jobs(columns)
    memory, times = footprint(jobs), step_times(jobs, rates)
    limit = float(jobs.memory) if capacity is None else min(capacity, float(jobs.memory))
    return [_candidate(space, jobs, memory, times, row, limit) for row in range(len(columns["pipeline"]))]


def _candidate(space: Space, jobs: JobTable, memory: Footprint, times: Times, row: int, capacity: float) -> Candidate:
    seconds, micro_batch, recompute = float(at(times.step, row)), int(at(jobs.micro_batch, row)), int(at(jobs.recompute, row))
    run, hardware = space.run, space.hardware
    layout = layout_of(run, jobs, row)
    tokens = run.batch_tokens / seconds
    state = saved_bytes(trained_parameters(run.model, run.lora), layout)
    unsaved = None if run.checkpoint.save else _undone(layout, run, hardware, seconds)
    maintenance = upkeep(hardware, state=state, ranks=space.gpus, step=seconds, unsaved=unsaved)
    price, energy = price_and_energy(hardware, space.gpus, seconds * run.steps / maintenance.goodput)
    peak = float(jobs.peak) * space.gpus
    return Candidate(
        layout=layout,
        micro_batch=micro_batch,
        accumulation=run.batch // layout.replicas // micro_batch,
        compute=cast(Literal["fp32", "bf16", "fp16", "fp8"], space.compute),
        recompute=cast(Literal["none", "selective", "full"], RECOMPUTE[recompute]),
        recompute_every=int(at(jobs.recompute_every, row)) if recompute else 1,
        offload=cast(Literal["none", "cpu", "nvme"], OFFLOAD[int(at(jobs.offload, row))]),
        memory=memory.at(row),
        fullest=int(at(memory.fullest, row)),
        capacity=capacity,
        seconds=seconds,
        low=float(at(times.low, row)),
        high=float(at(times.high, row)),
        split={part: float(at(column, row)) for part, column in times.parts.items()},
        pieces={piece: float(at(column, row)) for piece, column in times.pieces.items()},
        tokens_per_second=tokens,
        mfu=tokens * flops_per_token(run.model, run.lora, run.train.sequence_length) / peak if peak else None,
        days=seconds * run.steps / _DAY,
        goodput=maintenance.goodput,
        save_every=maintenance.save_every,
        price=price,
        energy=energy,
        engine=engine_of(run, hardware),
        compiled=bool(at(jobs.compiled, row)),
        loss_chunk=int(at(jobs.loss_chunk, row)),
    )


def _undone(layout: Layout, run: Run, hardware: Hardware, step: float) -> float:
    """Seconds of training that a failure undoes at most where nothing is saved or copied: all, unless other ranks have the same state and survive."""
    nodes = [rank // hardware.node for rank in range(layout.ranks)]
    reused = engine_of(run, hardware) == "torch" and replicated_elsewhere(layout, nodes)
    return step if reused else step * run.steps


def candidate_at(space: Space, rates: Rates, columns: Columns, row: int, capacity: float | None = None) -> Candidate:
    """The candidate of one row."""
    return candidates_of(space, rates, pick(columns, slice(row, row + 1)), capacity)[0]
