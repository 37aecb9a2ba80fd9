"""Memory of parameters, gradients and optimizer states: how many parameters a rank holds, and how many bytes each takes
under ZeRO. Here is also what part of the model a pipeline rank has. `cost/footprint` calls it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.activation_memory import kv_division
from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.cost.schedule_cost import V_SHAPED, deferred, in_flight
from phalanx.planning.machines.rates import Column


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
    ahead = jobs.ahead * last
    sparse, blocks = share.sparse + np.where(jobs.sparse_layers > 0, ahead, 0), share.blocks + ahead
    count = np.where(jobs.tied > 0, np.maximum(first, last), first + last)
    tables = sizes.table * count + first * jobs.learned_positions * dim + ahead * 2 * dim * dim
    return RankSizes(
        dense=blocks * sizes.attention + (blocks - sparse) * sizes.ffn + sparse * sizes.shared + tables,
        fp32=(2 * blocks + last) * sizes.norm + sparse * sizes.router,
        experts=sparse * sizes.routed,
        tables=tables,
    )


def parameter_bytes(jobs: JobTable, sizes: PartSizes) -> tuple[ParameterBytes, ParameterBytes]:
    """Bytes per parameter of dense matrices, and of experts. In 16 bits, ZeRO-1 and 2 keep a whole 16-bit copy and shard
    the fp32 master weights."""
    low, pipelined, spread = jobs.compute_bytes < 4, jobs.pipeline > 1, jobs.shard > 1
    value, master = np.where(low, 2.0, 4.0), np.where(low, 4.0, 0.0)
    # A pipeline accumulates gradients on each rank before it reduces them.
    adding = np.where(low, jobs.wire, 4.0)
    states = np.where(jobs.offload > 0, 0, jobs.moments)

    def each(shard: Column, whole: Column) -> ParameterBytes:
        """`whole`: parameter and gradient stay whole although ZeRO-3 shards the rest."""
        apart = (jobs.zero == 3) & spread & np.logical_not(whole)
        part = 4.0 / shard
        parameter = np.where(spread, np.where(apart, part, value + master / shard), 4.0)
        kept = np.where((jobs.zero == 2) & (shard > 1), value / shard, value)
        gradient = np.where(spread, np.where(apart, np.where(pipelined, adding, part), kept), 4.0)
        return ParameterBytes(parameter, gradient, states / shard)

    dense = each(jobs.shard, False)
    if not np.any(jobs.sparse_layers > 0):
        return dense, dense
    return dense, each(sizes.expert_shard, sizes.expert_shard == 1)


def state_bytes(sizes: RankSizes, dense: ParameterBytes, experts: ParameterBytes) -> tuple[Column, Column, Column]:
    """Bytes of parameters, gradients and optimizer states."""
    exact = sizes.fp32 * 4.0
    return (
        sizes.dense * dense.parameter + sizes.experts * experts.parameter + exact,
        sizes.dense * dense.gradient + sizes.experts * experts.gradient + exact,
        (sizes.dense + sizes.fp32) * dense.state + sizes.experts * experts.state,
    )


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
    return jobs.vocab * jobs.dim / (matrices + (jobs.score_width + jobs.value_width) * jobs.sequence)
