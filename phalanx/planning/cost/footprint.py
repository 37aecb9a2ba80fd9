"""Bytes of device memory that a run would take on the fullest rank, by component, for every job of a Work at once: of this very
runtime, as `parallel`, `training` and `transforms` keep things. Searches filter by it; rehearsals, which run the real program,
are what it is held to.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.activation_memory import Head, Kept, kept, logits, repeated, stream
from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.cost.schedule_cost import CODE, FORWARDS_FIRST, SPLITS_BACKWARD
from phalanx.planning.cost.state_memory import Bytes, Share, Sizes, Values, bytes_of, held, shares, sizes, values
from phalanx.planning.machines.rates import Column

COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "fixed")
CONTEXT = (767 + 64) * 2**20
"""Of a GPU: driver, kernels and libraries' workspaces, before anything is computed."""
GROUP = 128 * 2**20
"""Of a GPU: a group of ranks that talk, its channels' buffers."""
LOOSE = 0.03
"""Part of what comes and goes in a step that an allocator cannot use, as it lies in pieces."""
CHUNK = 1 << 14
"""Jobs judged at a time: their columns stay in the processor's cache."""
_BUCKET = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Columns of bytes, of the rank that has most."""

    parameters: Column
    """What the model computes with between steps, and the masters that the optimizer changes."""
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    gathered: Column
    """Parameters of others, for as long as a block computes with them; casts of one's own."""
    buffers: Column
    """Messages on their way."""
    fixed: Column
    """Driver, communicators, and what an allocator loses."""
    fullest: Column
    """Pipeline rank that it is."""

    @property
    def total(self) -> Column:
        return sum(getattr(self, name) for name in COMPONENTS)

    def at(self, row: int) -> dict[str, float]:
        """One job's bytes by component."""
        found = {name: getattr(self, name) for name in COMPONENTS}
        return {name: float(column[row] if np.ndim(column) else column) for name, column in found.items()}


def footprint(work: JobTable) -> Footprint:
    """Of the fullest rank of each job."""
    size = work.size()
    if size <= 2 * CHUNK:
        return _judge(work)
    parts = [_judge(work.take(slice(begin, begin + CHUNK))) for begin in range(0, size, CHUNK)]
    lengths = [min(CHUNK, size - begin) for begin in range(0, size, CHUNK)]
    names = [field.name for field in fields(Footprint)]
    return Footprint(
        **{
            name: np.concatenate(
                [np.broadcast_to(getattr(part, name), length) for part, length in zip(parts, lengths, strict=True)]
            )
            for name in names
        }
    )


def _judge(work: JobTable) -> Footprint:
    of_model = _Model(kept(work), logits(work), of := sizes(work), bytes_of(work, of))
    return reduce(_fuller, (_of(work, share, of_model) for share in shares(work)))


class _Model(NamedTuple):
    """What all ranks of a job have in common."""

    block: Kept
    head: Head
    sizes: Sizes
    bytes: Bytes


def _fuller(one: Footprint, other: Footprint) -> Footprint:
    more = other.total > one.total
    values = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(Footprint)}
    return Footprint(**{name: np.where(more, theirs, mine) for name, (mine, theirs) in values.items()})


def _of(work: JobTable, share: Share, model: _Model) -> Footprint:
    """One rank's memory at the worst moment of a step: at the loss, in a block's backward, or when the embedding gets its gradient."""
    of_block, of_head, of, each = model
    found = values(work, of, share)
    stages, shard, zero = np.asarray(work.stages), np.asarray(work.shard), np.asarray(work.zero)
    pipelined, low, spread = np.asarray(work.pipeline) > 1, np.asarray(work.compute_bytes) < 4, np.asarray(work.shard) > 1
    parameters, gradients, optimizer = held(found, each)
    unit = (of_block.dense * (share.blocks - share.sparse) + of_block.sparse * share.sparse) / stages
    unit = unit + of_block.sparse * np.asarray(work.ahead) * share.ends
    at_end = _at_end(work, share)
    kept_casts, cast = _casts(work, found, of, share, at_end)
    activations = _owed(work, share, of_block, unit, _on_device(work, share, of_block, unit)) + kept_casts
    all_first = FORWARDS_FIRST[np.asarray(work.schedule)] & pipelined
    activations = activations + share.ends * (of_head.states * at_end + np.where(all_first, of_head.kept * (at_end - 1), 0.0))
    gathered, in_block = _gathered(work, found, of, unit)
    travelling = _travelling(work, found, of, share)
    at_loss = of_head.most * share.ends
    in_backward = np.maximum(of_block.live + of_block.passing + in_block, cast) + travelling
    # The embedding's gradient comes when its micro-batch's activations are gone.
    at_embedding = np.where(spread, 0.0, 4.0 * of.table * share.begins) - unit - kept_casts / share.flying
    left, whole = _left_flying(work, found, of, share)
    worst = np.maximum(np.maximum(at_loss, in_backward), np.maximum(at_embedding, whole - unit))
    in_logits = np.clip(worst, 0.0, at_loss)
    both = activations + worst - in_logits
    # Gradients that come into being as activations go are never there beside all of them.
    once = spread & (share.flying > np.asarray(work.accumulation) * stages - 0.5)
    both = np.where(once, np.maximum(both - gradients, 0.0), both)
    mail = np.where(pipelined, 3 * 4.0 * work.dim * stream(work), 0.0)
    staged = np.where(spread & low & (zero < 3), np.minimum(4.0 * 2**24, 4 * (found.dense + found.experts) / shard), 0.0)
    buffers = mail + staged + left
    moving = both + in_logits + gathered + buffers
    cpu = np.asarray(work.on_cpu) > 0
    fixed = np.where(cpu, 0.3 * 2**30, CONTEXT + GROUP * _groups(work) + LOOSE * moving)
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=both,
        logits=in_logits,
        gathered=gathered,
        buffers=buffers,
        fixed=fixed,
        fullest=share.rank,
    )


def _on_device(work: JobTable, share: Share, of_block: Kept, unit: Column) -> Column:
    """Activations of all forwards under way; where they wait in the host's memory, of two blocks, and what blocks hand each other."""
    activations = unit * share.flying
    away = np.asarray(work.activations_on_host) > 0
    if not np.any(away):
        return activations
    few = 2 * np.maximum(of_block.dense, of_block.sparse) + 4.0 * work.dim * stream(work) * share.blocks
    return np.where(away, np.minimum(few, activations), activations)


def _owed(work: JobTable, share: Share, of_block: Kept, unit: Column, flying: Column) -> Column:
    """Activations of forwards under way together with weight halves that are put off, which hold gradients besides; what a repeated
    forward gave them is made once more. Selective recomputation puts nothing off. In a V they pile up at the end, when little else
    is left."""
    if not np.any(np.asarray(share.owing) > 0):
        return flying
    gradients = of_block.owed * share.blocks / np.asarray(work.stages)
    logits = share.ends * np.asarray(work.compute_bytes) * work.vocab / np.asarray(work.tensor) * work.tokens
    looped = np.asarray(work.schedule) == CODE["interleaved-zero-bubble"]
    count = np.where(np.asarray(work.recompute) == 1, 0, share.owing - looped)
    beside = flying + count * gradients + np.minimum(count, 1) * logits
    return np.where(looped, beside, np.maximum(flying, count * (unit + gradients)))


def _travelling(work: JobTable, found: Values, of: Sizes, share: Share) -> Column:
    """Gradients on their way while activations are still there: of the head at first, then of blocks' matrices, three buckets at a time.
    A pipeline's travel when all is done; of whole replicas, one matrix is cast before it goes to its bucket."""
    shard, pipelined = np.asarray(work.shard), np.asarray(work.pipeline) > 1
    alone = 6.0 * np.maximum(of.table * share.ends, of.matrix)
    buckets = (
        np.maximum(of.table * share.ends, 3 * np.maximum(of.matrix, _BUCKET / 4)) * np.asarray(work.wire) * (1 + 1 / shard)
    )
    buckets = np.minimum(buckets, np.asarray(work.wire) * (found.dense + found.experts))
    return np.where(shard == 1, alone, np.where(pipelined | (np.asarray(work.zero) == 3), 0.0, buckets))


def _left_flying(work: JobTable, found: Values, of: Sizes, share: Share) -> tuple[Column, Column]:
    """ZeRO-2 sends after every backward: (the last two buckets, still on their way in the next forward; a pipeline stage's gradients,
    which are whole until its backward is done)."""
    shard, second = np.asarray(work.shard), (np.asarray(work.zero) == 2) & (np.asarray(work.shard) > 1)
    if not np.any(second):
        return 0.0, 0.0
    pipelined, several = np.asarray(work.pipeline) > 1, np.asarray(work.accumulation) > 1.5
    last = (of.table * share.begins + of.matrix) * np.asarray(work.wire) * (1 + 1 / shard)
    whole = np.where(np.asarray(work.compute_bytes) < 4, 2, 4) * (found.dense + found.experts) / np.asarray(work.stages)
    return np.where(second & several, last, 0.0), np.where(second & pipelined, whole, 0.0)


def _at_end(work: JobTable, share: Share) -> Column:
    """Forwards of the last stage that wait for their backward: one, or all of them where forwards come first, or where weight halves
    are put off."""
    kind, pipelined = np.asarray(work.schedule), np.asarray(work.pipeline) > 1
    some = np.where(kind == CODE["interleaved-zero-bubble"], share.flying / np.asarray(work.stages), 1.0)
    return np.where(pipelined, np.where(FORWARDS_FIRST[kind], work.accumulation, some), 1.0)


def _casts(work: JobTable, found: Values, of: Sizes, share: Share, at_end: Column) -> tuple[Column, Column]:
    """Copies of fp32 weights that autocast makes: (kept by every forward under way, while one runs)."""
    plain = (np.asarray(work.shard) == 1) & (np.asarray(work.compute_bytes) < 4)
    blocks = 2.0 * (found.dense + found.experts - found.ends) / np.asarray(work.stages)
    head = 2.0 * of.table * share.ends
    again, some = repeated(work), np.asarray(work.recompute) > 0
    held = (1 - again) * blocks * share.flying + np.where(some, 0.0, head * at_end)
    return np.where(plain, held, 0.0), np.where(plain & some, again * blocks + head, 0.0)


def _gathered(work: JobTable, found: Values, of: Sizes, unit: Column) -> tuple[Column, Column]:
    """ZeRO-3: (parameters of others that lie here all the time, what a block's backward has beside its activations)."""
    shard, stages = np.asarray(work.shard), np.asarray(work.stages)
    third, size = (np.asarray(work.zero) == 3) & (shard > 1), np.asarray(work.compute_bytes)
    if not np.any(third):
        return 0.0, 0.0
    kind, pipelined = np.asarray(work.schedule), np.asarray(work.pipeline) > 1
    splits = SPLITS_BACKWARD[kind] & pipelined
    experts = np.where(of.unspread > 0, 0.0, found.experts)
    everything, block = found.dense + experts, of.block - of.unspread
    part = size * everything / stages
    # A stage's blocks stay where its last backward left them, until its next forward; by then that one's activations are gone.
    left = size * everything - part + np.maximum(np.minimum(size * (2 * block + found.ends), part), part - unit)
    gathered = np.where(pipelined, np.where(splits, size * everything, left), size * found.ends)
    # Two blocks gathered and one's gradient, or the sum of one's gradients on its way.
    in_block = np.where(pipelined, 0.0, np.maximum(3 * size, np.asarray(work.wire)) * block)
    return np.where(third, gathered, 0.0), np.where(third, in_block, 0.0)


def _groups(work: JobTable) -> Column:
    """Groups of ranks that a rank talks in."""
    degrees = (work.pipeline, work.data, work.shard, work.context, work.tensor, work.expert, work.expert_tensor)
    return 1 + sum((np.asarray(degree) > 1) * 1 for degree in degrees)
