"""Bytes of device memory that a run would take on the fullest rank, by component, for every job of a Work at once: of this very
runtime, as `parallel`, `training` and `transforms` keep things. Searches filter by it; rehearsals, which run the real program,
are what it is held to.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce

import numpy as np

from phalanx.planning.kept import Head, Kept, kept, kv_cut, logits, stream
from phalanx.planning.stage import Share, shares
from phalanx.planning.work import SCHEDULES, Column, Work

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
_ALL_FIRST = tuple(SCHEDULES.index(name) for name in ("gpipe", "looped-bfs"))
_SPLITS = tuple(SCHEDULES.index(name) for name in ("interleaved-zero-bubble", "zbv", "dualpipev"))


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


def footprint(work: Work) -> Footprint:
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


def _judge(work: Work) -> Footprint:
    of_block, of_head = kept(work), logits(work)
    return reduce(_fuller, (_of(work, share, of_block, of_head) for share in shares(work)))


def _fuller(one: Footprint, other: Footprint) -> Footprint:
    more = other.total > one.total
    values = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(Footprint)}
    return Footprint(**{name: np.where(more, theirs, mine) for name, (mine, theirs) in values.items()})


@dataclass(frozen=True, slots=True)
class _Values:
    """Trained values of a rank, before shards divide them."""

    dense: Column
    """Matrices but those of routed experts."""
    exact: Column
    """Norms and routers, which stay in fp32."""
    experts: Column
    block: Column
    """Matrices of its largest block, its experts too."""
    ends: Column
    """Embedding and head."""
    table: Column
    """Embedding or head."""
    matrix: Column
    """The largest of a block, all its experts together."""
    unspread: Column
    """Of its largest block, those that ZeRO-3 leaves whole: experts that nobody shares."""


def _values(work: Work, share: Share) -> _Values:
    tensor, dim = np.asarray(work.tensor), work.dim
    norm = dim * (1 + np.asarray(work.layer_norm))
    keys = dim * work.kv_width * (np.asarray(work.latent) == 0)
    narrow = dim * np.asarray(work.latent) + dim * np.asarray(work.rotated) * (np.asarray(work.latent) > 0)
    cut = (work.attention_weights - keys - narrow) / tensor + keys / kv_cut(work) + narrow
    ffn = (2 + np.asarray(work.gated)) * dim * work.ffn / tensor
    shared, router = 3 * dim * np.asarray(work.shared_ffn) / tensor, dim * np.asarray(work.experts)
    routed = 3.0 * dim * np.asarray(work.expert_ffn) * work.experts / (np.asarray(work.expert) * work.expert_tensor)
    ahead = np.asarray(work.ahead) * share.ends
    sparse = share.sparse + np.where(np.asarray(work.sparse_layers) > 0, ahead, 0)
    plain = share.blocks + ahead - sparse
    table = work.vocab * dim / tensor
    tables = np.where(np.asarray(work.tied) > 0, np.maximum(share.begins, share.ends), share.begins + np.asarray(share.ends))
    ends = table * tables + share.begins * np.asarray(work.learned_positions) * dim
    ends = ends + ahead * 2 * dim * dim
    has = np.asarray(work.sparse_layers) > 0
    return _Values(
        dense=(sparse + plain) * cut + plain * ffn + sparse * shared + ends,
        exact=(sparse + plain) * 2 * norm + sparse * router + share.ends * norm,
        experts=sparse * routed,
        block=cut + np.where(has, shared + routed, ffn),
        ends=ends,
        table=table,
        matrix=np.where(has, routed / 3, dim * work.ffn / tensor),
        unspread=np.where(_experts_shard(work) == 1, routed, 0.0),
    )


def _experts_shard(work: Work) -> Column:
    """Ranks that share the state of the same experts."""
    alike = np.asarray(work.ranks) // (np.asarray(work.pipeline) * np.asarray(work.expert) * np.asarray(work.expert_tensor))
    return np.gcd(np.asarray(work.shard).astype(np.int64), np.maximum(alike, 1).astype(np.int64))


def _of(work: Work, share: Share, of_block: Kept, of_head: Head) -> Footprint:
    """One rank's memory at the worst moment of a step: at the loss, in a block's backward, or when the embedding gets its gradient."""
    values = _values(work, share)
    stages, shard, zero = np.asarray(work.stages), np.asarray(work.shard), np.asarray(work.zero)
    pipelined, low, spread = np.asarray(work.pipeline) > 1, np.asarray(work.compute_bytes) < 4, np.asarray(work.shard) > 1
    parameters, gradients, optimizer = _states(work, values)
    unit = (of_block.dense * (share.blocks - share.sparse) + of_block.sparse * share.sparse) / stages
    unit = unit + of_block.sparse * np.asarray(work.ahead) * share.ends
    at_end = _at_end(work, share)
    kept_casts, cast = _casts(work, values, share, at_end)
    activations = _owed(work, share, of_block, unit, _on_device(work, share, of_block, unit)) + kept_casts
    all_first = np.isin(np.asarray(work.schedule), _ALL_FIRST) & pipelined
    activations = activations + share.ends * (of_head.states * at_end + np.where(all_first, of_head.kept * (at_end - 1), 0.0))
    gathered, in_block = _gathered(work, values, unit)
    travelling = _travelling(work, values, share)
    at_loss = of_head.most * share.ends
    in_backward = np.maximum(of_block.live + of_block.passing + in_block, cast) + travelling
    # The embedding's gradient comes when its micro-batch's activations are gone.
    at_embedding = np.where(spread, 0.0, 4.0 * values.table * share.begins) - unit - kept_casts / share.flying
    left, whole = _left_flying(work, values, share)
    worst = np.maximum(np.maximum(at_loss, in_backward), np.maximum(at_embedding, whole - unit))
    in_logits = np.clip(worst, 0.0, at_loss)
    both = activations + worst - in_logits
    # Gradients that come into being as activations go are never there beside all of them.
    once = spread & (share.flying > np.asarray(work.accumulation) * stages - 0.5)
    both = np.where(once, np.maximum(both - gradients, 0.0), both)
    mail = np.where(pipelined, 3 * 4.0 * work.dim * stream(work), 0.0)
    staged = np.where(spread & low & (zero < 3), np.minimum(4.0 * 2**24, 4 * (values.dense + values.experts) / shard), 0.0)
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


def _on_device(work: Work, share: Share, of_block: Kept, unit: Column) -> Column:
    """Activations of all forwards under way; where they wait in the host's memory, of two blocks, and what blocks hand each other."""
    activations = unit * share.flying
    away = np.asarray(work.activations_on_host) > 0
    if not np.any(away):
        return activations
    few = 2 * np.maximum(of_block.dense, of_block.sparse) + 4.0 * work.dim * stream(work) * share.blocks
    return np.where(away, np.minimum(few, activations), activations)


def _owed(work: Work, share: Share, of_block: Kept, unit: Column, flying: Column) -> Column:
    """Activations of forwards under way together with weight halves that are put off, which hold gradients besides; what a repeated
    forward gave them is made once more. Selective recomputation puts nothing off. In a V they pile up at the end, when little else
    is left."""
    if not np.any(np.asarray(share.owing) > 0):
        return flying
    gradients = of_block.owed * share.blocks / np.asarray(work.stages)
    logits = share.ends * np.asarray(work.compute_bytes) * work.vocab / np.asarray(work.tensor) * work.tokens
    looped = np.asarray(work.schedule) == SCHEDULES.index("interleaved-zero-bubble")
    count = np.where(np.asarray(work.recompute) == 1, 0, share.owing - looped)
    beside = flying + count * gradients + np.minimum(count, 1) * logits
    return np.where(looped, beside, np.maximum(flying, count * (unit + gradients)))


def _travelling(work: Work, values: _Values, share: Share) -> Column:
    """Gradients on their way while activations are still there: of the head at first, then of blocks' matrices, three buckets at a time.
    A pipeline's travel when all is done; of whole replicas, one matrix is cast before it goes to its bucket."""
    shard, pipelined = np.asarray(work.shard), np.asarray(work.pipeline) > 1
    alone = 6.0 * np.maximum(values.table * share.ends, values.matrix)
    buckets = (
        np.maximum(values.table * share.ends, 3 * np.maximum(values.matrix, _BUCKET / 4))
        * np.asarray(work.wire)
        * (1 + 1 / shard)
    )
    buckets = np.minimum(buckets, np.asarray(work.wire) * (values.dense + values.experts))
    return np.where(shard == 1, alone, np.where(pipelined | (np.asarray(work.zero) == 3), 0.0, buckets))


def _left_flying(work: Work, values: _Values, share: Share) -> tuple[Column, Column]:
    """ZeRO-2 sends after every backward: (the last two buckets, still on their way in the next forward; a pipeline stage's gradients,
    which are whole until its backward is done)."""
    shard, second = np.asarray(work.shard), (np.asarray(work.zero) == 2) & (np.asarray(work.shard) > 1)
    if not np.any(second):
        return 0.0, 0.0
    pipelined, several = np.asarray(work.pipeline) > 1, np.asarray(work.accumulation) > 1.5
    last = (values.table * share.begins + values.matrix) * np.asarray(work.wire) * (1 + 1 / shard)
    whole = np.where(np.asarray(work.compute_bytes) < 4, 2, 4) * (values.dense + values.experts) / np.asarray(work.stages)
    return np.where(second & several, last, 0.0), np.where(second & pipelined, whole, 0.0)


def _states(work: Work, values: _Values) -> tuple[Column, Column, Column]:
    """Parameters, gradients and the optimizer's states, by the formulas of ZeRO."""
    shard, zero = np.asarray(work.shard), np.asarray(work.zero)
    low, pipelined = np.asarray(work.compute_bytes) < 4, np.asarray(work.pipeline) > 1
    experts_shard = _experts_shard(work)
    states = np.where(np.asarray(work.offload) > 0, 0, work.moments)
    third, spread = (zero == 3) & (shard > 1), shard > 1
    value = np.where(low, 2.0, 4.0)
    master = np.where(low, 4.0, 0.0)

    def each(count: Column, shares: Column, whole: Column) -> tuple[Column, Column]:
        """Bytes of parameter and gradient; `whole`: they stay whole though ZeRO-3 spreads the rest."""
        aside = value + master / shares
        parameter = np.where(spread, np.where(third & ~whole, 4.0 / shares, aside), 4.0)
        # A pipeline's backwards add up on each rank before anything travels.
        adding = np.where(low, np.asarray(work.wire), 4.0)
        spread_gradient = np.where(pipelined, adding, 4.0 / shares)
        kept_gradient = np.where((zero == 2) & (shares > 1), value / shares, value)
        gradient = np.where(spread, np.where(third & ~whole, spread_gradient, kept_gradient), 4.0)
        return count * parameter, count * gradient

    dense, experts = each(values.dense, shard, False), each(values.experts, experts_shard, experts_shard == 1)
    exact = values.exact * 4.0
    optimizer = states * ((values.dense + values.exact) / shard + values.experts / experts_shard)
    return dense[0] + experts[0] + exact, dense[1] + experts[1] + exact, optimizer


def _at_end(work: Work, share: Share) -> Column:
    """Forwards of the last stage that wait for their backward: one, or all of them where forwards come first, or where weight halves
    are put off."""
    kind, pipelined = np.asarray(work.schedule), np.asarray(work.pipeline) > 1
    some = np.where(kind == SCHEDULES.index("interleaved-zero-bubble"), share.flying / np.asarray(work.stages), 1.0)
    return np.where(pipelined, np.where(np.isin(kind, _ALL_FIRST), work.accumulation, some), 1.0)


def _casts(work: Work, values: _Values, share: Share, at_end: Column) -> tuple[Column, Column]:
    """Copies of fp32 weights that autocast makes: (kept by every forward under way, while one runs)."""
    plain = (np.asarray(work.shard) == 1) & (np.asarray(work.compute_bytes) < 4)
    blocks = 2.0 * (values.dense + values.experts - values.ends) / np.asarray(work.stages)
    head = 2.0 * values.table * share.ends
    repeated = np.asarray(work.recompute) > 0
    return np.where(plain & ~repeated, blocks * share.flying + head * at_end, 0.0), np.where(
        plain & repeated, blocks + head, 0.0
    )


def _gathered(work: Work, values: _Values, unit: Column) -> tuple[Column, Column]:
    """ZeRO-3: (parameters of others that lie here all the time, what a block's backward has beside its activations)."""
    shard, stages = np.asarray(work.shard), np.asarray(work.stages)
    third, size = (np.asarray(work.zero) == 3) & (shard > 1), np.asarray(work.compute_bytes)
    if not np.any(third):
        return 0.0, 0.0
    kind, pipelined = np.asarray(work.schedule), np.asarray(work.pipeline) > 1
    splits = np.isin(kind, _SPLITS) & pipelined
    experts = np.where(values.unspread > 0, 0.0, values.experts)
    everything, block = values.dense + experts, values.block - values.unspread
    part = size * everything / stages
    # A stage's blocks stay where its last backward left them, until its next forward; by then that one's activations are gone.
    left = size * everything - part + np.maximum(np.minimum(size * (2 * block + values.ends), part), part - unit)
    found = np.where(pipelined, np.where(splits, size * everything, left), size * values.ends)
    # Two blocks gathered and one's gradient, or the sum of one's gradients on its way.
    in_block = np.where(pipelined, 0.0, np.maximum(3 * size, np.asarray(work.wire)) * block)
    return np.where(third, found, 0.0), np.where(third, in_block, 0.0)


def _groups(work: Work) -> Column:
    """Groups of ranks that a rank talks in."""
    degrees = (work.pipeline, work.data, work.shard, work.context, work.tensor, work.expert, work.expert_tensor)
    return 1 + sum((np.asarray(degree) > 1) * 1 for degree in degrees)
