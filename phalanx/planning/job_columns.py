"""A model and a machine as columns of `planning/job_table`: what `planning/candidates` starts from."""

from __future__ import annotations

from phalanx.planning.hardware import Hardware
from phalanx.spec.model import ModelSpec


def model_columns(model: ModelSpec) -> dict[str, float]:
    """The fields of Work that say what the model is."""
    mla, moe = model.mla, model.moe
    if mla is None:
        score = value = model.heads * model.head
        kv_width = 2 * model.kv * model.head
    else:
        score, value = model.heads * (mla.nope_dim + mla.rope_dim), model.heads * mla.value_dim
        kv_width = model.heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    plain: dict[str, float] = {
        "layers": model.layers,
        "dim": model.dim,
        "attention_weights": model._attention_matrices(),
        "score_width": score,
        "value_width": value,
        "kv_width": kv_width,
        "heads": model.heads,
        "kv_heads": model.heads if mla else model.kv,
        "ffn": model.hidden,
        "gated": int(model.activation == "swiglu"),
        "vocab": model.rows,
        "tied": int(model.tied),
        "learned_positions": model.context if model.positions == "learned" else 0,
        "layer_norm": int(model.norm == "layer"),
        "ahead": model.mtp_depth,
    }
    if moe is None or model.layers == model.dense_layers:
        return plain
    return plain | {
        "sparse_layers": model.layers - model.dense_layers,
        "experts": moe.experts,
        "active": moe.active,
        "expert_ffn": moe.ffn,
        "shared_ffn": moe.shared * moe.ffn,
        "active_groups": moe.active_groups if moe.groups > 1 else 0,
    }


def machine_columns(hardware: Hardware, compute: str) -> dict[str, float]:
    """The fields of Work that say what the machine is; a format that the device lacks runs as the best it has."""
    gpu = hardware.gpu
    half = gpu.peak("bf16") or gpu.peak("fp16") or gpu.peak("fp32") or 0.0
    peaks = {"fp32": gpu.peak("fp32"), "bf16": half, "fp16": gpu.peak("fp16"), "fp8": gpu.peak("fp8")}
    peak = peaks.get(compute) or half
    return {
        "peak": peak,
        "peak16": half if compute == "fp8" else peak,
        "bandwidth": gpu.bandwidth,
        "memory": gpu.memory,
        "island": hardware.island,
        "node": hardware.node,
        "island_bandwidth": hardware.island_bandwidth,
        "network": hardware.network,
        "host_bandwidth": hardware.host_bandwidth,
    }
