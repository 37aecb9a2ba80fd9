"""Activation memory: bytes that a block and the head keep from forward to backward on one rank, tensor by tensor as the
models and autograd allocate them. `cost/footprint` adds them up.

The residual stream is fp32, whatever a run computes in. Under autocast each projection casts its input anew; tensor
parallelism casts once and shares. Sequence parallelism divides the residual stream, not the gathered inputs of a
tensor-parallel region.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import METHODS, RECOMPUTE, JobTable
from phalanx.planning.machines.rates import Column


class BlockActivations(NamedTuple):
    """Bytes of one micro-batch in one block."""

    dense: Column
    sparse: Column
    """The same of a block with experts."""
    live: Column
    """Bytes of a recomputed block while its backward runs; 0 without recomputation."""
    backward: Column
    """What a block's backward needs in addition, at its worst moment."""
    deferred: Column
    """What a deferred weight backward holds in addition: gradients of the results of matrix products."""


class _BlockBytes(NamedTuple):
    """Bytes of one block by origin."""

    entering: Column
    """Inputs of the two norms and their statistics."""
    attention: Column
    dense: Column
    sparse: Column
    products: Column
    """Results of matrix products and attention in a dense block, which selective recomputation keeps."""
    sparse_products: Column


def block_activations(jobs: JobTable) -> BlockActivations:
    """Activations of one block under the job's recomputation."""
    of = _block_bytes(jobs)
    dense, sparse = of.entering + of.attention + of.dense, of.entering + of.attention + of.sparse
    enters = 4.0 * jobs.dim * residual_tokens(jobs)
    mode = np.asarray(jobs.recompute)
    owed = np.where(np.asarray(jobs.sparse_layers) > 0, of.sparse_products, of.products)
    if not np.any(mode):
        return BlockActivations(dense, sparse, 0.0, _backward_bytes(jobs), owed)
    full, selective = mode == RECOMPUTE.index("full"), mode == RECOMPUTE.index("selective")
    part = recomputed_fraction(jobs)

    def mixed(whole: Column, products: Column) -> Column:
        less = np.where(full, enters, np.where(selective, enters + products, whole))
        return part * less + (1 - part) * whole

    fewest = np.asarray(jobs.sparse_layers) > 0
    again = np.where(fewest, sparse, dense) - np.where(selective, np.where(fewest, of.sparse_products, of.products), 0.0)
    live = np.where(mode > 0, again, 0.0)
    return BlockActivations(mixed(dense, of.products), mixed(sparse, of.sparse_products), live, _backward_bytes(jobs), owed)


def recomputed_fraction(jobs: JobTable) -> Column:
    """Fraction of the blocks that are recomputed, on the rank that has the fewest: every N-th block of the whole model, of
    which short stages have more or fewer."""
    every, pipelined = np.asarray(jobs.recompute_every), np.asarray(jobs.pipeline) > 1
    most = np.where(pipelined, np.ceil(jobs.layers / (np.asarray(jobs.pipeline) * np.asarray(jobs.stages))), jobs.layers)
    count = np.where(pipelined, np.floor(most / every), np.ceil(most / every))
    return np.where(np.asarray(jobs.recompute) > 0, count / most, 0.0)


def residual_tokens(jobs: JobTable) -> Column:
    """Tokens of the residual stream on one rank."""
    return jobs.tokens / np.where(np.asarray(jobs.sequence_parallel) > 0, jobs.tensor, 1)


def kv_division(jobs: JobTable) -> Column:
    """By how much keys and values are divided: heads that cannot be divided evenly are whole on every rank."""
    each = jobs.kv_heads / np.asarray(jobs.tensor)
    return np.where(each == np.floor(each), jobs.tensor, 1)


def _block_bytes(jobs: JobTable) -> _BlockBytes:
    tokens, tensor, size = jobs.tokens, np.asarray(jobs.tensor), np.asarray(jobs.compute_bytes)
    low = size < 4
    cut = tensor > 1
    stats = 4 + 4 * np.asarray(jobs.layer_norm)
    # CPUs compute a root mean square in several steps, and keep the normalized input too.
    norm = 4.0 * jobs.dim * (1 + np.asarray(jobs.on_cpu) * (1 - np.asarray(jobs.layer_norm))) + stats
    entering = 2 * norm * residual_tokens(jobs)

    def read(projections: Column) -> Column:
        """Bytes of the input of this many projections."""
        copies = np.where(low, np.where(cut, 1, projections), 1)
        return np.where(low, 2 * copies, 4) * jobs.dim * tokens

    attention, products = _attention(jobs, read)
    dense = read(1 + np.asarray(jobs.gated)) + size * (2 + 2 * np.asarray(jobs.gated)) * jobs.ffn / tensor * tokens
    dense_products = size * tokens * ((1 + np.asarray(jobs.gated)) * jobs.ffn / tensor + jobs.dim)
    if not np.any(np.asarray(jobs.sparse_layers) > 0):
        return _BlockBytes(entering, attention, dense, dense, products + dense_products, products + dense_products)
    sparse, routed = _experts(jobs, read)
    return _BlockBytes(entering, attention, dense, sparse, products + dense_products, products + routed)


def _attention(jobs: JobTable, read: object) -> tuple[Column, Column]:
    """Bytes that attention keeps, and the part of them that is results of matrix products."""
    assert callable(read)
    tokens, tensor, size = jobs.tokens, np.asarray(jobs.tensor), np.asarray(jobs.compute_bytes)
    low, latent = size < 4, np.asarray(jobs.latent)
    score, value = jobs.score_width / tensor, jobs.value_width / tensor
    given = jobs.kv_width / kv_division(jobs)
    out = value * np.where(np.asarray(jobs.context) > 1, 2, 1)  # parts that are put together lie in another order
    heads, table = 4 * jobs.heads / tensor, _table(jobs)
    scores = np.where(np.asarray(jobs.scores) == 2, table, 0.0)  # products too, where no kernel is fused
    if np.any(latent > 0):
        expanded = (jobs.kv_width - jobs.heads * np.asarray(jobs.rotated)) / tensor
        inner = size * (2 * score + expanded + out) + heads + table
        narrow = latent * np.where(low, 6, 8)
        bytes_ = read(2) + tokens * (inner + narrow)
        products = size * tokens * (score + expanded + value + jobs.dim + latent + np.asarray(jobs.rotated)) + tokens * (
            heads + scores
        )
        return bytes_, products
    turned = np.where(low, 4, 0) * np.asarray(jobs.rotated) * (1 - np.asarray(jobs.qk_norm))
    normed = 4.0 * np.asarray(jobs.qk_norm) * (score + given / 2) * (1 + np.asarray(jobs.on_cpu))
    bytes_ = read(3) + tokens * (size * (score + given + out) + heads + table + turned + normed)
    products = tokens * (size * (score + given + value + jobs.dim) + heads + scores)
    return bytes_, products


def _table(jobs: JobTable) -> Column:
    """What attention keeps per token besides inputs and result. Context parallelism makes its masks when it needs them."""
    kind, size = np.asarray(jobs.scores), np.asarray(jobs.compute_bytes)
    if not np.any(kind):
        return 0.0
    every = size * (jobs.heads / np.asarray(jobs.tensor) * jobs.sequence + 2 * jobs.score_width / np.asarray(jobs.tensor))
    return np.where(
        np.asarray(jobs.context) > 1, 0.0, np.where(kind == 2, every, np.where(kind == 1, size * jobs.sequence, 0.0))
    )


def _experts(jobs: JobTable, read: object) -> tuple[Column, Column]:
    """Bytes of router, shared and routed experts, and the part that is results of matrix products. Each tensor rank routes
    a slice of the sequence."""
    assert callable(read)
    tokens, tensor, size = jobs.tokens, np.asarray(jobs.tensor), np.asarray(jobs.compute_bytes)
    mine = tokens / tensor
    rows = mine * jobs.active
    spread = np.asarray(jobs.expert) * np.asarray(jobs.expert_tensor) > 1
    router = mine * (4.0 * jobs.dim + 4 * jobs.experts + 20 * jobs.active)
    indices = rows * np.where(spread, 32, 16)
    inner = rows * size * 4 * np.asarray(jobs.expert_ffn)
    there = rows * size * jobs.dim * jobs.expert_tensor
    back = rows * size * jobs.dim
    shared = np.where(np.asarray(jobs.shared_ffn) > 0, read(2), 0) + size * 4 * jobs.shared_ffn / tensor * tokens
    shared_products = np.where(np.asarray(jobs.shared_ffn) > 0, size * tokens * (2 * jobs.shared_ffn / tensor + jobs.dim), 0)
    products = rows * size * (2 * np.asarray(jobs.expert_ffn) + jobs.dim * jobs.expert_tensor) + mine * 4 * jobs.experts
    return router + indices + inner + there + back + shared, products + shared_products


def _backward_bytes(jobs: JobTable) -> Column:
    """Gradients inside a block's backward: of the residual stream, of a region's input and of its inner tensors."""
    tokens, tensor, size = jobs.tokens, np.asarray(jobs.tensor), np.asarray(jobs.compute_bytes)
    dense = tokens * (size * jobs.dim + 2 * size * jobs.ffn / tensor)
    if np.any(np.asarray(jobs.sparse_layers) > 0):
        rows = tokens / tensor * jobs.active
        sparse = rows * ((4 + 2 * size) * jobs.dim)
        dense = np.where(np.asarray(jobs.sparse_layers) > 0, np.maximum(dense, sparse), dense)
    gathered = np.where(np.asarray(jobs.context) > 1, _context_values(jobs), 0.0)
    return 8.0 * jobs.dim * residual_tokens(jobs) + np.maximum(dense, gathered)


def _context_values(jobs: JobTable) -> Column:
    """Keys and values of other ranks: of the whole sequence where they are gathered, of two ranks in a ring."""
    ranks = np.where(np.asarray(jobs.method) == METHODS.index("gather"), jobs.context, 2)
    return jobs.tokens * ranks * jobs.kv_width / kv_division(jobs) * (2 * np.asarray(jobs.compute_bytes) + 4)


class HeadActivations(NamedTuple):
    """Bytes of one micro-batch at the end of the last stage."""

    states: Column
    """Inputs of the last norm and of the output matrix, kept for the backward."""
    kept: Column
    """What the loss keeps for the backward."""
    most: Column
    """Logits and loss at the worst moment."""


def head_activations(jobs: JobTable) -> HeadActivations:
    """The head and the loss, once more for each MTP depth."""
    tokens, tensor, size = jobs.tokens, np.asarray(jobs.tensor), np.asarray(jobs.compute_bytes)
    low, chunk, depths = size < 4, np.asarray(jobs.loss_chunk), 1 + np.asarray(jobs.ahead)
    states = 4.0 * jobs.dim * residual_tokens(jobs) + np.where(low, 2, 4) * jobs.dim * tokens
    columns = jobs.vocab / tensor
    each = np.where(tensor > 1, np.where(low, 10, 8), 12) * columns
    logit_bytes = np.where(tensor > 1, size, 4) * columns
    gradients = size * jobs.dim * tokens + size * jobs.dim * columns  # both gradients, beside the loss
    chunked = np.minimum(chunk, tokens) * each + gradients + size * jobs.dim * tokens + 4 * jobs.dim * columns
    return HeadActivations(
        states=states * depths,
        kept=np.where(chunk > 0, gradients, tokens * logit_bytes * depths),
        most=np.where(chunk > 0, chunked * depths, tokens * (each + (depths - 1) * logit_bytes)),
    )
