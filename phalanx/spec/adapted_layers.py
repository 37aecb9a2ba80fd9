"""Which layers of a model get LoRA adapters, and their size, without torch: for checks and plans. `transforms/lora` adds the adapters to a
model by the same names."""

from __future__ import annotations

from fnmatch import fnmatchcase

from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Lora

Shapes = dict[str, tuple[int, ...]]

A, B = "lora_a", "lora_b"
"""Names of an adapter's two matrices: attributes of their linear layer."""


STORED_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes of an element of a quantized matrix, with its part of the scales; those of int8 are negligible."""


def is_target(layer: str, targets: tuple[str, ...], *, stacked: bool = False) -> bool:
    """Whether a layer gets an adapter. `stacked`: it is a parameter of stacked experts, which only a target's name includes."""
    if not targets:
        return not stacked and layer.startswith("blocks.")
    return any(fnmatchcase(layer, target) or fnmatchcase(layer, f"*.{target}") for target in targets)


def linear_layers(spec: ModelSpec) -> Shapes:
    """Shapes of the matrices of the built-in decoder's blocks: [out, in], or [experts, out, in] of stacked experts."""
    blocks = {f"blocks.{index}": index for index in range(spec.layers)}
    blocks |= {f"mtp.{depth}.block": spec.layers - 1 for depth in range(spec.mtp_depth)}
    layers: Shapes = {}
    for block, index in blocks.items():
        layers |= {f"{block}.attention.{name}": shape for name, shape in _attention(spec).items()}
        layers |= {f"{block}.mlp.{name}": shape for name, shape in _feed_forward(spec, index).items()}
    return layers | {f"mtp.{depth}.join": (spec.dim, 2 * spec.dim) for depth in range(spec.mtp_depth)}


def _attention(spec: ModelSpec) -> Shapes:
    dim, heads, mla = spec.dim, spec.heads, spec.mla
    if mla is None:
        queries, keys = heads * spec.head, spec.kv * spec.head
        shapes: Shapes = {"query": (queries, dim), "key": (keys, dim), "value": (keys, dim), "output": (dim, queries)}
        return shapes
    width = heads * (mla.nope_dim + mla.rope_dim)
    queries_of: Shapes = {"query": (width, dim)}
    if mla.q_rank is not None:
        queries_of = {"query_down": (mla.q_rank, dim), "query_up": (width, mla.q_rank)}
    return queries_of | {
        "kv_down": (mla.kv_rank + mla.rope_dim, dim),
        "kv_up": (heads * (mla.nope_dim + mla.value_dim), mla.kv_rank),
        "output": (dim, heads * mla.value_dim),
    }


def _feed_forward(spec: ModelSpec, index: int) -> Shapes:
    dim, moe = spec.dim, spec.moe
    if moe is None or index < moe.dense_layers:
        gate: Shapes = {"gate": (spec.hidden, dim)} if spec.gated else {}
        return gate | {"up": (spec.hidden, dim), "down": (dim, spec.hidden)}
    shapes: Shapes = {"gate": (moe.ffn, dim), "up": (moe.ffn, dim), "down": (dim, moe.ffn)}
    layers = {f"experts.{name}": (moe.experts, *shape) for name, shape in shapes.items()}
    if moe.shared:
        width = moe.shared * moe.ffn
        layers |= {"shared.gate": (width, dim), "shared.up": (width, dim), "shared.down": (dim, width)}
    return layers


def adapted_layers(spec: ModelSpec, lora: Lora) -> Shapes:
    """The matrices that get an adapter, with their shapes."""
    if lora.rank is None:
        return {}
    layers = linear_layers(spec)
    return {name: shape for name, shape in layers.items() if is_target(name, lora.targets, stacked=len(shape) == 3)}


def copies_experts(spec: ModelSpec, lora: Lora) -> bool:
    """Whether each forward computes the matrices of routed experts: they are quantized, or adapters are added to them."""
    return spec.moe is not None and (
        lora.base is not None or any(len(shape) == 3 for shape in adapted_layers(spec, lora).values())
    )


def adapter_parameters(spec: ModelSpec, lora: Lora) -> int:
    """Parameters of all adapters of the built-in decoder: what a step updates."""
    adapted = adapted_layers(spec, lora).values()
    return sum((shape[0] if len(shape) == 3 else 1) * (lora.rank or 0) * (shape[-1] + shape[-2]) for shape in adapted)


def trained_parameters(spec: ModelSpec, lora: Lora) -> int:
    """Parameters that a step updates: all, or those of the adapters."""
    return spec.parameters() if lora.rank is None else adapter_parameters(spec, lora)


def flops_per_token(spec: ModelSpec, lora: Lora, sequence: int) -> float:
    """FLOPs of the forward and backward of one token. Frozen matrices have no gradients, which are a third of them."""
    flops = spec.flops_per_token(sequence)
    if lora.rank is None:
        return flops
    return flops - spec.flops_per_token(0) / 3 + 6.0 * _active_adapters(spec, lora)


def _active_adapters(spec: ModelSpec, lora: Lora) -> int:
    """Parameters of the adapters that one token uses."""
    moe = spec.moe
    active = 1 if moe is None else moe.active
    sizes = [(active if len(shape) == 3 else 1) * sum(shape[-2:]) for shape in adapted_layers(spec, lora).values()]
    return (lora.rank or 0) * sum(sizes)
