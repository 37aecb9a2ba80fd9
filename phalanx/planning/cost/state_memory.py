"""Trained values of a rank, and bytes that each of them takes: what parameters, gradients and optimizer states come to by the formulas
of ZeRO. `planning/cost/footprint` calls it; what all ranks of a job have in common is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.activation_memory import kv_cut
from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.cost.schedule_cost import V_SHAPED, deferred, in_flight
from phalanx.planning.machines.rates import Column


@dataclass(frozen=True, slots=True)
class Sizes:
    """Values of the parts of a model on one rank, before shards divide them."""

    attention: Column
    """Of a block."""
    ffn: Column
    shared: Column
    """Experts that all tokens go to."""
    router: Column
    routed: Column
    """Experts of a block."""
    norm: Column
    block: Column
    """Matrices of the largest block, its experts too."""
    table: Column
    """Embedding or head."""
    matrix: Column
    """The largest of a block, all its experts together."""
    shares: Column
    """Ranks that share the state of the same experts."""
    unspread: Column
    """Of the largest block, those that ZeRO-3 leaves whole: experts that nobody shares."""


@dataclass(frozen=True, slots=True)
class Values:
    """Trained values of a rank, before shards divide them."""

    dense: Column
    """Matrices but those of routed experts."""
    exact: Column
    """Norms and routers, which stay in fp32."""
    experts: Column
    ends: Column
    """Embedding and head."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of each value: of dense matrices, and of experts'."""

    parameter: Column
    gradient: Column
    state: Column
    expert_parameter: Column
    expert_gradient: Column
    expert_state: Column


def sizes(work: JobTable) -> Sizes:
    tensor, dim = np.asarray(work.tensor), work.dim
    latent = np.asarray(work.latent)
    keys = dim * work.kv_width * (latent == 0)
    narrow = dim * latent + dim * np.asarray(work.rotated) * (latent > 0)
    attention = (work.attention_weights - keys - narrow) / tensor + keys / kv_cut(work) + narrow
    ffn = (2 + np.asarray(work.gated)) * dim * work.ffn / tensor
    shared = 3 * dim * np.asarray(work.shared_ffn) / tensor
    routed = 3.0 * dim * np.asarray(work.expert_ffn) * work.experts / (np.asarray(work.expert) * work.expert_tensor)
    has, shares = np.asarray(work.sparse_layers) > 0, _experts_shard(work)
    return Sizes(
        attention=attention,
        ffn=ffn,
        shared=shared,
        router=dim * np.asarray(work.experts),
        routed=routed,
        norm=dim * (1 + np.asarray(work.layer_norm)),
        block=attention + np.where(has, shared + routed, ffn),
        table=work.vocab * dim / tensor,
        matrix=np.where(has, routed / 3, dim * work.ffn / tensor),
        shares=shares,
        unspread=np.where(shares == 1, routed, 0.0),
    )


def values(work: JobTable, of: Sizes, share: Share) -> Values:
    dim, ahead = work.dim, np.asarray(work.ahead) * share.ends
    sparse = share.sparse + np.where(np.asarray(work.sparse_layers) > 0, ahead, 0)
    all_ = share.blocks + ahead
    tables = np.where(np.asarray(work.tied) > 0, np.maximum(share.begins, share.ends), share.begins + np.asarray(share.ends))
    ends = of.table * tables + share.begins * np.asarray(work.learned_positions) * dim + ahead * 2 * dim * dim
    return Values(
        dense=all_ * of.attention + (all_ - sparse) * of.ffn + sparse * of.shared + ends,
        exact=(2 * all_ + share.ends) * of.norm + sparse * of.router,
        experts=sparse * of.routed,
        ends=ends,
    )


def bytes_of(work: JobTable, of: Sizes) -> Bytes:
    """In low precision ZeRO-1 and 2 keep a whole copy in two bytes, and share the fp32 master."""
    shard, zero = np.asarray(work.shard), np.asarray(work.zero)
    low, pipelined = np.asarray(work.compute_bytes) < 4, np.asarray(work.pipeline) > 1
    third, spread = (zero == 3) & (shard > 1), shard > 1
    value, master = np.where(low, 2.0, 4.0), np.where(low, 4.0, 0.0)
    # A pipeline's backwards add up on each rank before anything travels.
    adding = np.where(low, np.asarray(work.wire), 4.0)

    def each(shares: Column, whole: Column) -> tuple[Column, Column]:
        """Of parameter and gradient; `whole`: they stay whole though ZeRO-3 spreads the rest."""
        apart = third & ~np.asarray(whole)
        part = 4.0 / shares
        parameter = np.where(spread, np.where(apart, part, value + master / shares), 4.0)
        kept = np.where((zero == 2) & (np.asarray(shares) > 1), value / shares, value)
        gradient = np.where(spread, np.where(apart, np.where(pipelined, adding, part), kept), 4.0)
        return parameter, gradient

    states = np.where(np.asarray(work.offload) > 0, 0, work.moments)
    dense = each(shard, False)
    if not np.any(np.asarray(work.sparse_layers) > 0):
        return Bytes(*dense, states / shard, *dense, states / shard)
    return Bytes(*dense, states / shard, *each(of.shares, of.shares == 1), states / of.shares)


def held(found: Values, each: Bytes) -> tuple[Column, Column, Column]:
    """Bytes of parameters, gradients and the optimizer's states."""
    exact = found.exact * 4.0
    return (
        found.dense * each.parameter + found.experts * each.expert_parameter + exact,
        found.dense * each.gradient + found.experts * each.expert_gradient + exact,
        (found.dense + found.exact) * each.state + found.experts * each.expert_state,
    )


def _experts_shard(work: JobTable) -> Column:
    if not np.any(np.asarray(work.sparse_layers) > 0):
        return work.shard
    alike = np.floor(work.ranks / (np.asarray(work.pipeline) * np.asarray(work.expert) * np.asarray(work.expert_tensor)))
    return np.gcd(np.asarray(work.shard).astype(np.int64), np.maximum(alike, 1).astype(np.int64))


class Share(NamedTuple):
    """One rank's part of the pipeline."""

    rank: Column
    blocks: Column
    sparse: Column
    """Of them, with experts."""
    widest: Column
    """Blocks of its largest stage."""
    flying: Column
    """Forwards of a stage that wait for their backward, at most."""
    owing: Column
    """Backwards whose weight half is put off, at most."""
    begins: Column
    """1: it holds the embedding …"""
    ends: Column
    """… the head."""


def shares(work: JobTable) -> tuple[Share, ...]:
    """The ranks one of which is the fullest: the first, the first that has a block more than it, the last."""
    ranks = np.asarray(work.pipeline)
    if not np.any(ranks > 1):
        one = np.ones_like(ranks)
        return (Share(0 * one, work.layers, work.sparse_layers, work.layers, one, 0 * one, one, one),)
    table = _cuts(work)
    stages = (ranks * np.asarray(work.stages)).astype(np.int64)
    small, last, fewer = (column[stages] for column in table)
    middle = np.minimum(fewer - ranks * np.floor(fewer / ranks), np.maximum(ranks - 2, 0))
    return tuple(_share(work, rank, (small, last, fewer)) for rank in (0 * ranks, middle, ranks - 1))


def _share(work: JobTable, rank: Column, cut: tuple[Column, Column, Column]) -> Share:
    small, last, fewer = cut
    ranks, stages = np.asarray(work.pipeline), np.asarray(work.stages)
    kind = np.asarray(work.schedule)
    total = ranks * stages
    v_shaped = V_SHAPED[kind]
    # Stages in a loop: rank, rank + ranks, …; in a V: rank, and its mirror image.
    passed = np.minimum(np.maximum(np.ceil((fewer - rank) / ranks), 0), stages)  # of its stages, those that have `small` blocks
    looped = stages * small + (stages - passed)
    mirror = total - 1 - rank
    turned = 2 * small + (rank >= fewer) + (mirror >= fewer)
    blocks = np.where(v_shaped, turned, looped)
    ends = np.where(v_shaped, rank == 0, rank == ranks - 1) | (ranks == 1)
    in_last = small + (total - 1 >= fewer)  # what the last stage was counted with
    blocks = np.where(ends, blocks - in_last + last, blocks)
    blocks = np.where(ranks == 1, work.layers, blocks)
    plain = work.layers - np.asarray(work.sparse_layers)  # the first ones, on the first rank
    dense = np.where((np.asarray(work.sparse_layers) == 0) | (rank == 0), np.minimum(plain, blocks), 0)
    widest = np.where(ranks == 1, work.layers, np.maximum(small + 1, 1))
    return Share(
        rank,
        blocks,
        blocks - dense,
        np.minimum(widest, blocks),
        in_flight(work, rank),
        deferred(work, rank),
        (rank == 0) * 1,
        ends * 1,
    )


def _cuts(work: JobTable) -> tuple[npt.NDArray[np.int64], ...]:
    """For each number of stages: blocks of a small stage, of the last one, and how many small ones come before larger ones, as
    `schedules/stage_split` deals equal blocks out."""
    layers = int(np.max(work.layers))
    head = float(np.max(_head_in_blocks(work)))
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


def _head_in_blocks(work: JobTable) -> Column:
    """FLOPs of the head over those of a block."""
    sparse = np.asarray(work.sparse_layers) > 0
    dense = (2 + np.asarray(work.gated)) * work.dim * work.ffn
    experts = 3 * work.dim * (work.active * np.asarray(work.expert_ffn) + work.shared_ffn) + work.dim * np.asarray(work.experts)
    matrices = work.attention_weights + np.where(sparse, experts, dense)
    return work.vocab * work.dim / (matrices + (work.score_width + work.value_width) * work.sequence)
