"""What a block keeps from its forward to its backward on one rank, and what the head does, in bytes: tensor by tensor as the
models and autograd have them. `planning/cost/footprint` adds them up.

The stream of residuals is fp32, whatever a run computes in. Under autocast each projection casts its input anew; tensor parallelism
casts once and shares. Sequence parallelism cuts the stream, not the gathered inputs of a region.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import METHODS, RECOMPUTE, JobTable
from phalanx.planning.machines.rates import Column


class Kept(NamedTuple):
    """Bytes of one micro-batch in one block."""

    dense: Column
    sparse: Column
    """The same of a block with experts."""
    live: Column
    """Of a block that is repeated, while its backward runs; 0 where nothing is repeated."""
    passing: Column
    """What a block's backward needs besides, at its worst moment."""
    owed: Column
    """What a weight half that is put off holds besides: gradients of the results of products."""


class Widths(NamedTuple):
    """Bytes by what they are of, for one block."""

    entering: Column
    """Inputs of the two norms, and of their statistics."""
    attention: Column
    dense: Column
    sparse: Column
    products: Column
    """Results of matrix products and attention in a dense block: what "selective" keeps …"""
    sparse_products: Column


def kept(work: JobTable) -> Kept:
    """Of one block, by how much of it is repeated."""
    of = _widths(work)
    dense, sparse = of.entering + of.attention + of.dense, of.entering + of.attention + of.sparse
    enters = 4.0 * work.dim * stream(work)
    mode = np.asarray(work.recompute)
    owed = np.where(np.asarray(work.sparse_layers) > 0, of.sparse_products, of.products)
    if not np.any(mode):
        return Kept(dense, sparse, 0.0, _passing(work), owed)
    full, selective = mode == RECOMPUTE.index("full"), mode == RECOMPUTE.index("selective")
    part = repeated(work)

    def mixed(whole: Column, products: Column) -> Column:
        less = np.where(full, enters, np.where(selective, enters + products, whole))
        return part * less + (1 - part) * whole

    fewest = np.asarray(work.sparse_layers) > 0
    again = np.where(fewest, sparse, dense) - np.where(selective, np.where(fewest, of.sparse_products, of.products), 0.0)
    live = np.where(mode > 0, again, 0.0)
    return Kept(mixed(dense, of.products), mixed(sparse, of.sparse_products), live, _passing(work), owed)


def repeated(work: JobTable) -> Column:
    """Part of the blocks that is computed again, on the rank that has the smallest: every so manieth of the whole model, of which
    stages of few blocks have more or fewer."""
    every, pipelined = np.asarray(work.recompute_every), np.asarray(work.pipeline) > 1
    most = np.where(pipelined, np.ceil(work.layers / (np.asarray(work.pipeline) * np.asarray(work.stages))), work.layers)
    count = np.where(pipelined, np.floor(most / every), np.ceil(most / every))
    return np.where(np.asarray(work.recompute) > 0, count / most, 0.0)


def stream(work: JobTable) -> Column:
    """Tokens of the stream of residuals on one rank."""
    return work.tokens / np.where(np.asarray(work.sequence_parallel) > 0, work.tensor, 1)


def kv_cut(work: JobTable) -> Column:
    """By how much keys and values are cut: heads that cannot be dealt evenly are whole on every rank."""
    each = work.kv_heads / np.asarray(work.tensor)
    return np.where(each == np.floor(each), work.tensor, 1)


def _widths(work: JobTable) -> Widths:
    tokens, tensor, size = work.tokens, np.asarray(work.tensor), np.asarray(work.compute_bytes)
    low = size < 4
    cut = tensor > 1
    stats = 4 + 4 * np.asarray(work.layer_norm)
    # Cores take a root mean square in several steps, and keep the normed input too.
    norm = 4.0 * work.dim * (1 + np.asarray(work.on_cpu) * (1 - np.asarray(work.layer_norm))) + stats
    entering = 2 * norm * stream(work)

    def read(projections: Column) -> Column:
        """The input of so many projections."""
        copies = np.where(low, np.where(cut, 1, projections), 1)
        return np.where(low, 2 * copies, 4) * work.dim * tokens

    attention, products = _attention(work, read)
    dense = read(1 + np.asarray(work.gated)) + size * (2 + 2 * np.asarray(work.gated)) * work.ffn / tensor * tokens
    dense_products = size * tokens * ((1 + np.asarray(work.gated)) * work.ffn / tensor + work.dim)
    if not np.any(np.asarray(work.sparse_layers) > 0):
        return Widths(entering, attention, dense, dense, products + dense_products, products + dense_products)
    sparse, routed = _experts(work, read)
    return Widths(entering, attention, dense, sparse, products + dense_products, products + routed)


def _attention(work: JobTable, read: object) -> tuple[Column, Column]:
    """All that it keeps, and those of it that are results of products."""
    assert callable(read)
    tokens, tensor, size = work.tokens, np.asarray(work.tensor), np.asarray(work.compute_bytes)
    low, latent = size < 4, np.asarray(work.latent)
    score, value = work.score_width / tensor, work.value_width / tensor
    given = work.kv_width / kv_cut(work)
    out = value * np.where(np.asarray(work.context) > 1, 2, 1)  # parts that are put together lie in another order
    heads, table = 4 * work.heads / tensor, _table(work)
    scores = np.where(np.asarray(work.scores) == 2, table, 0.0)  # products too, where no kernel is fused
    if np.any(latent > 0):
        expanded = (work.kv_width - work.heads * np.asarray(work.rotated)) / tensor
        inner = size * (2 * score + expanded + out) + heads + table
        narrow = latent * np.where(low, 6, 8)
        found = read(2) + tokens * (inner + narrow)
        products = size * tokens * (score + expanded + value + work.dim + latent + np.asarray(work.rotated)) + tokens * (
            heads + scores
        )
        return found, products
    turned = np.where(low, 4, 0) * np.asarray(work.rotated) * (1 - np.asarray(work.qk_norm))
    normed = 4.0 * np.asarray(work.qk_norm) * (score + given / 2) * (1 + np.asarray(work.on_cpu))
    found = read(3) + tokens * (size * (score + given + out) + heads + table + turned + normed)
    products = tokens * (size * (score + given + value + work.dim) + heads + scores)
    return found, products


def _table(work: JobTable) -> Column:
    """A token's part of what attention keeps beside its inputs and result. Context parallelism makes its masks when it needs them."""
    kind, size = np.asarray(work.scores), np.asarray(work.compute_bytes)
    if not np.any(kind):
        return 0.0
    every = size * (work.heads / np.asarray(work.tensor) * work.sequence + 2 * work.score_width / np.asarray(work.tensor))
    return np.where(
        np.asarray(work.context) > 1, 0.0, np.where(kind == 2, every, np.where(kind == 1, size * work.sequence, 0.0))
    )


def _experts(work: JobTable, read: object) -> tuple[Column, Column]:
    """Router, shared and routed experts. Tensor ranks route a slice of the sequence each."""
    assert callable(read)
    tokens, tensor, size = work.tokens, np.asarray(work.tensor), np.asarray(work.compute_bytes)
    mine = tokens / tensor
    rows = mine * work.active
    spread = np.asarray(work.expert) * np.asarray(work.expert_tensor) > 1
    router = mine * (4.0 * work.dim + 4 * work.experts + 20 * work.active)
    indices = rows * np.where(spread, 32, 16)
    inner = rows * size * 4 * np.asarray(work.expert_ffn)
    there = rows * size * work.dim * work.expert_tensor
    back = rows * size * work.dim
    shared = np.where(np.asarray(work.shared_ffn) > 0, read(2), 0) + size * 4 * work.shared_ffn / tensor * tokens
    shared_products = np.where(np.asarray(work.shared_ffn) > 0, size * tokens * (2 * work.shared_ffn / tensor + work.dim), 0)
    products = rows * size * (2 * np.asarray(work.expert_ffn) + work.dim * work.expert_tensor) + mine * 4 * work.experts
    return router + indices + inner + there + back + shared, products + shared_products


def _passing(work: JobTable) -> Column:
    """Gradients that are on their way through a block: of the stream, of a region's input and of its inner tensors."""
    tokens, tensor, size = work.tokens, np.asarray(work.tensor), np.asarray(work.compute_bytes)
    dense = tokens * (size * work.dim + 2 * size * work.ffn / tensor)
    if np.any(np.asarray(work.sparse_layers) > 0):
        rows = tokens / tensor * work.active
        sparse = rows * ((4 + 2 * size) * work.dim)
        dense = np.where(np.asarray(work.sparse_layers) > 0, np.maximum(dense, sparse), dense)
    gathered = np.where(np.asarray(work.context) > 1, _carried(work), 0.0)
    return 8.0 * work.dim * stream(work) + np.maximum(dense, gathered)


def _carried(work: JobTable) -> Column:
    """Keys and values of other ranks: of the whole sequence where they are gathered, of two ranks where they go round."""
    ranks = np.where(np.asarray(work.method) == METHODS.index("gather"), work.context, 2)
    return work.tokens * ranks * work.kv_width / kv_cut(work) * (2 * np.asarray(work.compute_bytes) + 4)


class Head(NamedTuple):
    """Bytes of one micro-batch at the end of the last stage."""

    states: Column
    """Inputs of its norm and of the output matrix, kept for the backward."""
    kept: Column
    """Of the loss, kept for the backward."""
    most: Column
    """Of logits and loss, at the worst moment."""


def logits(work: JobTable) -> Head:
    """The head and the loss over the vocabulary, once more for each token predicted ahead."""
    tokens, tensor, size = work.tokens, np.asarray(work.tensor), np.asarray(work.compute_bytes)
    low, chunk, depths = size < 4, np.asarray(work.loss_chunk), 1 + np.asarray(work.ahead)
    states = 4.0 * work.dim * stream(work) + np.where(low, 2, 4) * work.dim * tokens
    columns = work.vocab / tensor
    each = np.where(tensor > 1, np.where(low, 10, 8), 12) * columns
    one = np.where(tensor > 1, size, 4) * columns
    made = size * work.dim * tokens + size * work.dim * columns  # both gradients, beside the loss
    chunked = np.minimum(chunk, tokens) * each + made + size * work.dim * tokens + 4 * work.dim * columns
    return Head(
        states=states * depths,
        kept=np.where(chunk > 0, made, tokens * one * depths),
        most=np.where(chunk > 0, chunked * depths, tokens * (each + (depths - 1) * one)),
    )
