"""Trained values of a rank, and bytes that each of them takes: what parameters, gradients and optimizer states come to by the formulas
of ZeRO. `planning/footprint` calls it; what all ranks of a job have in common is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.planning.activation_memory import kv_cut
from phalanx.planning.job_table import Column, Work
from phalanx.planning.stage import Share


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


def sizes(work: Work) -> Sizes:
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


def values(work: Work, of: Sizes, share: Share) -> Values:
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


def bytes_of(work: Work, of: Sizes) -> Bytes:
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


def _experts_shard(work: Work) -> Column:
    if not np.any(np.asarray(work.sparse_layers) > 0):
        return work.shard
    alike = np.floor(work.ranks / (np.asarray(work.pipeline) * np.asarray(work.expert) * np.asarray(work.expert_tensor)))
    return np.gcd(np.asarray(work.shard).astype(np.int64), np.maximum(alike, 1).astype(np.int64))
