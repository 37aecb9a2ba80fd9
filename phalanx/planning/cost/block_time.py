"""Time of one block and of the head on one device: matrix products, attention, and memory-bound work. `cost/step_time`
calls it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import METHODS, JobTable
from phalanx.planning.machines.rates import Column, Rates


class BlockTime(NamedTuple):
    """Seconds of one micro-batch in a block (averaged over dense and expert blocks) or in the head."""

    matrices: Column
    """Matrix products of the forward; the input and the weight backward take as long each."""
    attention: Column
    """Attention in the forward."""
    attention_backward: Column
    """Attention in the backward."""
    moved: Column
    """Memory-bound work of the forward; the backward takes twice as long."""

    @property
    def forward(self) -> Column:
        return self.matrices + self.attention + self.moved

    @property
    def input(self) -> Column:
        return self.matrices + self.attention_backward + 2 * self.moved

    @property
    def whole(self) -> Column:
        """Forward and both halves of the backward."""
        return 3 * self.matrices + self.attention + self.attention_backward + 3 * self.moved


def sparse_fraction(jobs: JobTable) -> Column:
    """Fraction of the blocks that have experts."""
    return jobs.sparse_layers / jobs.layers


def expert_tokens(jobs: JobTable) -> Column:
    """Tokens of a micro-batch that a rank routes: tensor ranks share them."""
    return jobs.tokens / jobs.tensor


def block_time(jobs: JobTable, rates: Rates) -> BlockTime:
    """One block, on one rank of the tensor and expert groups."""
    tokens, tensor, sparse = jobs.tokens, jobs.tensor, sparse_fraction(jobs)
    mean_ffn = (1 - sparse) * jobs.ffn + sparse * jobs.shared_ffn
    matrices_of_ffn = 2 + jobs.gated
    rate = jobs.peak * rates.gemm
    # The inner and outer sizes of a product are the model's, divided by the tensor group; its rows are the tokens.
    attention = jobs.attention_weights * (1 + rates.knee / jobs.dim)
    dense = matrices_of_ffn * jobs.dim * mean_ffn * (1 + rates.knee / jobs.dim)
    cut = rates.knee * tensor
    narrow = attention / jobs.score_width + dense / np.maximum(mean_ffn, 1)
    rows = 1 + rates.knee / tokens
    products = ((attention + dense) * rows + cut * narrow) / tensor
    matrices = 2 * tokens * products / rate * _aligned(jobs.dim, 1) * _aligned(jobs.ffn, tensor)
    moved = _moved(jobs, rates, mean_ffn)
    if np.any(jobs.sparse_layers > 0):
        more, traffic = _experts(jobs, rates, sparse)
        matrices = matrices + more
        moved = moved + traffic
    reached = rates.attention * np.minimum(jobs.score_width / jobs.heads / 128, 1.0) ** rates.narrow
    forward = tokens / tensor * (jobs.sequence * (jobs.score_width + jobs.value_width) / (jobs.peak16 * reached))
    unfused = rates.scores * (jobs.scores > 1) * jobs.heads * jobs.sequence / (jobs.bandwidth * rates.memory)
    # In ring attention each further part of the sequence adds its values to the running result, in fp32.
    ring = jobs.method == METHODS.index("ring")
    merged = 12.0 * jobs.value_width * ring * (jobs.context - 1) / (jobs.bandwidth * rates.memory)
    drained = rates.kernels * rates.drain * np.where(jobs.compiled > 0, rates.fused, 1.0)
    moved = moved + tokens / tensor * (unfused + merged) + drained
    return BlockTime(matrices, forward, forward * (2.5 / rates.attention_backward), moved)


def _aligned(size: Column, parts: Column) -> Column:
    """Slowdown of products whose inner size, divided among ranks, does not fill tensor cores evenly, as measured on an
    H200."""
    if np.all(size % (64 * np.max(parts, initial=1)) == 0):
        return 1.0
    inner = size / parts
    return np.where(inner % 8 > 0, 6.5, np.where(inner % 64 > 0, 1.15, 1.0))


def _moved(jobs: JobTable, rates: Rates, mean_ffn: Column) -> Column:
    """Norms and residuals (ten widths per token), rotary positions and the activation: bytes over bandwidth."""
    fused = np.where(jobs.compiled > 0, rates.fused, 1.0)
    scale = fused * (rates.traffic * jobs.compute_bytes / (jobs.bandwidth * rates.memory))
    whole = 10 * jobs.dim
    inside = 2 * jobs.score_width + jobs.kv_width + (2 + jobs.gated) * mean_ffn
    fp8 = jobs.fp8
    casts = (fp8 > 0) * 2 * (2 * jobs.dim + jobs.score_width + mean_ffn)  # read in 16 bits, written twice in 8
    apart = np.where(jobs.sequence_parallel > 0, jobs.tensor, 1)
    moved = jobs.tokens * scale * (whole / apart + (inside + casts) / jobs.tensor)
    return moved + _rounded(jobs, rates, mean_ffn) if np.any(fp8 > 1) else moved


def _rounded(jobs: JobTable, rates: Rates, mean_ffn: Column) -> Column:
    """Rounding to fp8 in separate passes: over the inputs of the linear layers, the gradients of their outputs, and their
    weights."""
    gated = 1 + jobs.gated
    each = (5 + gated) * jobs.dim + 2 * jobs.score_width + jobs.kv_width + (1 + gated) * mean_ffn
    weights = jobs.attention_weights + (1 + gated) * jobs.dim * mean_ffn
    left = np.where(jobs.fp8 > 2, rates.fused_rounding, 1.0) * (jobs.fp8 > 1)
    return left * (jobs.tokens * each + weights) / jobs.tensor * (rates.rounding / (jobs.bandwidth * rates.memory))


def _experts(jobs: JobTable, rates: Rates, sparse: Column) -> tuple[Column, Column]:
    """Products of the routed experts and the copies around them, in an average block."""
    tokens = expert_tokens(jobs)
    routed = tokens * jobs.active
    experts = np.maximum(jobs.experts, 1)
    width = np.maximum(jobs.expert_ffn, 1)
    rows = routed * jobs.expert * jobs.expert_tensor / experts
    # Two of an expert's three matrices are one product of twice the width.
    slow = 1 + rates.knee * (1 / jobs.dim + 1 / np.maximum(rows, 1) + 2 / 3 * jobs.expert_tensor / width)
    flops = 6 * jobs.dim * width
    router = 2 * tokens * jobs.dim * jobs.experts / (jobs.peak16 * rates.gemm)
    peak = np.where(rates.eight > 0, jobs.peak, jobs.peak16)
    products = routed * flops * slow / (peak * rates.gemm) + router
    # Tokens are sorted by expert and back, each with a read and a write; the activation is read and written too.
    moved = (
        routed * (rates.copies * jobs.dim + 3 * width) * rates.traffic * jobs.compute_bytes / (jobs.bandwidth * rates.memory)
    )
    return sparse * products, sparse * moved


def head_time(jobs: JobTable, rates: Rates) -> BlockTime:
    """The output matrix and the loss, once more for each MTP depth."""
    tokens = jobs.tokens * (1 + jobs.mtp_depth) / jobs.tensor
    rows = 1 + rates.knee * (1 / jobs.dim + 1 / jobs.tokens)
    matrices = tokens * rows * (2 * jobs.dim * jobs.vocab / (jobs.peak16 * rates.gemm))
    moved = tokens * (6.0 * jobs.vocab / (jobs.bandwidth * rates.memory))
    return BlockTime(matrices, 0.0, 0.0, moved)
