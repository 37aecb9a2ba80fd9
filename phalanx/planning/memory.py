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

    Per token, in bf16 under autocast: a block keeps its two norms' inputs in fp32, casts of them, queries, keys, values and what
    attention gives, about 24·dim bytes; and the feed-forward's inner tensors, four for SwiGLU and three for GELU. The logits stand
    in bf16 and fp32, with their softmax and both gradients: 16 bytes each. In fp32 everything is twice as large and the
    logits are not copied. Fragmentation is ignored, which is why the search leaves a margin.
    """
    inner = 4 if model.activation == "swiglu" else 3
    block = 24 * model.dim + 2 * inner * model.hidden
    if compute == "bf16":
        return sequence * (model.layers * block + 16 * model.rows)
    return sequence * (model.layers * 2 * block + 12 * model.rows)
