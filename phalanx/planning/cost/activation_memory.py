"""Activation memory: bytes that a block and the head keep from forward to backward on one rank, tensor by tensor as the models and autograd
allocate them. Norms compute in fp32, whatever the residual stream is in. Under autocast each projection casts its input anew; tensor parallelism
casts once and shares. Sequence parallelism divides the residual stream, not the gathered inputs of a tensor-parallel region. Compiled blocks keep
less: the compiler fuses casts, and recomputes what follows from something else that it keeps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import METHODS, RECOMPUTE, JobTable
from phalanx.planning.machines.rates import Column

_EXPANSION = 32


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


def block_activations(jobs: JobTable) -> BlockActivations:
    """Activations of one block under the job's recomputation."""
    if np.any(jobs.traced_activations):
        return _traced(jobs)
    dense, sparse = _block_bytes(jobs)
    has_experts = jobs.sparse_layers > 0
    deferred = np.where(has_experts, sparse.products, dense.products)
    if not np.any(jobs.recompute):
        return BlockActivations(dense.kept, sparse.kept, 0.0, _backward_bytes(jobs), deferred)
    full, selective = jobs.recompute == RECOMPUTE.index("full"), jobs.recompute == RECOMPUTE.index("selective")
    entering, part = residual_stream(jobs), recomputed_fraction(jobs)

    def mixed(block: _BlockBytes) -> Column:
        less = np.where(full, entering, np.where(selective, entering + block.stored, block.kept))
        return part * less + (1 - part) * block.kept

    stored = np.where(has_experts, sparse.stored, dense.stored)
    live = np.where(has_experts, sparse.kept, dense.kept) - np.where(selective, stored, 0.0)
    return BlockActivations(
        mixed(dense), mixed(sparse), np.where(jobs.recompute > 0, live, 0.0), _backward_bytes(jobs), deferred
    )


def _traced(jobs: JobTable) -> BlockActivations:
    """An equal part, for each block, of what a custom module's trace has shown: activations, logits and the worst moment of the backward."""
    part = np.where(jobs.recompute == RECOMPUTE.index("full"), recomputed_fraction(jobs), 0.0)
    token = part * jobs.traced_recomputed + (1 - part) * jobs.traced_activations
    kept = token * jobs.tokens / jobs.layers
    return BlockActivations(kept, kept, 0.0, 0.0, kept)


class _BlockBytes(NamedTuple):
    """Bytes of one micro-batch in a block that is not recomputed, or in a part of it."""

    kept: Column
    stored: Column
    """What selective recomputation keeps of it, besides the block's input."""
    products: Column
    """Results of matrix products and attention."""


def recomputed_fraction(jobs: JobTable) -> Column:
    """Fraction of the blocks that are recomputed, on the rank that has the fewest: every N-th block of the whole model, of
    which short stages have more or fewer."""
    pipelined = jobs.pipeline > 1
    most = np.where(pipelined, np.ceil(jobs.layers / (jobs.pipeline * jobs.stages)), jobs.layers)
    count = np.where(pipelined, np.floor(most / jobs.recompute_every), np.ceil(most / jobs.recompute_every))
    return np.where(jobs.recompute > 0, count / most, 0.0)


def residual_tokens(jobs: JobTable) -> Column:
    """Tokens of the residual stream on one rank."""
    return jobs.tokens / np.where(jobs.sequence_parallel > 0, jobs.tensor, 1)


def residual_stream(jobs: JobTable) -> Column:
    """Bytes of the residual stream of one micro-batch on one rank."""
    return 1.0 * jobs.residual_bytes * jobs.dim * residual_tokens(jobs)


def kv_division(jobs: JobTable) -> Column:
    """By how much keys and values are divided: heads that cannot be divided evenly are whole on every rank."""
    each = jobs.kv_heads / jobs.tensor
    return np.where(each == np.floor(each), jobs.tensor, 1)


def _read(jobs: JobTable, projections: Column) -> Column:
    """Bytes of the input of this many projections: autocast makes a copy for each, tensor parallelism one for all."""
    casts = np.where(jobs.tensor > 1, 1, projections)
    return np.where(jobs.compute_bytes < 4, 2 * casts, 4) * jobs.dim * jobs.tokens


def _block_bytes(jobs: JobTable) -> tuple[_BlockBytes, _BlockBytes]:
    """Of a dense block and of one with experts."""
    tokens, tensor, size, matrices = jobs.tokens, jobs.tensor, jobs.compute_bytes, 1 + jobs.gated
    # CPUs compute a root mean square in several steps, and keep the normalized input too.
    norm = 4.0 * jobs.dim * (1 + jobs.on_cpu * (1 - jobs.layer_norm)) + (4 + 4 * jobs.layer_norm)
    attention = _attention(jobs)
    before = jobs.norms * norm * residual_tokens(jobs) + attention.kept
    inner = size * jobs.ffn / tensor * tokens
    ffn = _read(jobs, matrices) + (2 + 2 * jobs.gated) * inner
    # The last product of a block is only added to the residual stream: selective recomputation does not store it.
    stored = attention.stored + matrices * inner
    dense = _BlockBytes(before + ffn, stored, attention.products + matrices * inner + size * jobs.dim * tokens)
    if np.any(jobs.compiled > 0):
        dense = _compiled(jobs, dense, attention, inner)
    if not np.any(jobs.sparse_layers > 0):
        return dense, dense
    experts = _experts(jobs)
    # A GPU normalizes the bf16 input of experts in one pass, and keeps it as it is.
    fused = (jobs.on_cpu == 0) & (jobs.layer_norm == 0) & (size == 2) & (jobs.residual_bytes == 2)
    second = np.where(fused, 2.0 * jobs.dim + 4, norm) * residual_tokens(jobs)
    before = before - norm * residual_tokens(jobs) + second
    if np.any(jobs.compiled > 0):  # of a block with experts, the half with attention is compiled
        half = residual_stream(jobs) + attention.stored - _total(jobs) + second
        before = np.where(jobs.compiled > 0, half, before)
    copies = jobs.expert_copies * 3.0 * size * jobs.dim * jobs.expert_ffn * jobs.experts / (jobs.expert * jobs.expert_tensor)
    sparse = (before + experts.kept + copies, attention.stored + experts.stored, attention.products + experts.products)
    return dense, _BlockBytes(*sparse)


def _compiled(jobs: JobTable, eager: _BlockBytes, attention: _BlockBytes, inner: Column) -> _BlockBytes:
    """A dense block as torch.compile compiles it: it stores what selective recomputation stores, and gathered inputs."""
    inputs = np.where(jobs.tensor > 1, 2.0 * jobs.compute_bytes * jobs.dim * jobs.tokens, 0.0)
    stored = attention.stored + (1 + jobs.gated) * inner + inputs
    kept, compiled = residual_stream(jobs) + stored, jobs.compiled > 0
    return _BlockBytes(np.where(compiled, kept, eager.kept), np.where(compiled, stored, eager.stored), eager.products)


def _total(jobs: JobTable) -> Column:
    """Bytes of what a block adds to the residual stream: a sum over tensor ranks, or one product."""
    return 1.0 * jobs.compute_bytes * jobs.dim * residual_tokens(jobs)


def _attention(jobs: JobTable) -> _BlockBytes:
    """Of attention, without its norm."""
    tokens, tensor, size, low, latent = jobs.tokens, jobs.tensor, jobs.compute_bytes, jobs.compute_bytes < 4, jobs.latent
    score, value = jobs.score_width / tensor, jobs.value_width / tensor
    out = value * np.where(jobs.context > 1, 2, 1)  # parts that are put together lie in another order
    heads, table = 4 * jobs.heads / tensor, _table(jobs)
    scores = np.where(jobs.scores > 1, table, 0.0)  # products too, where no kernel is fused
    if np.any(latent > 0):
        expanded = (jobs.kv_width - jobs.heads * jobs.rotated) / tensor
        inner = size * (2 * score + expanded + out) + heads + table
        kept = _read(jobs, 2) + tokens * (inner + latent * np.where(low, 6, 8))
        products = tokens * (size * (score + expanded + value + latent + jobs.rotated) + heads + scores)
        # Keys and values are expanded again, if they are far wider than what they are expanded from (`transforms/recompute`).
        again = (jobs.compiled > 0) | (expanded >= _EXPANSION * jobs.kv_rank)
        stored = products - np.where(again, size * tokens * expanded, 0.0)
    else:
        given = jobs.kv_width / kv_division(jobs)
        turned = np.where(low, 4, 0) * jobs.rotated * (1 - jobs.qk_norm)
        normed = 4.0 * jobs.qk_norm * (score + given / 2) * (1 + jobs.on_cpu)
        kept = _read(jobs, 3) + tokens * (size * (score + given + out) + heads + table + turned + normed)
        stored = products = tokens * (size * (score + given + value) + heads + scores)
    return _BlockBytes(kept, stored + _total(jobs), products + size * tokens * jobs.dim)


def _table(jobs: JobTable) -> Column:
    """What attention keeps per token besides inputs and result. Context parallelism makes its masks when it needs them."""
    if not np.any(jobs.scores):
        return 0.0
    size = jobs.compute_bytes
    whole = size * (jobs.heads / jobs.tensor * jobs.sequence + 2 * jobs.score_width / jobs.tensor)
    kept = np.where(jobs.scores == 2, whole, np.where(jobs.scores == 1, size * jobs.sequence, 0.0))
    # In 16 bits: the capped scores, their softmax in fp32 and its copy. In fp32: the first two.
    kept = np.where(jobs.scores == 3, 8.0 * jobs.heads / jobs.tensor * jobs.sequence, kept)
    return np.where(jobs.context > 1, 0.0, kept)


def _experts(jobs: JobTable) -> _BlockBytes:
    """Of router, shared and routed experts. Each tensor rank routes a slice of the sequence."""
    tokens, tensor, size, shared_ffn = jobs.tokens, jobs.tensor, jobs.compute_bytes, jobs.shared_ffn
    mine = tokens / tensor
    rows = mine * jobs.active
    # The input in the compute dtype, for router and shared experts; a CPU's router computes with an fp32 copy of it.
    copied = (size < 4) & (jobs.on_cpu > 0)
    entering = mine * jobs.dim * np.where(copied, 4 + size * (shared_ffn > 0), 1.0 * size)
    router = entering + mine * (4 * jobs.experts + 20 * jobs.active)
    indices = rows * np.where(jobs.expert * jobs.expert_tensor > 1, 32, 16)
    inner = rows * size * 3 * jobs.expert_ffn  # both products and what the last one reads
    there = rows * size * jobs.dim * jobs.expert_tensor
    gathered = np.where((shared_ffn > 0) & (tensor > 1), size * jobs.dim * tokens, 0.0)
    shared = gathered + size * 4 * shared_ffn / tensor * tokens
    # The last products of shared and routed experts are only added.
    stored = rows * size * 2 * jobs.expert_ffn + mine * 4 * jobs.experts + size * tokens * 2 * shared_ffn / tensor
    products = stored + rows * size * jobs.dim * jobs.expert_tensor + np.where(shared_ffn > 0, size * tokens * jobs.dim, 0)
    return _BlockBytes(router + indices + inner + there + shared, stored, products)


def _backward_bytes(jobs: JobTable) -> Column:
    """Gradients inside a block's backward: of the residual stream, of a region's input and of its inner tensors."""
    tokens, tensor, size = jobs.tokens, jobs.tensor, jobs.compute_bytes
    inner = tokens * (size * jobs.dim + 2 * size * jobs.ffn / tensor)
    if np.any(jobs.sparse_layers > 0):
        sparse = tokens / tensor * jobs.active * ((4 + 2 * size) * jobs.dim)
        inner = np.where(jobs.sparse_layers > 0, np.maximum(inner, sparse), inner)
    # Keys and values of other ranks: of the whole sequence where they are gathered, of two ranks in a ring.
    ranks = np.where(jobs.method == METHODS.index("gather"), jobs.context, 2)
    others = jobs.tokens * ranks * jobs.kv_width / kv_division(jobs) * (2 * size + 4)
    return 8.0 * jobs.dim * residual_tokens(jobs) + np.maximum(inner, np.where(jobs.context > 1, others, 0.0))


class HeadActivations(NamedTuple):
    """Bytes of one micro-batch at the end of the last stage."""

    states: Column
    """Inputs of the last norm and of the output matrix, kept for the backward."""
    kept: Column
    """What the loss keeps for the backward."""
    most: Column
    """Logits and loss at the worst moment."""


def head_activations(jobs: JobTable) -> HeadActivations:
    """The head and the loss, once more for each MTP depth. A trace of a custom module counts them with its blocks."""
    if np.any(jobs.traced_activations):
        return HeadActivations(0.0, 0.0, 0.0)
    tokens, size, low, divided = jobs.tokens, jobs.compute_bytes, jobs.compute_bytes < 4, jobs.tensor > 1
    chunk, depths, columns = jobs.loss_chunk, 1 + jobs.mtp_depth, jobs.vocab / jobs.tensor
    states = 4.0 * jobs.dim * residual_tokens(jobs) + np.where(low, 2, 4) * jobs.dim * tokens
    on_cpu = jobs.on_cpu > 0
    each = np.where(divided, np.where(on_cpu, np.where(low, 10, 8), 2 * size), 12) * columns
    in_chunk = np.where(on_cpu, each, size * columns)  # a GPU's kernel writes the gradient in place of the logits
    logits = np.where(divided, size, 4) * columns
    if np.any(jobs.capped_logits):  # the hyperbolic tangents, which the backward reads
        capped = jobs.capped_logits * size * columns
        each, in_chunk, logits = each + capped, in_chunk + capped, logits + capped
    trained = np.where(jobs.adapters > 0, 0.0, jobs.dim * columns)  # the head's weight, unless it is frozen below LoRA adapters
    gradients = size * jobs.dim * tokens + size * trained  # both gradients, next to the loss
    chunked = np.minimum(chunk, tokens) * in_chunk + gradients + size * jobs.dim * tokens + 4 * trained
    return HeadActivations(
        states=states * depths,
        kept=np.where(chunk > 0, gradients, tokens * logits * depths),
        most=np.where(chunk > 0, chunked * depths, tokens * (each + (depths - 1) * logits)),
    )
