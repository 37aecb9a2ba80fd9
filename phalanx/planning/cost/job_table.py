"""A step's work in columns: every field is a number or an array, and all of them broadcast. One set of equations so judges one
layout, hundreds of thousands of them, or a table of measured runs of different models on different machines.

`planning/search/space` makes one of a run and its legal layouts, `benchmarks/planner/steps` one of measured rows; `planning/cost/step_time` and
`planning/cost/footprint` read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Column
from phalanx.schedules.makers import NAMES
from phalanx.spec.model import ModelSpec

SCHEDULES = NAMES
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "cpu", "nvme")
METHODS = ("ring", "gather", "ulysses")
"""Codes are places in these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTable:
    """Who computes what on which machine. Widths are of the whole model, before anything is divided."""

    # The model
    layers: Column
    """All blocks, those with experts too; predicting ahead adds blocks like the last."""
    dim: Column
    attention_weights: Column
    """Values of a block's attention matrices."""
    score_width: Column
    """Query heads times the width of a query-key product: 2 * score_width * sequence FLOPs a token for the scores, uncut by causality."""
    value_width: Column
    """Query heads times the width of a value."""
    kv_width: Column
    """Keys and values of a token, together, as attention reads them."""
    heads: Column
    kv_heads: Column
    ffn: Column
    """Width of a dense block's feed-forward layer."""
    gated: Column
    """1: three matrices (SwiGLU), 0: two."""
    vocab: Column
    tied: Column
    learned_positions: Column = 0
    """Rows of the table of positions; 0: rotary."""
    layer_norm: Column = 0
    """1: norms have a bias."""
    sparse_layers: Column = 0
    """Blocks with experts, the last ones."""
    experts: Column = 0
    active: Column = 0
    """Routed experts that a token goes through."""
    expert_ffn: Column = 0
    shared_ffn: Column = 0
    """Width of all shared experts together."""
    active_groups: Column = 0
    """Most groups of experts (nodes, where they are dealt so) that a token is sent to; 0: any."""
    ahead: Column = 0
    latent: Column = 0
    """Width of the narrow vectors that latent attention expands queries, keys and values from, together; 0: it has none."""
    rotated: Column = 0
    """Width of a head's part that rotary positions turn."""
    qk_norm: Column = 0
    """1: queries and keys are normalised."""

    # The batch
    sequence: Column
    batch: Column
    """Sequences of a step, all ranks together."""
    micro_batch: Column

    # The machine
    peak: Column
    """Dense FLOP/s of a device in the format of the blocks' matrices."""
    peak16: Column
    """The same in bf16 or fp16, for what is not in fp8: attention, the head. On devices without, as `peak`."""
    bandwidth: Column
    """Bytes/s of device memory."""
    memory: Column
    """Bytes of it."""
    island: Column
    """Devices that share the fast links: of a node, or of a rack."""
    node: Column
    """Devices of one host."""
    island_bandwidth: Column
    """Bytes/s of a device in one direction inside the island."""
    network: Column
    """Bytes/s of a device in one direction out of it."""
    host_bandwidth: Column = 25e9
    """Bytes/s between a device and its host's memory."""

    # The layout
    ranks: Column
    pipeline: Column = 1
    data: Column = 1
    shard: Column = 1
    context: Column = 1
    tensor: Column = 1
    zero: Column = 3
    """What `shard` spreads: 1, 2 or 3."""
    sequence_parallel: Column = 0
    method: Column = 0
    schedule: Column = 1
    stages: Column = 1
    """Of each pipeline rank."""
    expert: Column = 1
    expert_tensor: Column = 1
    recompute: Column = 0
    offload: Column = 0
    activations_on_host: Column = 0
    loss_chunk: Column = 0
    """Tokens whose logits exist at the same time; 0: all of a micro-batch."""
    compute_bytes: Column = 2
    """Bytes of an activation: 2, or 4 in fp32."""
    fp8: Column = 0
    """1: what is multiplied is rounded by kernels that do something else too; 2: in passes of their own; 3: in passes that are compiled."""
    compiled: Column = 0
    recompute_every: Column = 1
    """Every so manieth block is recomputed."""
    moments: Column = 8
    """Bytes of the optimizer's states of a value."""
    wire: Column = 4
    """Bytes of a gradient's value between ranks."""
    gathered: Column = 0
    """Bytes of a sharded parameter's value between ranks; 0: as many as of an activation."""
    scores: Column = 0
    """What attention keeps of its table of scores: 0 nothing, 1 a mask between documents, 2 the table itself, without a fused kernel."""
    on_cpu: Column = 0
    """1: devices are cores, whose kernels keep more."""

    # What follows, computed once: all equations ask for it
    accumulation: Column = field(init=False)
    """Micro-batches of a replica in a step."""
    tokens: Column = field(init=False)
    """Of a micro-batch, on one rank: its part of each sequence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulation", self.batch / (self.data * self.shard * self.micro_batch))
        object.__setattr__(self, "tokens", self.micro_batch * self.sequence / self.context)

    def size(self) -> int:
        """How many jobs it holds."""
        return int(np.broadcast(*(getattr(self, one.name) for one in fields(self))).size)

    def take(self, index: Any) -> JobTable:
        """Some of the jobs: what is an array is indexed, what all have in common stays."""
        picked = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return JobTable(**{name: value[index] if np.ndim(value) else value for name, value in picked.items()})


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
