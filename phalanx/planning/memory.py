"""How much memory a run would take, as a coarse estimate from the shape of the model.

The search calls it to pick a micro-batch, and to refuse what cannot fit before any process starts.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

STATE_BYTES = 16
"""Per parameter: fp32 weight, gradient and the two moments of Adam."""


def state_bytes(model: ModelSpec) -> int:
    """Weights, gradients and optimizer states of one replica."""
    return STATE_BYTES * model.parameters()


def parameter_bytes(layout: Layout, compute: str, offload: str = "none") -> float:
    """Device bytes of each parameter of a rank's part of the model: value, gradient and Adam's states, by the formulas of ZeRO.

    In low precision ZeRO-1 and 2 keep a whole copy in two bytes, with two for the gradient, and share the fp32 master.
    """
    n, low = layout.shard, compute != "fp32"
    states = 0 if offload != "none" else 8
    if n == 1:
        return 8 + states
    if layout.zero == 3:
        return (8 + states) / n
    master = 4 if low else 0  # offloaded, it has a twin elsewhere; what ranks gather from still lies on the device
    value = gradient = 2 if low else 4
    return value + gradient / (n if layout.zero == 2 else 1) + (master + states) / n


def rank_state_bytes(model: ModelSpec, parameters: int, layout: Layout, compute: str, offload: str = "none") -> int:
    """Weights, gradients and optimizer states of one rank: tensor and pipeline ranks hold parts, experts are dealt in their own way."""
    experts = 0 if model.module is not None else expert_parameters(model)
    dense = (parameters - experts) / (layout.tensor * layout.pipeline)
    own = experts / (layout.expert * layout.expert_tensor * layout.pipeline)
    for_experts = replace(layout, shard=layout.expert_shard)
    return int(dense * parameter_bytes(layout, compute, offload) + own * parameter_bytes(for_experts, compute, offload))


def expert_parameters(model: ModelSpec) -> int:
    """Parameters of all routed experts."""
    moe = model.moe
    if moe is None:
        return 0
    sparse = model.layers - model.dense_layers
    return (sparse + (model.ahead if sparse else 0)) * moe.experts * 3 * moe.ffn * model.dim


def sequence_share(layout: Layout, recompute: str) -> float:
    """Part of a sequence's activations that a rank keeps. A pipeline's rank has fewer layers but as many more sequences under way."""
    kept = {"none": 1.0, "selective": 0.5, "full": 0.25}[recompute]
    return kept / (layout.context * layout.tensor)


def sequence_bytes(model: ModelSpec, sequence: int, compute: str) -> int:
    """What one sequence keeps from forward to backward.

    Per token, in bf16 under autocast: a block keeps its two norms' inputs in fp32, casts of them, queries, keys, values and what
    attention gives, and the feed-forward's inner tensors. The logits stand in bf16 and fp32, with their softmax and both
    gradients: 16 bytes each. In fp32 everything is twice as large and the logits are not copied. Fragmentation is ignored, which
    is why the search leaves a margin.
    """
    sparse = model.layers - model.dense_layers
    blocks = (model.layers + model.ahead) * _attention_bytes(model)
    blocks += (model.dense_layers + (0 if sparse else model.ahead)) * _dense_bytes(model)
    blocks += (sparse + (model.ahead if sparse else 0)) * _expert_bytes(model)
    rows = model.rows * (1 + model.ahead)
    return sequence * (blocks + 16 * rows) if compute == "bf16" else sequence * (2 * blocks + 12 * rows)


def _attention_bytes(model: ModelSpec) -> int:
    """Norms, their casts and attention, about 24·dim; latent attention has its own widths, and its narrow vectors besides."""
    mla = model.mla
    if mla is None:
        return 24 * model.dim
    heads = model.heads * (2 * (mla.nope_dim + mla.rope_dim) + mla.nope_dim + 3 * mla.value_dim)
    return 16 * model.dim + 2 * heads + 6 * (mla.kv_rank + (mla.q_rank or 0))


def _dense_bytes(model: ModelSpec) -> int:
    """Four inner tensors for SwiGLU, three for GELU."""
    return 2 * (4 if model.activation == "swiglu" else 3) * model.hidden


def _expert_bytes(model: ModelSpec) -> int:
    """The inner tensors of the experts a token goes through, its copy on the way there and back, and the router's scores."""
    if model.moe is None:
        return 0
    moe = model.moe
    return 8 * moe.ffn * (moe.active + moe.shared) + 4 * model.dim * moe.active + 8 * moe.experts
