"""The memory model: bytes of the fullest rank by component, for every job of a table at once, as `parallel`, `training` and
`transforms` allocate them. The search filters candidates by it; tests hold it against rehearsals, which run the real
program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.activation_memory import (
    BlockActivations,
    HeadActivations,
    block_activations,
    head_activations,
    kv_division,
    recomputed_fraction,
    residual_stream,
)
from phalanx.planning.cost.job_table import RECOMPUTE, JobTable, has_reference_copy, in_chunks, trained_fraction
from phalanx.planning.cost.schedule_cost import CODE, FORWARDS_FIRST, SPLITS_BACKWARD, V_SHAPED, deferred, in_flight
from phalanx.planning.cost.xla_footprint import xla_bytes
from phalanx.planning.machines.rates import Column

COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "fixed")
"""Parameters are those that the model computes with, and the master weights that the optimizer updates; gathered are parameters of other ranks
while a block computes with them, and casts of the rank's own; buffers are messages in transit; fixed are driver, communicators and
fragmentation."""
CONTEXT = (767 + 64) * 2**20
"""Bytes of a GPU that the driver, kernels and libraries take before anything is computed."""
GROUP = 128 * 2**20
"""Bytes of a GPU that the buffers of one communicator take."""
FRAGMENTATION = 0.03
"""Fraction of a step's temporary memory that the allocator loses to fragmentation."""
CHUNK = 1 << 14
"""Jobs judged at a time, so that their columns stay in the CPU's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of the fullest rank, in columns."""

    components: dict[str, Column]
    """By COMPONENTS."""
    fullest: Column
    """The pipeline rank that is the fullest."""

    @property
    def total(self) -> Column:
        return sum(self.components.values())

    def at(self, row: int) -> dict[str, float]:
        """Bytes of one job by component."""
        return {name: float(column[row] if np.ndim(column) else column) for name, column in self.components.items()}


def footprint(jobs: JobTable) -> Footprint:
    """The fullest rank of each job."""
    return in_chunks(_judge, CHUNK, jobs)


def _judge(jobs: JobTable) -> Footprint:
    if np.all(jobs.on_xla):
        columns = xla_bytes(jobs, rank_sizes(jobs, part_sizes(jobs), pipeline_shares(jobs)[0]))
        return Footprint(components=dict(zip(COMPONENTS, columns, strict=True)), fullest=0 * jobs.pipeline)
    block, head, sizes = block_activations(jobs), head_activations(jobs), part_sizes(jobs)
    model = block, head, sizes, parameter_bytes(jobs, sizes)
    return reduce(_fuller_rank, (_rank_footprint(jobs, share, *model) for share in pipeline_shares(jobs)))


def _fuller_rank(first: Footprint, second: Footprint) -> Footprint:
    more = second.total > first.total
    components = {name: np.where(more, second.components[name], mine) for name, mine in first.components.items()}
    return Footprint(components=components, fullest=np.where(more, second.fullest, first.fullest))


def _rank_footprint(
    jobs: JobTable,
    share: PipelineShare,
    block: BlockActivations,
    head: HeadActivations,
    sizes: PartSizes,
    parameter: tuple[ParameterBytes, ParameterBytes],
) -> Footprint:
    """Memory of one rank at a step's worst moment: at the loss, in a block's backward, or at the embedding's gradient."""
    stages, spread, pipelined = jobs.stages, jobs.shard > 1, jobs.pipeline > 1
    held = rank_sizes(jobs, sizes, share)
    parameters, gradients, optimizer = state_bytes(jobs, held, *parameter)
    unit = (block.dense * (share.blocks - share.sparse) + block.sparse * share.sparse) / stages
    unit = unit + block.sparse * jobs.mtp_depth * share.has_head
    at_end = _waiting_at_last_stage(jobs, share)
    casts_kept, cast = _casts(jobs, held, sizes, share, at_end)
    activations = _with_deferred(jobs, share, block, unit, _on_device(jobs, share, block, unit)) + casts_kept
    all_first = FORWARDS_FIRST[jobs.schedule] & pipelined
    activations = activations + share.has_head * (head.states * at_end + np.where(all_first, head.kept * (at_end - 1), 0.0))
    gathered, in_block = _gathered(jobs, held, sizes, unit)
    at_loss = head.most * share.has_head
    in_block = in_block + _dequantized(jobs, sizes)
    if np.any(jobs.fp8_experts > 0):  # one of an expert layer's three stacks, rounded
        in_block = in_block + np.where(jobs.fp8_experts > 0, sizes.routed / 3, 0.0)
    in_backward = np.maximum(block.live + block.backward + in_block, cast) + _gradients_in_transit(jobs, held, sizes, share)
    # The embedding's gradient is allocated when the activations of its micro-batch are freed.
    masters = has_masters(jobs)
    at_embedding = (
        np.where(spread | masters | (jobs.adapters > 0), 0.0, 4.0 * sizes.table * share.has_embedding)
        - unit
        - casts_kept / share.in_flight
    )
    left, whole = _zero2_in_transit(jobs, held, sizes, share)
    worst = np.maximum(np.maximum(at_loss, in_backward), np.maximum(at_embedding, whole - unit))
    logits = np.clip(worst, 0.0, at_loss)
    peak_activations = activations + worst - logits
    # Gradients that are allocated while activations are freed never exist next to all of them.
    once = (spread | masters) & (share.in_flight > jobs.accumulation * stages - 0.5)
    later = np.where(once, np.minimum(gradients, peak_activations), 0.0)
    peak_activations = peak_activations - later
    logits = logits - np.where(once & masters, np.minimum(gradients - later, logits), 0.0)
    # At the end of the backward all gradients are there, and those of the first block are in transit.
    last = np.where(
        once & (sizes.expert_shard > 1) & (jobs.zero < 3) & np.logical_not(pipelined), _buckets(jobs, held, sizes), 0.0
    )
    peak_activations = np.maximum(peak_activations, last - logits)
    messages = np.where(pipelined, 3 * residual_stream(jobs), 0.0)
    staged = np.minimum(4.0 * 2**24, 4 * (held.dense + held.experts) / jobs.shard)
    buffers = messages + np.where(spread & (jobs.compute_bytes < 4) & (jobs.zero < 3) & (jobs.on_cpu > 0), staged, 0.0) + left
    moving = peak_activations + logits + gathered + buffers
    fixed = np.where(jobs.on_cpu > 0, 0.3 * 2**30, CONTEXT + GROUP * _groups(jobs) + FRAGMENTATION * moving)
    columns = (parameters, gradients, optimizer, peak_activations, logits, gathered, buffers, fixed)
    return Footprint(components=dict(zip(COMPONENTS, columns, strict=True)), fullest=share.rank)


def _on_device(jobs: JobTable, share: PipelineShare, block: BlockActivations, unit: Column) -> Column:
    """Activations of all forwards in flight; with activation offload, those of two blocks and the blocks' inputs."""
    activations = unit * share.in_flight
    few = 2 * np.maximum(block.dense, block.sparse) + residual_stream(jobs) * share.blocks
    return np.where(jobs.activations_on_host > 0, np.minimum(few, activations), activations)


def _with_deferred(jobs: JobTable, share: PipelineShare, block: BlockActivations, unit: Column, in_flight: Column) -> Column:
    """Activations of forwards in flight together with those of deferred weight backwards, which also hold gradients, and
    what a repeated forward recomputes for them. Selectively recomputed and compiled blocks defer nothing. In a V-shaped schedule
    they pile up at the end of the step, when little else is left."""
    if not np.any(share.deferred > 0):
        return in_flight
    gradients = block.deferred * share.blocks / jobs.stages
    logits = share.has_head * jobs.compute_bytes * jobs.vocab / jobs.tensor * jobs.tokens
    looped = jobs.schedule == CODE["interleaved-zero-bubble"]
    count = np.where((jobs.recompute == RECOMPUTE.index("selective")) | (jobs.compiled > 0), 0, share.deferred - looped)
    looping = in_flight + count * gradients + np.minimum(count, 1) * logits
    return np.where(looped, looping, np.maximum(in_flight, count * (unit + gradients)))


def _gradients_in_transit(jobs: JobTable, held: RankSizes, sizes: PartSizes, share: PipelineShare) -> Column:
    """Gradients in transit while activations are still there: first the head's, then those of blocks, three buckets at a
    time. A pipeline sends its gradients after the last backward. Without sharding, one matrix is cast before it enters its
    bucket, unless master weights are kept apart: then gradients are where the backward puts them, or are added to sums in fp32."""
    if np.all(jobs.adapters > 0):
        return trained_fraction(jobs) * (held.dense + held.experts) * jobs.wire  # all of them are little
    head = sizes.table * share.has_head
    buckets = np.maximum(
        _buckets(jobs, held, sizes), np.minimum(head * (1 + 1 / jobs.shard), held.dense + held.experts) * jobs.wire
    )
    sharded = np.where((jobs.pipeline > 1) | (jobs.zero == 3), 0.0, buckets)
    largest = np.maximum(head, sizes.matrix)
    packed = np.where(jobs.data > 1, buckets, 0.0)
    whole = np.where(has_masters(jobs), np.where(sums_gradients(jobs), 2.0 * largest, 0.0) + packed, 6.0 * largest)
    return np.where(jobs.shard == 1, whole, sharded)


def _buckets(jobs: JobTable, held: RankSizes, sizes: PartSizes) -> Column:
    """Bytes of three buckets of a block's gradients, with what a reduce-scatter makes of them."""
    three = 3 * np.maximum(sizes.matrix, jobs.bucket / 4) * (1 + 1 / jobs.shard)
    return np.minimum(three, trained_fraction(jobs) * (held.dense + held.experts)) * jobs.wire


def _zero2_in_transit(jobs: JobTable, held: RankSizes, sizes: PartSizes, share: PipelineShare) -> tuple[Column, Column]:
    """ZeRO-2 sends after every backward. Returns the bytes of the last two buckets, still in transit in the next forward,
    and those of a pipeline stage's gradients, which are whole until its backward ends."""
    second = (jobs.zero == 2) & (jobs.shard > 1)
    if not np.any(second):
        return 0.0, 0.0
    last = (sizes.table * share.has_embedding + sizes.matrix) * jobs.wire * (1 + 1 / jobs.shard)
    whole = np.where(jobs.compute_bytes < 4, 2, 4) * (held.dense + held.experts) / jobs.stages
    last, whole = (trained_fraction(jobs) * size for size in (last, whole))
    return np.where(second & (jobs.accumulation > 1.5), last, 0.0), np.where(second & (jobs.pipeline > 1), whole, 0.0)


def _waiting_at_last_stage(jobs: JobTable, share: PipelineShare) -> Column:
    """Forwards of the last stage that wait for their backward: one, or all where all forwards come first or weight
    backwards are deferred."""
    some = np.where(jobs.schedule == CODE["interleaved-zero-bubble"], share.in_flight / jobs.stages, 1.0)
    return np.where(jobs.pipeline > 1, np.where(FORWARDS_FIRST[jobs.schedule], jobs.accumulation, some), 1.0)


def _casts(jobs: JobTable, held: RankSizes, sizes: PartSizes, share: PipelineShare, at_end: Column) -> tuple[Column, Column]:
    """Autocast's 16-bit copies of fp32 weights: (bytes that every forward in flight keeps, bytes while one forward runs)."""
    plain = (jobs.shard == 1) & (jobs.compute_bytes < 4) & np.logical_not(has_masters(jobs)) & (jobs.adapters == 0)
    blocks = 2.0 * (held.dense + held.experts - held.tables) / jobs.stages
    head = 2.0 * sizes.table * share.has_head
    again, some = recomputed_fraction(jobs), jobs.recompute > 0
    every = (1 - again) * blocks * share.in_flight + np.where(some, 0.0, head * at_end)
    return np.where(plain, every, 0.0), np.where(plain & some, again * blocks + head, 0.0)


def _gathered(jobs: JobTable, held: RankSizes, sizes: PartSizes, unit: Column) -> tuple[Column, Column]:
    """ZeRO-3: (bytes of gathered parameters that stay all the time, bytes that a block's backward adds to its activations)."""
    third, pipelined, size = (jobs.zero == 3) & (jobs.shard > 1), jobs.pipeline > 1, jobs.compute_bytes
    if not np.any(third):
        return 0.0, 0.0
    everything = held.dense + np.where(sizes.unsharded > 0, 0.0, held.experts)
    stored = np.where(jobs.base_bytes > 0, jobs.base_bytes, size)
    whole = stored * (everything - held.tables) + size * held.tables - jobs.fp8_gather * (held.dense - held.tables)
    block, part = sizes.block - sizes.unsharded, whole / jobs.stages
    saved = 2 * jobs.fp8_gather * (sizes.block - np.where(jobs.sparse_layers > 0, sizes.routed, 0.0))
    # A stage's blocks stay gathered after its last backward until its next forward; by then the activations of that backward
    # are freed.
    left = whole - part + np.maximum(np.minimum(2 * stored * block - saved + size * held.tables, part), part - unit)
    staged = np.where(SPLITS_BACKWARD[jobs.schedule], whole, left)
    gathered = np.where(pipelined, staged, size * held.tables)
    # Two gathered blocks and the gradient of one, or the reduced gradient of one in transit.
    gathered_two = 2 * stored * block - saved
    trained = np.maximum(gathered_two + size * block, jobs.wire * block)
    in_block = np.where(pipelined, 0.0, np.where(jobs.adapters > 0, gathered_two, trained))  # frozen blocks have no gradient
    return np.where(third, gathered, 0.0), np.where(third, in_block, 0.0)


def _dequantized(jobs: JobTable, sizes: PartSizes) -> Column:
    """Bytes of one matrix while it is dequantized: values in fp32 and the result. Compiled code needs only the latter, but not in every case. The
    results of experts are counted where they are kept."""
    if not np.any(jobs.base_bytes > 0):
        return 0.0
    each = 4.0 + np.where(jobs.sparse_layers > 0, 0.0, jobs.compute_bytes)
    return np.where(jobs.base_bytes > 0, each * sizes.matrix, 0.0)


def _groups(jobs: JobTable) -> Column:
    """Communicators of a rank."""
    degrees = (jobs.pipeline, jobs.data, jobs.shard, jobs.context, jobs.tensor, jobs.expert, jobs.expert_tensor)
    return 1 + sum((degree > 1) * 1 for degree in degrees)


# --- parameters, gradients and optimizer states ---


class PartSizes(NamedTuple):
    """Parameters of the parts of a model on one rank, before sharding."""

    attention: Column
    """Of one block."""
    ffn: Column
    shared: Column
    """Shared experts."""
    router: Column
    routed: Column
    """Routed experts of one block."""
    norm: Column
    block: Column
    """Matrices of the largest block, with its experts."""
    table: Column
    """Embedding or head."""
    matrix: Column
    """The largest matrix of a block; all experts count as one."""
    expert_shard: Column
    """Ranks that share the state of the same experts."""
    unsharded: Column
    """Parameters of the largest block that ZeRO-3 leaves whole: experts that no other rank has."""


class RankSizes(NamedTuple):
    """Parameters of a rank, before sharding."""

    dense: Column
    """All matrices except those of routed experts."""
    fp32: Column
    """Norms and routers, which stay in fp32."""
    experts: Column
    tables: Column
    """Embedding and head."""


class ParameterBytes(NamedTuple):
    """Bytes per parameter."""

    parameter: Column
    gradient: Column
    state: Column


def part_sizes(jobs: JobTable) -> PartSizes:
    tensor, dim, latent = jobs.tensor, jobs.dim, jobs.latent
    keys = dim * jobs.kv_width * (latent == 0)
    narrow = dim * latent + dim * jobs.rotated * (latent > 0)
    attention = (jobs.attention_weights - keys - narrow) / tensor + keys / kv_division(jobs) + narrow
    ffn = (2 + jobs.gated) * dim * jobs.ffn / tensor
    shared = 3 * dim * jobs.shared_ffn / tensor
    routed = 3.0 * dim * jobs.expert_ffn * jobs.experts / (jobs.expert * jobs.expert_tensor)
    has, expert_shard = jobs.sparse_layers > 0, _expert_shard(jobs)
    return PartSizes(
        attention=attention,
        ffn=ffn,
        shared=shared,
        router=dim * jobs.experts,
        routed=routed,
        norm=dim * (1 + jobs.layer_norm),
        block=attention + np.where(has, shared + routed, ffn),
        table=jobs.vocab * dim / tensor,
        matrix=np.where(has, routed / 3, dim * jobs.ffn / tensor),
        expert_shard=expert_shard,
        unsharded=np.where(expert_shard == 1, routed, 0.0),
    )


def _expert_shard(jobs: JobTable) -> Column:
    if not np.any(jobs.sparse_layers > 0):
        return jobs.shard
    alike = np.floor(jobs.ranks / (jobs.pipeline * jobs.expert * jobs.expert_tensor))
    return np.gcd(np.asarray(jobs.shard, np.int64), np.maximum(alike, 1).astype(np.int64))


def rank_sizes(jobs: JobTable, sizes: PartSizes, share: PipelineShare) -> RankSizes:
    dim, first, last = jobs.dim, share.has_embedding, share.has_head
    ahead = jobs.mtp_depth * last
    sparse, blocks = share.sparse + np.where(jobs.sparse_layers > 0, ahead, 0), share.blocks + ahead
    count = np.where(jobs.tied > 0, np.maximum(first, last), first + last)
    tables = sizes.table * count + first * jobs.learned_positions * dim + ahead * 2 * dim * dim
    return RankSizes(
        dense=blocks * sizes.attention + (blocks - sparse) * sizes.ffn + sparse * sizes.shared + tables,
        fp32=(jobs.norms * blocks + last) * sizes.norm + sparse * sizes.router,
        experts=sparse * sizes.routed,
        tables=tables,
    )


def has_masters(jobs: JobTable) -> Column:
    """Whether a rank that shards nothing keeps 16-bit weights next to fp32 master weights: on GPUs, unless the states are elsewhere or the
    module is a custom one."""
    built_in = jobs.traced_flops == 0
    return (jobs.shard == 1) & (jobs.compute_bytes < 4) & (jobs.on_cpu == 0) & (jobs.offload == 0) & built_in


def sums_gradients(jobs: JobTable) -> Column:
    """Whether such a rank adds the gradients of several micro-batches, in fp32."""
    return (jobs.accumulation > 1.5) | (jobs.pipeline > 1)


def parameter_bytes(jobs: JobTable, sizes: PartSizes) -> tuple[ParameterBytes, ParameterBytes]:
    """Bytes per parameter of dense matrices, and of experts. In 16 bits, ZeRO-1 and 2 keep a whole 16-bit copy and shard
    the fp32 master weights."""
    low, pipelined, spread = jobs.compute_bytes < 4, jobs.pipeline > 1, jobs.shard > 1
    value, master = np.where(low, 2.0, 4.0), np.where(low, 4.0, 0.0)
    # A pipeline accumulates gradients on each rank before it reduces them.
    adding = np.where(low, jobs.wire, 4.0)
    states = np.where(jobs.offload > 0, 0, jobs.moments)
    masters, sums = has_masters(jobs), np.asarray(sums_gradients(jobs))

    def each(shard: Column, whole: Column) -> ParameterBytes:
        """`whole`: parameter and gradient stay whole although ZeRO-3 shards the rest."""
        apart = (jobs.zero == 3) & spread & np.logical_not(whole)
        part = 4.0 / shard
        parameter = np.where(spread, np.where(apart, part, value + master / shard), np.where(masters, 6.0, 4.0))
        kept = np.where((jobs.zero == 2) & (shard > 1), value / shard, value)
        gradient = np.where(
            spread, np.where(apart, np.where(pipelined, adding, part), kept), np.where(masters & ~sums, 2.0, 4.0)
        )
        return ParameterBytes(parameter, gradient, states / shard)

    dense = each(jobs.shard, False)
    if not np.any(jobs.sparse_layers > 0):
        return dense, dense
    return dense, each(sizes.expert_shard, sizes.expert_shard == 1)


def state_bytes(
    jobs: JobTable, sizes: RankSizes, dense: ParameterBytes, experts: ParameterBytes
) -> tuple[Column, Column, Column]:
    """Bytes of parameters, gradients and optimizer states. Those of LoRA adapters come on top of frozen parameters in the format of
    computing, or quantized, which have neither gradients nor master weights."""
    exact = sizes.fp32 * 4.0
    trained = (
        sizes.dense * dense.parameter + sizes.experts * experts.parameter,
        sizes.dense * dense.gradient + sizes.experts * experts.gradient,
        sizes.dense * dense.state + sizes.experts * experts.state,
    )
    part = np.where((jobs.zero == 3) & (jobs.shard > 1), jobs.shard, 1.0)
    stored = np.where(jobs.base_bytes > 0, jobs.base_bytes, jobs.compute_bytes)
    blocks = sizes.dense + sizes.experts - sizes.tables
    frozen = (blocks * stored + sizes.tables * jobs.compute_bytes) / part + exact
    if not np.any(jobs.adapters > 0):
        parameters, gradients, states = trained
        copy = np.where(has_reference_copy(jobs), frozen, 0.0)
        return parameters + exact + copy, gradients + exact, states + sizes.fp32 * dense.state
    parameters, gradients, states = (trained_fraction(jobs) * each for each in trained)
    return frozen + parameters, gradients, states


class PipelineShare(NamedTuple):
    """One rank's part of the pipeline."""

    rank: Column
    blocks: Column
    sparse: Column
    """Blocks of the rank that have experts."""
    in_flight: Column
    """Forwards that wait for their backward, at most."""
    deferred: Column
    """Backwards whose weight half is deferred, at most."""
    has_embedding: Column
    """1: the rank holds the embedding."""
    has_head: Column
    """1: the rank holds the head."""


def pipeline_shares(jobs: JobTable) -> tuple[PipelineShare, ...]:
    """The ranks that can be the fullest: the first, the first that has one block more than it, and the last."""
    ranks = jobs.pipeline
    if not np.any(ranks > 1):
        one = np.ones_like(ranks)
        return (PipelineShare(0 * one, jobs.layers, jobs.sparse_layers, one, 0 * one, one, one),)
    stages = np.asarray(ranks * jobs.stages, np.int64)
    small, last, fewer = (column[stages] for column in _stage_splits(jobs))
    middle = np.minimum(fewer - ranks * np.floor(fewer / ranks), np.maximum(ranks - 2, 0))
    return tuple(_share(jobs, rank, (small, last, fewer)) for rank in (0 * ranks, middle, ranks - 1))


def _share(jobs: JobTable, rank: Column, split: tuple[Column, Column, Column]) -> PipelineShare:
    small, last, fewer = split
    ranks, stages, v_shaped = jobs.pipeline, jobs.stages, V_SHAPED[jobs.schedule]
    final = ranks * stages - 1  # the last stage
    # Stages of a rank: in a loop rank, rank + ranks, …; in a V rank and its mirror image.
    passed = np.minimum(np.maximum(np.ceil((fewer - rank) / ranks), 0), stages)  # of its stages, those that have `small` blocks
    looped = stages * small + (stages - passed)
    turned = 2 * small + (rank >= fewer) + (final - rank >= fewer)
    blocks = np.where(v_shaped, turned, looped)
    ends = np.where(v_shaped, rank == 0, rank == ranks - 1) | (ranks == 1)
    counted = small + (final >= fewer)  # what the last stage was counted with
    blocks = np.where(ends, blocks - counted + last, blocks)
    blocks = np.where(ranks == 1, jobs.layers, blocks)
    plain = jobs.layers - jobs.sparse_layers  # the first ones, on the first rank
    dense = np.where((jobs.sparse_layers == 0) | (rank == 0), np.minimum(plain, blocks), 0)
    waiting = in_flight(jobs, rank), deferred(jobs, rank)
    return PipelineShare(rank, blocks, blocks - dense, *waiting, (rank == 0) * 1, ends * 1)


def _stage_splits(jobs: JobTable) -> tuple[npt.NDArray[np.int64], ...]:
    """For each number of stages: blocks of a small stage, blocks of the last stage, and how many small stages come before
    larger ones, as `schedules/stage_split` divides equal blocks."""
    layers = int(np.max(jobs.layers))
    head = float(np.max(_head_in_blocks(jobs)))
    stages = np.arange(layers + 1)
    others = np.maximum(stages - 1, 1)
    best = np.full((2, layers + 1), np.inf)
    lasts = np.ones(layers + 1, dtype=np.int64)
    aim = np.floor((layers + head) / np.maximum(stages, 1) - head).astype(np.int64)
    for shift in (-1, 0, 1, 2):
        last = np.clip(aim + shift, 1, np.maximum(layers - (stages - 1), 1))
        small, larger = np.divmod(layers - last, others)
        dearest = np.maximum(small + (larger > 0), last + head)
        squares = larger * (small + 1) ** 2 + (others - larger) * small**2 + (last + head) ** 2
        better = (dearest < best[0] - 1e-9) | ((dearest < best[0] + 1e-9) & (squares < best[1] - 1e-9))
        best = np.where(better, (dearest, squares), best)
        lasts = np.where(better, last, lasts)
    small, larger = np.divmod(layers - lasts, others)
    return small, lasts, stages - 1 - larger


def _head_in_blocks(jobs: JobTable) -> Column:
    """FLOPs of the head relative to those of a block."""
    sparse = jobs.sparse_layers > 0
    dense = (2 + jobs.gated) * jobs.dim * jobs.ffn
    experts = 3 * jobs.dim * (jobs.active * jobs.expert_ffn + jobs.shared_ffn) + jobs.dim * jobs.experts
    matrices = jobs.attention_weights + np.where(sparse, experts, dense)
    return jobs.vocab * jobs.dim / (matrices + (jobs.score_width + jobs.value_width) * jobs.sequence * jobs.attended)
