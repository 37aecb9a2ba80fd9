"""Memory of parameters, gradients and optimizer states: how many parameters a rank holds, and how many bytes each takes
under ZeRO. Here is also what part of the model a pipeline rank has. `cost/footprint` calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.activation_memory import kv_division
from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.cost.schedule_cost import V_SHAPED, deferred, in_flight
from phalanx.planning.machines.rates import Column


@dataclass(frozen=True, slots=True)
class PartSizes:
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


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Parameters of a rank, before sharding."""

    dense: Column
    """All matrices except those of routed experts."""
    fp32: Column
    """Norms and routers, which stay in fp32."""
    experts: Column
    tables: Column
    """Embedding and head."""


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes per parameter: of dense matrices, and of experts."""

    parameter: Column
    gradient: Column
    state: Column
    expert_parameter: Column
    expert_gradient: Column
    expert_state: Column


def part_sizes(jobs: JobTable) -> PartSizes:
    tensor, dim = np.asarray(jobs.tensor), jobs.dim
    latent = np.asarray(jobs.latent)
    keys = dim * jobs.kv_width * (latent == 0)
    narrow = dim * latent + dim * np.asarray(jobs.rotated) * (latent > 0)
    attention = (jobs.attention_weights - keys - narrow) / tensor + keys / kv_division(jobs) + narrow
    ffn = (2 + np.asarray(jobs.gated)) * dim * jobs.ffn / tensor
    shared = 3 * dim * np.asarray(jobs.shared_ffn) / tensor
    routed = 3.0 * dim * np.asarray(jobs.expert_ffn) * jobs.experts / (np.asarray(jobs.expert) * jobs.expert_tensor)
    has, expert_shard = np.asarray(jobs.sparse_layers) > 0, _experts_shard(jobs)
    return PartSizes(
        attention=attention,
        ffn=ffn,
        shared=shared,
        router=dim * np.asarray(jobs.experts),
        routed=routed,
        norm=dim * (1 + np.asarray(jobs.layer_norm)),
        block=attention + np.where(has, shared + routed, ffn),
        table=jobs.vocab * dim / tensor,
        matrix=np.where(has, routed / 3, dim * jobs.ffn / tensor),
        expert_shard=expert_shard,
        unsharded=np.where(expert_shard == 1, routed, 0.0),
    )


def rank_sizes(jobs: JobTable, sizes: PartSizes, share: PipelineShare) -> RankSizes:
    dim, ahead = jobs.dim, np.asarray(jobs.ahead) * share.has_head
    sparse = share.sparse + np.where(np.asarray(jobs.sparse_layers) > 0, ahead, 0)
    all_ = share.blocks + ahead
    count = np.where(
        np.asarray(jobs.tied) > 0,
        np.maximum(share.has_embedding, share.has_head),
        share.has_embedding + np.asarray(share.has_head),
    )
    tables = sizes.table * count + share.has_embedding * np.asarray(jobs.learned_positions) * dim + ahead * 2 * dim * dim
    return RankSizes(
        dense=all_ * sizes.attention + (all_ - sparse) * sizes.ffn + sparse * sizes.shared + tables,
        fp32=(2 * all_ + share.has_head) * sizes.norm + sparse * sizes.router,
        experts=sparse * sizes.routed,
        tables=tables,
    )


def parameter_bytes(jobs: JobTable, sizes: PartSizes) -> ParameterBytes:
    """Bytes per parameter. In 16 bits, ZeRO-1 and 2 keep a whole 16-bit copy and shard the fp32 master weights."""
    shard, zero = np.asarray(jobs.shard), np.asarray(jobs.zero)
    low, pipelined = np.asarray(jobs.compute_bytes) < 4, np.asarray(jobs.pipeline) > 1
    third, spread = (zero == 3) & (shard > 1), shard > 1
    value, master = np.where(low, 2.0, 4.0), np.where(low, 4.0, 0.0)
    # A pipeline accumulates gradients on each rank before it reduces them.
    adding = np.where(low, np.asarray(jobs.wire), 4.0)

    def each(shard_size: Column, whole: Column) -> tuple[Column, Column]:
        """Bytes of parameter and gradient; `whole`: they stay whole although ZeRO-3 shards the rest."""
        apart = third & ~np.asarray(whole)
        part = 4.0 / shard_size
        parameter = np.where(spread, np.where(apart, part, value + master / shard_size), 4.0)
        kept = np.where((zero == 2) & (np.asarray(shard_size) > 1), value / shard_size, value)
        gradient = np.where(spread, np.where(apart, np.where(pipelined, adding, part), kept), 4.0)
        return parameter, gradient

    states = np.where(np.asarray(jobs.offload) > 0, 0, jobs.moments)
    dense = each(shard, False)
    if not np.any(np.asarray(jobs.sparse_layers) > 0):
        return ParameterBytes(*dense, states / shard, *dense, states / shard)
    return ParameterBytes(
        *dense, states / shard, *each(sizes.expert_shard, sizes.expert_shard == 1), states / sizes.expert_shard
    )


def state_bytes(sizes: RankSizes, each: ParameterBytes) -> tuple[Column, Column, Column]:
    """Bytes of parameters, gradients and optimizer states."""
    exact = sizes.fp32 * 4.0
    return (
        sizes.dense * each.parameter + sizes.experts * each.expert_parameter + exact,
        sizes.dense * each.gradient + sizes.experts * each.expert_gradient + exact,
        (sizes.dense + sizes.fp32) * each.state + sizes.experts * each.expert_state,
    )


def _experts_shard(jobs: JobTable) -> Column:
    if not np.any(np.asarray(jobs.sparse_layers) > 0):
        return jobs.shard
    alike = np.floor(jobs.ranks / (np.asarray(jobs.pipeline) * np.asarray(jobs.expert) * np.asarray(jobs.expert_tensor)))
    return np.gcd(np.asarray(jobs.shard).astype(np.int64), np.maximum(alike, 1).astype(np.int64))


class PipelineShare(NamedTuple):
    """One rank's part of the pipeline."""

    rank: Column
    blocks: Column
    sparse: Column
    """Blocks of the rank that have experts."""
    widest: Column
    """Blocks of its largest stage."""
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
    ranks = np.asarray(jobs.pipeline)
    if not np.any(ranks > 1):
        one = np.ones_like(ranks)
        return (PipelineShare(0 * one, jobs.layers, jobs.sparse_layers, jobs.layers, one, 0 * one, one, one),)
    table = _stage_splits(jobs)
    stages = (ranks * np.asarray(jobs.stages)).astype(np.int64)
    small, last, fewer = (column[stages] for column in table)
    middle = np.minimum(fewer - ranks * np.floor(fewer / ranks), np.maximum(ranks - 2, 0))
    return tuple(_share(jobs, rank, (small, last, fewer)) for rank in (0 * ranks, middle, ranks - 1))


def _share(jobs: JobTable, rank: Column, cut: tuple[Column, Column, Column]) -> PipelineShare:
    small, last, fewer = cut
    ranks, stages = np.asarray(jobs.pipeline), np.asarray(jobs.stages)
    kind = np.asarray(jobs.schedule)
    total = ranks * stages
    v_shaped = V_SHAPED[kind]
    # Stages of a rank: in a loop rank, rank + ranks, …; in a V rank and its mirror image.
    passed = np.minimum(np.maximum(np.ceil((fewer - rank) / ranks), 0), stages)  # of its stages, those that have `small` blocks
    looped = stages * small + (stages - passed)
    mirror = total - 1 - rank
    turned = 2 * small + (rank >= fewer) + (mirror >= fewer)
    blocks = np.where(v_shaped, turned, looped)
    ends = np.where(v_shaped, rank == 0, rank == ranks - 1) | (ranks == 1)
    in_last = small + (total - 1 >= fewer)  # what the last stage was counted with
    blocks = np.where(ends, blocks - in_last + last, blocks)
    blocks = np.where(ranks == 1, jobs.layers, blocks)
    plain = jobs.layers - np.asarray(jobs.sparse_layers)  # the first ones, on the first rank
    dense = np.where((np.asarray(jobs.sparse_layers) == 0) | (rank == 0), np.minimum(plain, blocks), 0)
    widest = np.where(ranks == 1, jobs.layers, np.maximum(small + 1, 1))
    return PipelineShare(
        rank,
        blocks,
        blocks - dense,
        np.minimum(widest, blocks),
        in_flight(jobs, rank),
        deferred(jobs, rank),
        (rank == 0) * 1,
        ends * 1,
    )


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
    sparse = np.asarray(jobs.sparse_layers) > 0
    dense = (2 + np.asarray(jobs.gated)) * jobs.dim * jobs.ffn
    experts = 3 * jobs.dim * (jobs.active * np.asarray(jobs.expert_ffn) + jobs.shared_ffn) + jobs.dim * np.asarray(jobs.experts)
    matrices = jobs.attention_weights + np.where(sparse, experts, dense)
    return jobs.vocab * jobs.dim / (matrices + (jobs.score_width + jobs.value_width) * jobs.sequence)
