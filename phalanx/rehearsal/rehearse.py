"""`rehearse`: the real program of one rank of a job, without memory and without the others; what it takes, sends and computes. The
command line, the API and `phalanx train`, before it starts what may not fit, call it.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from phalanx.rehearsal import replay
from phalanx.rehearsal.attention_kernels import Card
from phalanx.rehearsal.environment import ASSUMED
from phalanx.rehearsal.extrapolate import enough, times
from phalanx.rehearsal.ledger import COMPONENTS, Ledger, Piece
from phalanx.rehearsal.message_log import Messages, Repeated
from phalanx.rehearsal.op_tracker import Watch
from phalanx.rehearsal.rehearsed_rank import Program, opened
from phalanx.rehearsal.result import Moment, Rehearsal
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

CONTEXT = 1 << 30
"""Bytes that CUDA takes for itself, its libraries and their kernels, which are loaded when they are first used: 695 to 895 MiB were
measured on an H200 with CUDA 13."""
_LINKS = 256 << 20
"""Bytes that NCCL may take for each group of ranks: an estimate from its documentation (channels × buffers)."""
_PROCESS = 350 << 20
"""Bytes of a rank on CPUs before it has any tensor."""
_CLOSE = 0.99
"""Part of the device from which on it is close."""
_POINTS = 2000
"""Of a timeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What the rehearsed rank runs on."""

    card: Card | None
    """The GPU; None: a CPU."""
    capacity: int | None = None
    """Bytes of the device that this rank may use; None: as many as it likes."""
    node: int = 8
    island: int = 8


def rehearse(run: Run, plan: Plan, rank: int, stage: Stage) -> Rehearsal:
    """One step of this rank's program; RunError for what is refused before a job starts.

    What would fail on the cluster is told in the result. Not for a process that is itself a rank of a job.
    """
    run = settled(run)
    _refuse(run, plan, rank)
    began = time.process_time()
    messages = Messages(stage.node, stage.island)
    with warnings.catch_warnings(action="ignore"):  # torch warns of its own fake tensors
        try:
            with opened(run, plan, rank, stage.card, messages) as (program, watch):
                return _through(program, watch, stage, began)
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedFakeTensorException) as error:
            raise RunError(
                [
                    f"The program cannot be rehearsed: it reads the values of a tensor ({_short(error)}), and rehearsals have none; "
                    "a module of your own must not depend on values on the host."
                ]
            ) from error


def settled(run: Run) -> Run:
    """Without what the plan was to decide and compilers would change."""
    memory = run.memory
    recompute = "none" if memory.recompute == "auto" else memory.recompute
    offload = "none" if memory.offload == "auto" else memory.offload
    return replace(run, memory=replace(memory, recompute=recompute, offload=offload, compile=False))


def _refuse(run: Run, plan: Plan, rank: int) -> None:
    layout = plan.layout
    if not 0 <= rank < layout.ranks:
        raise RunError([f"--rank {rank} is none of the layout's {layout.ranks} ranks: take one from 0 to {layout.ranks - 1}."])
    if layout.stage_split == "measured" and layout.pipeline > 1:
        raise RunError(
            [
                'layout.stage_split = "measured" cuts stages by what they take on the devices of a job, so it cannot be rehearsed: take "counted".'
            ]
        )


def _through(program: Program, watch: Watch, stage: Stage, began: float) -> Rehearsal:
    """A step, and what is read off it."""
    order, at = program.built.schedule, program.mesh.coordinate("pipeline")
    built, before = len(watch.device.events), len(watch.messages.all)
    taken, error = enough(order, program.plan, at), None
    try:
        program.step(taken, program.plan.accumulation)
    except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedFakeTensorException):
        raise
    except Exception as failure:  # whatever a rank would have raised
        where = watch.where
        error = f"{where.phase} of {where.module or 'the model'} {where.action}: {type(failure).__name__}: {_short(failure)}"
    often = times(order, program.plan, at, taken)
    found = replay.lasting(watch.device, built)
    top = replay.peak(watch.device, found)
    fixed = _fixed(program, stage)
    limit = None if stage.capacity is None else stage.capacity - sum(fixed.values())
    held = _reserved(watch.device, found, top, limit, stage)
    living = replay.living(watch.device, found, top)
    flops, repeated = _flops(watch, often)
    state = program.built.placement()
    at_peak = watch.device.events[top.at - 1] if watch.device.events else 0
    return Rehearsal(
        rank=program.mesh.rank,
        ranks=program.mesh.ranks,
        device=program.plan.device,
        applied=state.applied,
        peak=max(held.allocated, top.bytes),
        reserved=held.reserved,
        fixed=fixed,
        capacity=stage.capacity,
        components=_sum(living, lambda piece: piece.component),
        modules=_modules(living),
        at=_moment(watch.device, at_peak) if at_peak > 0 else None,
        host=watch.host.peak if stage.card else 0,
        state={
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "files": state.files,
        },
        messages=tuple(Repeated(one, often.get(one.action, 1)) for one in watch.messages.all[before:]),
        flops=flops,
        repeated_flops=repeated,
        micro_batches=program.plan.accumulation,
        taken=taken,
        seconds=time.process_time() - began,
        no_room=None if held.without is None else _moment(watch.device, held.without[0]),
        error=error,
        assumed=ASSUMED,
        notes=_notes(program.run, stage, held.reserved + sum(fixed.values())),
        timeline=_timeline(watch.device, found),
    )


def _reserved(ledger: Ledger, found: replay.Lasting, top: replay.Peak, limit: int | None, stage: Stage) -> replay.Reserved:
    if stage.card is not None:
        held = replay.reserve(ledger, found, limit)
        if held.without is None:
            return held
        return replace(replay.reserve(ledger, found, None), without=held.without)  # what it would take if there were room
    if limit is None or top.bytes <= limit:
        return replay.Reserved(top.bytes, top.bytes, None)
    now = 0
    for event in ledger.events:  # the first that goes beyond
        now += ledger.taken(event) if event > 0 else -ledger.taken(-event)
        if event > 0 and now > limit:
            break
    return replay.Reserved(top.bytes, top.bytes, (abs(event), replay.NoRoom(0, now, now)))


def _fixed(program: Program, stage: Stage) -> dict[str, int]:
    if stage.card is None:
        return {"process": _PROCESS}
    groups = {group.ranks for group in program.mesh._groups.values() if group.size > 1}
    return {"context": CONTEXT} | ({"links": _LINKS * len(groups)} if groups else {})


def _sum(living: list[Piece], key: Any) -> dict[str, int]:
    found: Counter[str] = Counter()
    for piece in living:
        found[key(piece)] += piece.size
    return {name: found[name] for name in COMPONENTS if found[name]}


def _modules(living: list[Piece]) -> tuple[tuple[str, int], ...]:
    found: Counter[str] = Counter()
    for piece in living:
        found[piece.where.module or f"({piece.where.phase})"] += piece.size
    return tuple(found.most_common())


def _moment(ledger: Ledger, number: int) -> Moment:
    where, operation = ledger.where(abs(number))
    return Moment(where.phase, where.module, where.action, operation)


def _flops(watch: Watch, often: dict[str, int]) -> tuple[dict[str, int], int]:
    found: Counter[str] = Counter()
    for where, count in watch.flops.items():
        found[where.module or f"({where.phase})"] += count * often.get(where.action, 1)
    return dict(found.most_common()), sum(count * often.get(action, 1) for action, count in watch.repeated.items())


def _timeline(ledger: Ledger, found: replay.Lasting) -> tuple[tuple[float, int], ...]:
    now, points, events = 0, [], ledger.events
    every = max(1, (len(events) - found.built) // _POINTS)
    most = 0
    for index, event in enumerate(events):
        now += ledger.taken(event) if event > 0 else -ledger.taken(-event)
        if index >= found.built:
            most = max(most, now)
            if (index - found.built) % every == 0:
                points.append(((index - found.built) / max(1, len(events) - found.built), most))
                most = now
    return tuple(points)


def _notes(run: Run, stage: Stage, in_use: int) -> tuple[str, ...]:
    """What is not as it would be."""
    found = []
    if stage.card and stage.capacity is not None and _CLOSE * stage.capacity < in_use <= stage.capacity:
        found.append("It is within 1 % of the device: fragments of its memory decide then, and may decide otherwise.")
    if run.memory.activations == "cpu":
        found.append(
            "Activations that come back from the host are let go when the GPU is done with them, which a rehearsal cannot time: what "
            "the allocator reserves may be up to twice what is told here."
        )
    if run.memory.compile:
        found.append(
            "Blocks are rehearsed uncompiled: compiled ones keep less, so the run takes less than is told here (10 % less, where it was measured)."
        )
    return tuple(found)


def _short(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
