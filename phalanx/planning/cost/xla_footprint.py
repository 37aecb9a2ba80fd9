"""The memory of a device with the XLA engine, for every job of a table at once. One program computes the step: parameters are fp32 and lie where
`xla/specs` puts them, and the compiler decides what else is there when. `cost/footprint` calls it; a test holds it against compiled programs."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from phalanx.planning.cost.activation_memory import kv_division, recomputed_fraction, residual_stream
from phalanx.planning.cost.job_table import RECOMPUTE, JobTable
from phalanx.planning.machines.rates import Column

_RUNTIME = 0.5 * 2**30
"""Bytes of a device that XLA's runtime takes before anything is computed: an assumption."""
_FRAGMENTATION = 0.03


class Parameters(Protocol):
    """Parameters of a device, divided by tensor parallelism alone."""

    @property
    def dense(self) -> Column: ...

    @property
    def fp32(self) -> Column: ...

    @property
    def experts(self) -> Column: ...

    @property
    def tables(self) -> Column: ...


def xla_bytes(jobs: JobTable, held: Parameters) -> tuple[Column, ...]:
    """Bytes by the components of a footprint."""
    count = held.dense + held.fp32 + held.experts
    low, spread, again = jobs.compute_bytes < 4, (jobs.zero == 3) & (jobs.shard > 1), recomputed_fraction(jobs)
    stored = np.where(jobs.recompute == RECOMPUTE.index("full"), residual_stream(jobs), residual_stream(jobs) + _products(jobs))
    kept = _kept(jobs)
    # At the end of the forward all blocks are there; then one block's backward, with the block itself if it is computed again.
    live = np.where(again > 0, kept, 0.0) + 1.5 * _inner(jobs)
    activations = jobs.layers * (again * stored + (1 - again) * kept) + live
    rows = np.minimum(np.where(np.greater(jobs.loss_chunk, 0), jobs.loss_chunk, np.inf), jobs.tokens)
    logits = 3.5 * 4.0 * rows * jobs.vocab / jobs.tensor
    if np.any(jobs.traced_activations):  # of a custom module, whose trace counts logits too
        part = np.where(jobs.recompute == RECOMPUTE.index("full"), again, 0.0)
        activations = jobs.tokens * (part * jobs.traced_recomputed + (1 - part) * jobs.traced_activations)
        logits = 0.0 * activations
    blocks = (count - held.tables) / jobs.layers
    gathered = np.where(spread, 2 * 4.0 * blocks, 0.0) + np.where(low, 2.0 * (held.dense + held.experts), 0.0)
    moving = activations + logits + gathered
    # The only micro-batch adds to no sum: its gradients come while activations are freed.
    gradients = 4.0 * count / np.where(jobs.zero >= 2, jobs.shard, 1)
    gradients = np.where(jobs.accumulation > 1.5, gradients, np.maximum(gradients - activations - logits, 0.0))
    return (
        4.0 * count / np.where(jobs.zero == 3, jobs.shard, 1),
        gradients,
        jobs.moments * count / jobs.shard,
        activations,
        logits,
        gathered,
        0.0 * count,
        np.where(jobs.on_cpu > 0, 0.0, _RUNTIME + _FRAGMENTATION * moving),
    )


def _inner(jobs: JobTable) -> Column:
    """An inner tensor of the feed-forward: of experts, of all that a token is sent to."""
    sparse = jobs.active * jobs.expert_ffn + jobs.shared_ffn / jobs.tensor
    width = np.where(jobs.sparse_layers > 0, sparse, jobs.ffn / jobs.tensor)
    return 1.0 * jobs.tokens * jobs.compute_bytes * width


def _products(jobs: JobTable) -> Column:
    """Results of a block's matrix products, which selective recomputation stores, and of its attention kernel where there is one."""
    given = jobs.score_width / jobs.tensor + jobs.kv_width / kv_division(jobs)
    given = given + np.where(jobs.scores > 1, 0.0, jobs.value_width / jobs.tensor)
    return jobs.tokens * jobs.compute_bytes * given + (1 + jobs.gated) * _inner(jobs) + residual_stream(jobs)


def _kept(jobs: JobTable) -> Column:
    """What a block keeps from forward to backward: norms and sums of the stream, queries, keys, values and results of attention, its tables of scores where
    no kernel is fused, and what the activation is made of."""
    tables = np.where(jobs.scores > 1, 3 * 4.0 * jobs.heads / jobs.tensor * jobs.sequence * jobs.tokens, 0.0)
    out = jobs.tokens * jobs.compute_bytes * jobs.value_width / jobs.tensor
    rows = np.where(jobs.sparse_layers > 0, 2.0 * jobs.active * jobs.tokens * jobs.dim * jobs.compute_bytes, 0.0)
    return (
        6 * residual_stream(jobs)
        + _products(jobs)
        + np.where(jobs.scores > 1, out, 0.0)
        + tables
        + rows
        + (2 + jobs.gated) * _inner(jobs)
    )
