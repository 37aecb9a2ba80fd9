"""What one block and the head take on one device: matrix products, attention, and what memory bounds. `planning/cost/step_time` calls it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import METHODS, JobTable
from phalanx.planning.machines.rates import Column, Rates


class Part(NamedTuple):
    """Seconds of one micro-batch in a block, averaged over dense ones and those with experts, or in the head."""

    matrices: Column
    """Of the products going forward; each of the two halves of the backward pass takes the same."""
    attention: Column
    """Going forward …"""
    attention_backward: Column
    """… and back."""
    moved: Column
    """Memory-bound work going forward; backward twice that."""

    @property
    def forward(self) -> Column:
        return self.matrices + self.attention + self.moved

    @property
    def input(self) -> Column:
        return self.matrices + self.attention_backward + 2 * self.moved

    @property
    def whole(self) -> Column:
        """Forward and both halves of the backward pass."""
        return 3 * self.matrices + self.attention + self.attention_backward + 3 * self.moved


def sparse_part(work: JobTable) -> Column:
    """Of the blocks, those with experts."""
    return work.sparse_layers / work.layers


def expert_tokens(work: JobTable) -> Column:
    """Tokens of a micro-batch that a rank routes: tensor ranks share them."""
    return work.tokens / work.tensor


def block(work: JobTable, rates: Rates) -> Part:
    """One block, on one rank of the tensor and expert groups."""
    tokens, tensor, sparse = work.tokens, work.tensor, sparse_part(work)
    mean_ffn = (1 - sparse) * work.ffn + sparse * work.shared_ffn
    matrices_of_ffn = 2 + np.asarray(work.gated)
    rate = work.peak * rates.gemm
    # A product's inner and outer sizes are the model's, cut by the tensor group; its rows are the tokens.
    attention = work.attention_weights * (1 + rates.knee / work.dim)
    dense = matrices_of_ffn * work.dim * mean_ffn * (1 + rates.knee / work.dim)
    cut = rates.knee * tensor
    narrow = attention / work.score_width + dense / np.maximum(mean_ffn, 1)
    rows = 1 + rates.knee / tokens
    products = ((attention + dense) * rows + cut * narrow) / tensor
    matrices = 2 * tokens * products / rate * _aligned(work.dim, 1) * _aligned(work.ffn, tensor)
    moved = _moved(work, rates, mean_ffn)
    if np.any(np.asarray(work.sparse_layers) > 0):
        more, traffic = _experts(work, rates, sparse)
        matrices = matrices + more
        moved = moved + traffic
    reached = rates.attention * np.minimum(work.score_width / work.heads / 128, 1.0) ** rates.narrow
    forward = tokens / tensor * (work.sequence * (work.score_width + work.value_width) / (work.peak16 * reached))
    unfused = rates.scores * (np.asarray(work.scores) > 1) * work.heads * work.sequence / (work.bandwidth * rates.memory)
    # Round a ring, each further part of a shared sequence adds its values to what was attended so far, in 32 bits.
    ring = np.asarray(work.method) == METHODS.index("ring")
    merged = 12.0 * work.value_width * ring * (np.asarray(work.context) - 1) / (work.bandwidth * rates.memory)
    drained = rates.kernels * rates.drain * np.where(np.asarray(work.compiled) > 0, rates.fused, 1.0)
    moved = moved + tokens / tensor * (unfused + merged) + drained
    return Part(matrices, forward, forward * (2.5 / rates.attention_backward), moved)


def _aligned(size: Column, parts: Column) -> Column:
    """How much longer products take whose inner size, cut in parts, tensor cores cannot cut evenly: as measured on an H200."""
    if np.all(np.asarray(size) % (64 * np.max(parts, initial=1)) == 0):
        return 1.0
    inner = size / parts
    return np.where(inner % 8 > 0, 6.5, np.where(inner % 64 > 0, 1.15, 1.0))


def _moved(work: JobTable, rates: Rates, mean_ffn: Column) -> Column:
    """Norms and residuals (ten widths a token), rotary positions and the activation: bytes over bandwidth."""
    fused = np.where(np.asarray(work.compiled) > 0, rates.fused, 1.0)
    scale = fused * (rates.traffic * work.compute_bytes / (work.bandwidth * rates.memory))
    whole = 10 * work.dim
    inside = 2 * work.score_width + work.kv_width + (2 + np.asarray(work.gated)) * mean_ffn
    fp8 = np.asarray(work.fp8)
    casts = (fp8 > 0) * 2 * (2 * work.dim + work.score_width + mean_ffn)  # read in 16 bits, written twice in 8
    apart = np.where(np.asarray(work.sequence_parallel) > 0, work.tensor, 1)
    moved = work.tokens * scale * (whole / apart + (inside + casts) / work.tensor)
    return moved + _rounded(work, rates, mean_ffn) if np.any(fp8 > 1) else moved


def _rounded(work: JobTable, rates: Rates, mean_ffn: Column) -> Column:
    """Passes over all that goes into the linear layers and, as gradients, comes out of them, and over their weights."""
    gated = 1 + np.asarray(work.gated)
    each = (5 + gated) * work.dim + 2 * work.score_width + work.kv_width + (1 + gated) * mean_ffn
    weights = work.attention_weights + (1 + gated) * work.dim * mean_ffn
    left = np.where(np.asarray(work.fp8) > 2, rates.fused_rounding, 1.0) * (np.asarray(work.fp8) > 1)
    return left * (work.tokens * each + weights) / work.tensor * (rates.rounding / (work.bandwidth * rates.memory))


def _experts(work: JobTable, rates: Rates, sparse: Column) -> tuple[Column, Column]:
    """Routed experts' products and the copies around them, in an average block."""
    tokens = expert_tokens(work)
    routed = tokens * work.active
    experts = np.maximum(work.experts, 1)
    width = np.maximum(work.expert_ffn, 1)
    rows = routed * work.expert * work.expert_tensor / experts
    # Two of an expert's three matrices are one product, twice as wide.
    slow = 1 + rates.knee * (1 / work.dim + 1 / np.maximum(rows, 1) + 2 / 3 * work.expert_tensor / width)
    flops = 6 * work.dim * width
    router = 2 * tokens * work.dim * work.experts / (work.peak16 * rates.gemm)
    peak = np.where(np.asarray(rates.eight) > 0, work.peak, work.peak16)
    products = routed * flops * slow / (peak * rates.gemm) + router
    # Sorted by expert and back (read and written each), and the activation.
    moved = (
        routed * (rates.copies * work.dim + 3 * width) * rates.traffic * work.compute_bytes / (work.bandwidth * rates.memory)
    )
    return sparse * products, sparse * moved


def head(work: JobTable, rates: Rates) -> Part:
    """The output matrix and the loss over the vocabulary, once more for each token predicted ahead."""
    tokens = work.tokens * (1 + work.ahead) / work.tensor
    rows = 1 + rates.knee * (1 / work.dim + 1 / work.tokens)
    matrices = tokens * rows * (2 * work.dim * work.vocab / (work.peak16 * rates.gemm))
    moved = tokens * (6.0 * work.vocab / (work.bandwidth * rates.memory))
    return Part(matrices, 0.0, 0.0, moved)
