"""The cost model's input: a table of jobs (a model, a batch, a machine, a layout), one column per field. Every field is a number or an array,
and all of them broadcast, so one set of equations judges one layout, hundreds of thousands of layouts (`search/space`), or measured runs of
different models (`benchmarks/planner/steps`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Column, Rates
from phalanx.schedules.makers import NAMES
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Size

Table = TypeVar("Table")
SCHEDULES = NAMES
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "cpu", "nvme")
METHODS = ("ring", "gather", "ulysses")
"""A code is an index into these."""
TOKEN_BYTES = 100.0
"""Bytes of activations of a token in 16 bits, divided by the square root of the parameters: 99 for a Llama of 8 B and 110 for one of
1 B, as width and depth grow together. For custom modules whose step was not traced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTable:
    """Jobs whose step is timed or whose memory is counted. Widths are of the whole model, before parallelism."""

    # The model
    layers: Column
    """All blocks, including those with experts. MTP adds blocks like the last."""
    dim: Column
    attention_weights: Column
    """Parameters of a block's attention matrices."""
    score_width: Column
    """Query heads times the width of a query-key product. The scores of a token take 2 * score_width * sequence FLOPs
    without causal masking."""
    value_width: Column
    """Query heads times the width of a value."""
    kv_width: Column
    """Width of the keys and values of a token together, as attention reads them."""
    heads: Column
    kv_heads: Column
    ffn: Column
    """Width of a dense block's feed-forward layer."""
    gated: Column
    """1: three matrices (SwiGLU, GeGLU), 0: two."""
    vocab: Column
    tied: Column
    learned_positions: Column = 0
    """Rows of the position embedding; 0: rotary positions."""
    layer_norm: Column = 0
    """1: norms have a bias."""
    capped_logits: Column = 0
    """1: logits have a soft cap."""
    norms: Column = 2
    """Norms of the residual stream in a block."""
    sparse_layers: Column = 0
    """Blocks with experts; they come last."""
    experts: Column = 0
    active: Column = 0
    """Routed experts per token."""
    expert_ffn: Column = 0
    shared_ffn: Column = 0
    """Width of all shared experts together."""
    active_groups: Column = 0
    """Most groups of experts (nodes, where groups are placed so) that a token is sent to; 0: no limit."""
    mtp_depth: Column = 0
    latent: Column = 0
    """Width of the latent vectors that MLA expands queries, keys and values from, together; 0: no MLA."""
    kv_rank: Column = 0
    """Of those, the width for keys and values."""
    rotated: Column = 0
    """Width of the part of a head that rotary positions rotate."""
    attended: Column = 1.0
    """Of the sequence, what attention counts for in the mean of all blocks; below 1 where blocks have a window."""
    qk_norm: Column = 0
    """1: queries and keys are normalized."""
    adapters: Column = 0
    """LoRA: parameters of the adapters, as a fraction of the model's, which are frozen. 0: no adapters, and all parameters are trained."""
    base_bytes: Column = 0
    """Bytes of an element of the blocks' frozen matrices, if they are quantized."""
    expert_copies: Column = 0
    """1: each forward makes a copy of a block's experts, which lives until the backward: dequantized, or with their adapters added."""
    reference: Column = 0
    """1: DPO, whose reference computes a forward of every micro-batch too."""

    # The batch
    sequence: Column
    batch: Column
    """Sequences of a step, on all ranks together."""
    micro_batch: Column

    # The machine
    peak: Column
    """Dense FLOP/s of a device in the number format of the blocks' matrices."""
    peak16: Column
    """The same in bf16 or fp16, for what never runs in fp8: attention and the head. Without fp8, equal to `peak`."""
    bandwidth: Column
    """Bytes/s of device memory."""
    memory: Column
    """Bytes of device memory."""
    island: Column
    """Devices that share the fast links: a node, or a rack."""
    island_bandwidth: Column
    """Bytes/s of a device in one direction inside the island."""
    network: Column
    """Bytes/s of a device in one direction out of the island."""
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
    """What `shard` shards: ZeRO stage 1, 2 or 3."""
    sequence_parallel: Column = 0
    method: Column = 0
    schedule: Column = 1
    stages: Column = 1
    """Stages per pipeline rank."""
    expert: Column = 1
    expert_tensor: Column = 1
    recompute: Column = 0
    offload: Column = 0
    activations_on_host: Column = 0
    loss_chunk: Column = 0
    """Tokens whose logits exist at the same time; 0: all tokens of a micro-batch."""
    residual_bytes: Column = 4
    """Bytes of a value of the residual stream."""
    compute_bytes: Column = 2
    """Bytes of an activation value: 2, or 4 in fp32."""
    fp8: Column = 0
    """1: fused kernels round the operands to fp8; 2: separate passes do; 3: compiled separate passes do."""
    fp8_experts: Column = 0
    """Fraction of the blocks whose routed experts multiply in fp8."""
    compiled: Column = 0
    recompute_every: Column = 1
    """Only every N-th block is recomputed."""
    moments: Column = 8
    """Bytes of the optimizer states of a parameter."""
    wire: Column = 4
    """Bytes of a gradient value between ranks."""
    bucket: Column = 32 * 2**20
    """Bytes of a bucket of gradients."""
    gathered: Column = 0
    """Bytes of a sharded parameter value between ranks; 0: as many as of an activation value."""
    fp8_gather: Column = 0
    """Bytes that gathering in fp8 saves of each value of the blocks' linear layers: 1, or less where some blocks compute in bf16."""
    scores: Column = 0
    """What attention keeps of the scores: 0 nothing, 1 a mask between documents, 2 the whole table (no fused kernel), 3 the tables of soft-capped
    scores."""
    on_cpu: Column = 0
    """1: devices are CPU cores, whose kernels keep more."""
    on_xla: Column = 0
    """1: the step is one program of XLA, whose memory `cost/xla_footprint` counts."""
    traced_flops: Column = 0
    """FLOPs of a token's forward and backward on one tensor rank, of a custom module whose step was traced; 0: the columns above describe it."""
    traced_activations: Column = 0
    """Bytes of a token's activations, logits included, on one tensor rank of such a module."""
    traced_recomputed: Column = 0
    """The same with all blocks recomputed."""

    # Derived columns, computed once because all equations use them.
    accumulation: Column = field(init=False)
    """Micro-batches of a replica per step."""
    tokens: Column = field(init=False)
    """Tokens of a micro-batch on one rank: its part of each sequence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulation", self.batch / (self.data * self.shard * self.micro_batch))
        object.__setattr__(self, "tokens", self.micro_batch * self.sequence / self.context)

    def size(self) -> int:
        """Number of jobs."""
        return math.prod(np.broadcast_shapes(*{np.shape(getattr(self, column.name)) for column in fields(self)}))


def has_reference_copy(jobs: JobTable) -> Column:
    """Whether a second, frozen model computes the reference of DPO: the one below LoRA adapters needs no copy."""
    return (jobs.reference > 0) & (jobs.adapters == 0)


def trained_fraction(jobs: JobTable) -> Column:
    """Parameters that have gradients and optimizer states, as a fraction of the model's."""
    return np.where(jobs.adapters > 0, jobs.adapters, 1.0) if np.any(jobs.adapters > 0) else 1.0


def take(table: Any, rows: Any) -> Any:
    """Some rows of a table: arrays are indexed, scalars stay."""
    columns = {column.name: getattr(table, column.name) for column in fields(table) if column.init}
    return replace(table, **{name: value[rows] for name, value in columns.items() if np.ndim(value)})


def in_chunks(judge: Callable[..., Table], chunk: int, jobs: JobTable, *others: Rates) -> Table:
    """Calls `judge` with `chunk` rows of all tables at a time and joins the results, so that columns stay in the CPU's cache."""
    size = jobs.size()
    if size <= 2 * chunk:
        return judge(jobs, *others)
    rows = [slice(begin, min(begin + chunk, size)) for begin in range(0, size, chunk)]
    judged = [judge(take(jobs, part), *(take(other, part) for other in others)) for part in rows]

    def joined(columns: list[Any]) -> Any:
        if isinstance(columns[0], dict):
            return {name: joined([column[name] for column in columns]) for name in columns[0]}
        if not any(np.ndim(column) for column in columns):
            return columns[0]
        whole = np.empty(size)
        for column, part in zip(columns, rows, strict=True):
            whole[part] = column
        return whole

    kind: Any = type(judged[0])
    whole: Table = kind(**{column.name: joined([getattr(table, column.name) for table in judged]) for column in fields(kind)})
    return whole


def is_counted(model: ModelSpec) -> bool:
    """Whether a custom module was traced, so that the equations know what it takes and computes."""
    return model.measured is not None and model.measured.activations is not None


def module_columns(size: Size, model: ModelSpec, tensor: int, compute_bytes: int) -> dict[str, float]:
    """The fields of JobTable that describe a custom module: blocks of equal weights and an embedding, which sum up to its parameters. Time and
    activations follow from its trace; without one, activations are estimated from the number of parameters."""
    layers, width = size.blocks or model.layers, max(size.width, 1)
    rank = size.rank_parameters or size.parameters
    kept = size.activations or TOKEN_BYTES * math.sqrt(size.parameters) * compute_bytes / 2
    norms = (2 * layers + 1) * width
    table = model.rows * width / tensor
    if table + norms >= rank:  # hardly anything but norms, or no embedding of this width
        width, table = 1, 0.0
        norms = 2 * layers + 1
    return {
        "layers": layers,
        "dim": width,
        "attention_weights": max(rank - table - norms, 0.0) * tensor / layers,
        "score_width": 1,
        "value_width": 1,
        "kv_width": 0,
        "heads": 1,
        "kv_heads": tensor,
        "ffn": 0,
        "gated": 0,
        "vocab": table * tensor / width,
        "tied": 1,
        "traced_flops": size.rank_flops_per_token or size.flops_per_token,
        "traced_activations": kept,
        "traced_recomputed": size.recomputed_activations or kept,
    }


def model_columns(model: ModelSpec, tensor: int = 1, compute_bytes: int = 2) -> dict[str, float]:
    """The fields of JobTable that describe the model. `tensor`: the degree at which a custom module was traced."""
    if model.measured is not None:
        return module_columns(model.measured, model, tensor, compute_bytes)
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
        "attention_weights": model.attention_matrices(),
        "score_width": score,
        "value_width": value,
        "kv_width": kv_width,
        "heads": model.heads,
        "kv_heads": model.heads if mla else model.kv,
        "ffn": model.hidden,
        "gated": int(model.gated),
        "norms": model.norms,
        "capped_logits": int(model.logit_cap is not None),
        "vocab": model.rows,
        "tied": int(model.tied),
        "learned_positions": model.context if model.positions == "learned" else 0,
        "layer_norm": int(model.norm == "layer"),
        "mtp_depth": model.mtp_depth,
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


def machine_columns(hardware: Hardware, compute: str, fp8_share: float = 1.0) -> dict[str, float]:
    """The fields of JobTable that describe the machine. A number format that the device lacks runs in the best one it has. `fp8_share`: of
    the blocks that compute in fp8, where the run does."""
    gpu = hardware.gpu
    half = gpu.peak("bf16") or gpu.peak("fp16") or gpu.peak("fp32") or 0.0
    peaks = {"fp32": gpu.peak("fp32"), "bf16": half, "fp16": gpu.peak("fp16"), "fp8": gpu.peak("fp8")}
    peak = peaks.get(compute) or half
    if compute == "fp8" and fp8_share < 1.0 and half:
        peak = 1.0 / (fp8_share / peak + (1.0 - fp8_share) / half)  # a block after the other
    return {
        "peak": peak,
        "peak16": half if compute == "fp8" else peak,
        "bandwidth": gpu.bandwidth,
        "memory": gpu.memory,
        "island": hardware.island,
        "island_bandwidth": hardware.island_bandwidth,
        "network": hardware.network,
        "host_bandwidth": hardware.host_bandwidth,
    }
