"""What a step costs for parameters, gradients and optimizer states: their travel over replicas and shards, adding up, updating, and
going to the host. `planning/time` calls it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.communication import group
from phalanx.planning.job_table import Column, Work
from phalanx.planning.layer import sparse_part
from phalanx.planning.rates import Rates


class Held(NamedTuple):
    """Values of the fullest pipeline rank, before shards divide them."""

    dense: Column
    experts: Column


def held_by(work: Work, layers: Column) -> Held:
    """Of the fullest rank: its layers, and the embedding or the head (both, where there is no pipeline and they are not tied)."""
    sparse, matrices = sparse_part(work), 2 + np.asarray(work.gated)
    ffn = (1 - sparse) * work.ffn + sparse * work.shared_ffn
    block_values = work.attention_weights + matrices * work.dim * ffn + sparse * work.experts * work.dim
    ends = np.where((np.asarray(work.pipeline) > 1) | (np.asarray(work.tied) > 0), 1, 2) * work.vocab * work.dim
    # Where layers do not divide evenly, the ends have fewer of them beside their tables.
    spared = layers * work.pipeline - work.layers
    ends = np.where(spared > 0, np.maximum(0.0, ends - block_values), ends)
    dense = (layers * block_values + ends) / work.tensor
    experts = layers * sparse * 3 * work.dim * work.expert_ffn * work.experts / (work.expert * work.expert_tensor)
    return Held(dense, experts)


def adding_seconds(work: Work, rates: Rates, held: Held) -> Column:
    """Adding a micro-batch's gradients to those kept in 32 bits, in part behind the products. Sharded ones are few."""
    kept = np.where(np.asarray(work.zero) == 3, work.shard, 1)
    return rates.adding * (held.dense + held.experts) / kept / (work.bandwidth * rates.memory)


def data_seconds(work: Work, rates: Rates, held: Held, count: Column, busy: Column) -> Column:
    """Exposed: gradients summed over replicas, parameters gathered. Sharded parameters (`zero` 3) travel with every micro-batch."""
    third = (np.asarray(work.zero) == 3) & (np.asarray(work.shard) > 1)
    shards = work.shard * work.context
    inner = group(work, rates, shards, work.tensor)
    outer = group(work, rates, work.data, work.tensor * shards)
    every = group(work, rates, work.data * shards, work.tensor)
    gradient, value = work.wire, work.compute_bytes
    gathered = np.where(np.asarray(work.gathered) > 0, work.gathered, value)
    each = (2 * gathered + gradient) * held.dense * inner.per_byte + 3 * inner.latency * work.layers / work.pipeline
    replicated = 2 * gradient * held.dense / np.maximum(shards, 1) * outer.per_byte + 2 * outer.latency
    plain = (gradient + value) * held.dense * every.per_byte + 2 * every.latency * work.layers / work.pipeline
    sent = np.where(third, count * each + replicated, plain)
    if np.any(np.asarray(work.sparse_layers) > 0):
        apart = work.expert * work.expert_tensor
        same = np.maximum(work.ranks / work.pipeline / apart, 1)
        wires = group(work, rates, same, apart)
        rest = held.experts * wires.per_byte
        sent = sent + np.where(third, count * (2 * gathered + gradient) * rest, (gradient + value) * rest)
    cover = rates.data_hidden * np.where(third, count, 1) * busy
    return np.maximum(0.0, sent - cover) + np.where(third, rates.gathering, rates.contention) * np.minimum(sent, cover)


def optimizer_seconds(work: Work, rates: Rates, held: Held) -> Column:
    apart = work.expert * work.expert_tensor
    same = np.clip(work.ranks / work.pipeline / np.maximum(apart, 1), 1, None)
    mine = held.dense / (work.shard * work.context) + held.experts / np.minimum(work.shard * work.context, same)
    # Moments of 4 bytes each are 16 of some 28 bytes that are read and written.
    size = rates.optimizer_bytes * (12 + 2 * np.asarray(work.moments)) / 28
    return size * mine / (work.bandwidth * rates.memory)


def offload_seconds(work: Work, held: Held, count: Column, layers: Column, busy: Column) -> Column:
    """States that cross to the host and back every step, and activations that do so every micro-batch behind computing."""
    mine = (held.dense + held.experts) / (work.shard * work.context)
    states = np.where(np.asarray(work.offload) > 0, 16.0 * mine / work.host_bandwidth, 0.0)
    states = np.where(np.asarray(work.offload) > 1, 8 * states, states)
    if not np.any(np.asarray(work.activations_on_host) > 0):
        return states
    crossing = 2 * work.tokens * layers * 2 * work.dim * work.compute_bytes / work.host_bandwidth
    return states + np.where(np.asarray(work.activations_on_host) > 0, count * np.maximum(0.0, crossing - busy), 0.0)
