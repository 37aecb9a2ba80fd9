"""How much memory a run would take, as a coarse estimate from the shape of the model.

The search calls it to pick a micro-batch, and to refuse what cannot fit before any process starts.
"""

from __future__ import annotations

from phalanx.spec.model import ModelSpec

STATE_BYTES = 16
"""Per parameter: fp32 weight, gradient and the two moments of Adam."""


def state_bytes(model: ModelSpec) -> int:
    """Weights, gradients and optimizer states of one replica."""
    return STATE_BYTES * model.parameters()


def sequence_bytes(model: ModelSpec, sequence: int, compute: str) -> int:
    """What one sequence keeps from forward to backward.

    A block keeps about 34·dim bytes per token in 16-bit numbers ("Reducing Activation Recomputation in Large
    Transformer Models", 2022, without the attention scores that fused kernels never store), twice that in fp32.
    The logits are held three times in fp32: themselves, their softmax, its gradient. Head counts, the feed-forward's
    width and fragmentation are ignored: good to a factor of about 1.5, which is why the search leaves a margin.
    """
    block = 34 * model.dim * (1 if compute == "bf16" else 2)
    return sequence * (model.layers * block + 3 * 4 * model.rows)
