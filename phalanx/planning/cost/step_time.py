"""The time model: seconds of a step from the time of a block, exposed communication, the pipeline's bubble, gradients, optimizer and offload,
for every job of a table at once. The search, the comparison with runs and the fit to published steps call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import METHODS, RECOMPUTE, JobTable, in_chunks, trained_fraction
from phalanx.planning.cost.schedule_cost import bubble, overlapped_fraction
from phalanx.planning.machines.rates import Column, Rates

CHUNK = 1 << 15
"""Jobs judged at a time, so that their columns stay in the CPU's cache."""


def step_times(jobs: JobTable, rates: Rates) -> Times:
    """Seconds of a step and of its parts, for each job."""
    return in_chunks(_judge, CHUNK, jobs, rates)


def _judge(jobs: JobTable, rates: Rates) -> Times:
    block, head = block_time(jobs, rates), head_time(jobs, rates)
    exposed, exposed_backward = _exposed(jobs, rates, block)
    communicating, communicating_backward = sum(exposed.values()), sum(exposed_backward.values())
    layers = np.ceil(jobs.layers / jobs.pipeline)
    parameters = rank_parameters(jobs, layers)
    slack = (layers * jobs.pipeline - jobs.layers) * rates.slack
    recomputed = _recompute(jobs, rates, block, communicating)
    host_forward, host_backward = _host(jobs, rates)
    gpu_forward = layers * (block.forward + communicating)
    gpu_backward = layers * (block.whole - block.forward + communicating_backward + recomputed)
    waits = layers * sparse_fraction(jobs) * rates.expert_wait if np.any(jobs.sparse_layers > 0) else 0.0
    late_forward = _launch_wait(jobs, layers * host_forward, gpu_forward) + waits
    late_backward = _launch_wait(jobs, layers * host_backward, gpu_backward) + waits
    forward = gpu_forward + late_forward
    count = jobs.accumulation
    added = accumulation_seconds(jobs, rates, parameters) * (1 - 1 / count)
    weight = layers * block.weight * block.matrices + added
    backward = gpu_backward + late_backward + added
    # The last stage has the head; where layers do not divide evenly, it has fewer layers.
    of_block = block.whole + recomputed + communicating + communicating_backward
    of_head = head.whole + jobs.mtp_depth * of_block
    uneven = np.where(rates.balanced > 0, of_head / jobs.pipeline, np.maximum(0.0, of_head - slack * of_block))
    extra = np.where(jobs.pipeline > 1, uneven, of_head)

    # The reference of DPO: one more forward, with its communication.
    referring = (jobs.reference > 0) * (gpu_forward + head.forward)
    one_hop = _hop(jobs, rates)
    # Selectively recomputed and compiled blocks compute both halves of a backward at once.
    deferred = np.where((jobs.recompute == RECOMPUTE.index("selective")) | (jobs.compiled > 0), rates.splits, 1.0) * weight
    waited, hops = bubble(jobs, count, forward, backward - deferred, deferred)
    repeated = _repeated(jobs, rates)
    parts = {
        "compute": count * (layers * (block.whole + recomputed - repeated * communicating) + extra + added + referring),
        "launch": count * (late_forward + late_backward),
        **{name: count * layers * (once + exposed_backward[name] + repeated * once) for name, once in exposed.items()},
        "data": data_seconds(jobs, rates, parameters, count, forward + backward),
        "pipeline": hops * one_hop,
        "bubble": waited,
        "optimizer": optimizer_seconds(jobs, rates, parameters),
        "offload": offload_seconds(jobs, parameters, count, layers, forward + backward),
    }
    parts = {name: value * rates.software for name, value in parts.items()}
    named = sum(parts.values())
    parts["other"] = named * (rates.spread * np.log2(np.maximum(jobs.ranks / 8, 1))) + rates.overhead
    step = named + parts["other"]
    # On CPUs the constants were measured on whole steps, so every part is equally certain.
    squares = sum((doubt / _COMPUTE * parts[name]) ** 2 for name, doubt in _PARTS.items())
    far = 1.0 if np.all(jobs.on_cpu) else rates.doubt * np.sqrt(1 + squares / (step * step))
    far = far * np.where(jobs.traced_flops > 0, _TRACED, 1.0)
    pieces = {"forward": forward, "input": backward - deferred, "weight": deferred, "head": extra, "hop": one_hop}
    pieces = {name: value * rates.software for name, value in pieces.items()}
    return Times(
        parts=parts,
        step=step,
        low=step * np.exp(far * np.log(rates.low)),
        high=step * np.exp(far * np.log(rates.high)),
        pieces=pieces | {"tail": parts["data"] + parts["optimizer"] + parts["offload"]},
    )


def _hop(jobs: JobTable, rates: Rates) -> Column:
    """Seconds of a message between neighboring stages."""
    shared = (jobs.sequence_parallel > 0) | (rates.split > 0)
    message = jobs.tokens * jobs.dim * jobs.compute_bytes / np.where(shared, jobs.tensor, 1)
    return np.where(jobs.pipeline > 1, hop(jobs, rates, message, jobs.ranks / jobs.pipeline), 0.0)


def _launch_wait(jobs: JobTable, host: Column, device: Column) -> Column:
    """How much longer than the device's work a step takes because the host launches kernels: a smooth maximum, as neither
    rate is steady. A CPU is its own host and does one after the other."""
    if np.all(jobs.on_cpu):
        return host + 0 * device
    ratio = host / device
    ratio = ratio * ratio
    return device * (np.sqrt(np.sqrt(1 + ratio * ratio)) - 1)


def _repeated(jobs: JobTable, rates: Rates) -> Column:
    """Fraction of a block's forward that full recomputation repeats, including its communication."""
    return (jobs.recompute == RECOMPUTE.index("full")) * (rates.repeated / jobs.recompute_every)


def _recompute(jobs: JobTable, rates: Rates, block: BlockTime, communicating: Column) -> Column:
    """Seconds of recomputation in the backward of a block: all of it, or the memory-bound part (and attention, where
    constants say so)."""
    selective = jobs.recompute == RECOMPUTE.index("selective")
    some = (rates.reread * block.moved + rates.selective * block.attention) / jobs.recompute_every
    # Keys and values of latent attention are expanded again.
    flops = 2 * jobs.tokens * jobs.kv_rank * jobs.kv_width / jobs.tensor
    expanded = (selective | (jobs.compiled > 0)) * flops / (jobs.peak * rates.gemm)
    return _repeated(jobs, rates) * (block.forward + communicating) + selective * some + expanded


def _host(jobs: JobTable, rates: Rates) -> tuple[Column, Column]:
    """Seconds to launch a block's kernels, forward and backward."""
    fused = np.where(jobs.compiled > 0, 0.6, 1.0)
    each = rates.launch * np.where(jobs.pipeline > 1, rates.staged, 1.0)
    forward = each * (rates.kernels * fused + sparse_fraction(jobs) * rates.expert_kernels)
    gathered = (jobs.zero == 3) & (jobs.shard > 1)
    waits = gathered * rates.gather_host
    repeats = (jobs.recompute > 0) / jobs.recompute_every
    return forward + waits, (2 + repeats) * forward + waits


def _exposed(jobs: JobTable, rates: Rates, block: BlockTime) -> tuple[dict[str, Column], dict[str, Column]]:
    """Communication of one micro-batch in one block that computation does not hide, by part: in the forward and in the backward."""
    size = jobs.tokens * jobs.dim * jobs.compute_bytes
    wires = group(jobs, rates, jobs.tensor)
    tensor = 4 * gather(wires, size) * (1 - rates.tensor_hidden)
    # With sequence parallelism the inputs are gathered once more for the weights' gradients.
    tensor_back = tensor * np.where(jobs.sequence_parallel > 0, 1.5, 1.0)
    context = back = expert = 0.0
    if np.any(jobs.context > 1):
        context, back = _contexts(jobs, rates, block)
    if np.any(jobs.sparse_layers > 0):
        hidden = rates.paired * overlapped_fraction(jobs)
        expert = _expert_exchange(jobs, rates) * sparse_fraction(jobs) * ((1 - rates.expert_hidden) * (1 - hidden))
    # Selective recomputation sends tokens to their experts once more.
    again = (jobs.recompute == RECOMPUTE.index("selective")) / jobs.recompute_every
    forward = {"tensor": tensor, "context": context, "expert": expert}
    return forward, {"tensor": tensor_back, "context": back, "expert": expert * (1 + again * rates.resent)}


def _contexts(jobs: JobTable, rates: Rates, block: BlockTime) -> tuple[Column, Column]:
    """Exposed context-parallel communication, forward and backward: keys and values behind attention (ring), before it
    (gather), or exchanged for heads (Ulysses)."""
    wires = group(jobs, rates, jobs.context, jobs.tensor)
    each = jobs.tokens * jobs.compute_bytes / jobs.tensor
    sent = gather(wires, each * jobs.kv_width * jobs.context)
    traded = gather(wires, each * (jobs.score_width + jobs.value_width + jobs.kv_width)) + 3 * wires.latency
    behind = np.where(jobs.method == METHODS.index("ring"), rates.context_hidden, 0.0)
    trades, many = jobs.method == METHODS.index("ulysses"), jobs.context > 1
    forward = np.where(trades, traded, np.maximum(0.0, sent - behind * block.attention))
    back = np.where(trades, traded, np.maximum(0.0, 2 * sent - behind * block.attention_backward))
    return many * forward, many * back


def _expert_exchange(jobs: JobTable, rates: Rates) -> Column:
    """Seconds to send tokens to their experts and back, in one direction of a block."""
    copies = jobs.tokens / jobs.tensor * jobs.active * jobs.dim * jobs.compute_bytes
    sent = 2 * exchange(jobs, rates, jobs.expert, copies, jobs.expert_tensor)
    cut = group(jobs, rates, jobs.expert_tensor)
    return sent + 2 * gather(cut, copies * jobs.expert_tensor)


PARTS = ("compute", "launch", "tensor", "context", "expert", "data", "pipeline", "bubble", "optimizer", "offload", "other")
"""The parts that sum up to the step. "compute": matrices, attention and memory-bound work, with recomputation; "launch": waiting for the host
to launch kernels, beyond what computing hides; "data": gradients and gathered parameters of replicas and shards; "pipeline": messages between
stages; "other": stragglers, data loading and everything that no equation names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a step."""

    parts: dict[str, Column]
    """By PARTS, as the critical rank sees them: hidden communication is not in them."""
    step: Column
    low: Column
    """P10 of the step."""
    high: Column
    """P90 of the step."""
    pieces: dict[str, Column]
    """What a simulation of the schedule starts from, with exposed communication: of one micro-batch in the busiest stage "forward", "input" and
    "weight" (backward), "head" (what the last stage has in addition to the others) and "hop" (a message between neighboring stages); and
    "tail", the work after the last micro-batch: exposed gradients, optimizer, offload."""


_COMPUTE = 0.07
_TRACED = 2.0
"""How much wider the interval of a custom module is, on a logarithmic scale: nothing is known of its kernels."""
_PARTS = {"data": 0.4, "launch": 0.2, "expert": 0.2, "tensor": 0.25, "bubble": 0.1}
"""Relative standard deviation of each part's prediction: matrix products are alike everywhere, networks and hosts are not."""


class RankParameters(NamedTuple):
    """Parameters of the fullest pipeline rank, before sharding."""

    dense: Column
    experts: Column
    linear: Column
    """Of the dense ones, those of linear layers in blocks."""


def rank_parameters(jobs: JobTable, layers: Column) -> RankParameters:
    """Parameters of the fullest rank: its layers, and the embedding or the head (untied, without a pipeline: both)."""
    sparse, matrices = sparse_fraction(jobs), 2 + jobs.gated
    ffn = (1 - sparse) * jobs.ffn + sparse * jobs.shared_ffn
    linear = jobs.attention_weights + matrices * jobs.dim * ffn
    block_values = linear + sparse * jobs.experts * jobs.dim
    ends = np.where((jobs.pipeline > 1) | (jobs.tied > 0), 1, 2) * jobs.vocab * jobs.dim
    # Where layers do not divide evenly, the first and last ranks have fewer layers next to embedding and head.
    spared = layers * jobs.pipeline - jobs.layers
    ends = np.where(spared > 0, np.maximum(0.0, ends - block_values), ends)
    dense = (layers * block_values + ends) / jobs.tensor
    experts = layers * sparse * 3 * jobs.dim * jobs.expert_ffn * jobs.experts / (jobs.expert * jobs.expert_tensor)
    return RankParameters(dense, experts, layers * linear / jobs.tensor)


def accumulation_seconds(jobs: JobTable, rates: Rates, parameters: RankParameters) -> Column:
    """Seconds to add a micro-batch's gradients to the fp32 sum, partly hidden by matrix products; few if sharded."""
    kept = np.where(jobs.zero == 3, jobs.shard, 1)
    return (
        rates.adding * trained_fraction(jobs) * (parameters.dense + parameters.experts) / kept / (jobs.bandwidth * rates.memory)
    )


def data_seconds(jobs: JobTable, rates: Rates, parameters: RankParameters, count: Column, busy: Column) -> Column:
    """Exposed seconds of reducing gradients and gathering parameters: with ZeRO-3, in every micro-batch."""
    third = (jobs.zero == 3) & (jobs.shard > 1)
    shards = jobs.shard * jobs.context
    inner = group(jobs, rates, shards, jobs.tensor)
    outer = group(jobs, rates, jobs.data, jobs.tensor * shards)
    every = group(jobs, rates, jobs.data * shards, jobs.tensor)
    # Frozen parameters are gathered, but have no gradients; nor do their values change.
    gathered = np.where(jobs.gathered > 0, jobs.gathered, jobs.compute_bytes)
    gradient, value = trained_fraction(jobs) * jobs.wire, trained_fraction(jobs) * jobs.compute_bytes
    bytes_ = (2 * gathered + gradient) * parameters.dense - 2 * jobs.fp8_gather * parameters.linear
    each = bytes_ * inner.per_byte + 3 * inner.latency * jobs.layers / jobs.pipeline
    replicated = 2 * gradient * parameters.dense / np.maximum(shards, 1) * outer.per_byte + 2 * outer.latency
    plain = (gradient + value) * parameters.dense * every.per_byte + 2 * every.latency * jobs.layers / jobs.pipeline
    sent = np.where(third, count * each + replicated, plain)
    if np.any(jobs.sparse_layers > 0):
        apart = jobs.expert * jobs.expert_tensor
        same = np.maximum(jobs.ranks / jobs.pipeline / apart, 1)
        wires = group(jobs, rates, same, apart)
        rest = parameters.experts * wires.per_byte
        sent = sent + np.where(third, count * (2 * gathered + gradient) * rest, (gradient + value) * rest)
    cover = rates.data_hidden * np.where(third, count, 1) * busy
    return np.maximum(0.0, sent - cover) + np.where(third, rates.gathering, rates.contention) * np.minimum(sent, cover)


def optimizer_seconds(jobs: JobTable, rates: Rates, parameters: RankParameters) -> Column:
    apart = jobs.expert * jobs.expert_tensor
    same = np.clip(jobs.ranks / jobs.pipeline / np.maximum(apart, 1), 1, None)
    mine = parameters.dense / (jobs.shard * jobs.context) + parameters.experts / np.minimum(jobs.shard * jobs.context, same)
    # Two moments of 4 bytes make 16 of the 28 bytes that are read and written.
    size = rates.optimizer_bytes * (12 + 2 * jobs.moments) / 28
    return trained_fraction(jobs) * size * mine / (jobs.bandwidth * rates.memory)


def offload_seconds(jobs: JobTable, parameters: RankParameters, count: Column, layers: Column, busy: Column) -> Column:
    """Seconds of offload: optimizer states cross to the host and back every step; activations do so every micro-batch,
    behind computing."""
    mine = (parameters.dense + parameters.experts) / (jobs.shard * jobs.context)
    states = np.where(jobs.offload > 0, 16.0 * trained_fraction(jobs) * mine / jobs.host_bandwidth, 0.0)
    states = np.where(jobs.offload > 1, 8 * states, states)
    if not np.any(jobs.activations_on_host > 0):
        return states
    crossing = 2 * jobs.tokens * layers * 2 * jobs.dim * jobs.compute_bytes / jobs.host_bandwidth
    return states + np.where(jobs.activations_on_host > 0, count * np.maximum(0.0, crossing - busy), 0.0)


# --- one block on one device ---


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
    weight: Column = 1.0
    """Of the weight backward, the fraction that is computed: little of it if the matrices are frozen."""

    @property
    def forward(self) -> Column:
        return self.matrices + self.attention + self.moved

    @property
    def whole(self) -> Column:
        """Forward and both halves of the backward."""
        return (2 + self.weight) * self.matrices + self.attention + self.attention_backward + 3 * self.moved


def sparse_fraction(jobs: JobTable) -> Column:
    """Fraction of the blocks that have experts."""
    return jobs.sparse_layers / jobs.layers


def block_time(jobs: JobTable, rates: Rates) -> BlockTime:
    """One block, on one rank of the tensor and expert groups."""
    if np.any(jobs.traced_flops):
        return _traced_block(jobs, rates)
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
    seen = jobs.sequence * jobs.attended
    forward = tokens / tensor * (seen * (jobs.score_width + jobs.value_width) / (jobs.peak16 * reached))
    unfused = rates.scores * (jobs.scores > 1) * jobs.heads * jobs.sequence / (jobs.bandwidth * rates.memory)
    # In ring attention each further part of the sequence adds its values to the running result, in fp32.
    ring = jobs.method == METHODS.index("ring")
    merged = 12.0 * jobs.value_width * ring * (jobs.context - 1) / (jobs.bandwidth * rates.memory)
    drained = rates.kernels * rates.drain * np.where(jobs.compiled > 0, rates.fused, 1.0)
    moved = moved + tokens / tensor * (unfused + merged) + drained
    if np.any(jobs.base_bytes > 0):
        weights = (jobs.attention_weights + matrices_of_ffn * jobs.dim * mean_ffn) / tensor
        weights = weights + sparse * 3 * jobs.dim * jobs.expert_ffn * jobs.experts / (jobs.expert * jobs.expert_tensor)
        # Compiled code writes the result alone; otherwise there are passes for codes, levels and scales. The forward and the backward dequantize
        # once each, and `moved` counts three times.
        passes = np.where(jobs.compiled > 0, jobs.base_bytes + jobs.compute_bytes, 24.0)
        moved = moved + np.where(jobs.base_bytes > 0, 2 / 3 * weights * passes / (jobs.bandwidth * rates.memory), 0.0)
    adapted = jobs.adapters > 0
    # The products of LoRA adapters, next to those of the frozen matrices.
    matrices = matrices * (1 + adapted * jobs.adapters)
    return BlockTime(matrices, forward, forward * (2.5 / rates.attention_backward), moved, trained_fraction(jobs))


def _traced_block(jobs: JobTable, rates: Rates) -> BlockTime:
    """A block of a traced custom module, its part of the head included: all FLOPs count as matrix products, and every byte that is kept for the
    backward as written once and read once."""
    rows = 1 + rates.knee * (2 / jobs.dim + 1 / jobs.tokens)
    flops = jobs.traced_flops / 3 / jobs.layers * jobs.tokens
    moved = 2 * jobs.traced_activations / jobs.layers * jobs.tokens / (jobs.bandwidth * rates.memory)
    drained = rates.kernels * rates.drain
    return BlockTime(flops / (jobs.peak * rates.gemm) * rows, 0.0, 0.0, moved + drained)


def _aligned(size: Column, parts: Column) -> Column:
    """Slowdown, measured on an H200, of products whose inner size on a rank does not fill tensor cores evenly."""
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
    """Rounding to fp8 in separate passes over inputs and weights of the linear layers and gradients of their outputs."""
    gated = 1 + jobs.gated
    # Of weights that are gathered in fp8, each rank rounds its shard.
    elsewhere = np.where(jobs.zero == 3, jobs.fp8_gather, 0.0) * (1 - 1 / (jobs.shard * jobs.context))
    attention = jobs.tokens * (4 * jobs.dim + 2 * jobs.score_width + jobs.kv_width) + (1 - elsewhere) * jobs.attention_weights
    ffn = (1 + gated) * (jobs.tokens * (jobs.dim + mean_ffn) + (1 - elsewhere) * jobs.dim * mean_ffn)
    fused = np.where(jobs.fp8 > 2, rates.fused_rounding, 1.0)
    # Of blocks with experts, only the half with attention is compiled.
    elements = fused * attention + np.where(jobs.sparse_layers > 0, 1.0, fused) * ffn
    return (jobs.fp8 > 1) * elements / jobs.tensor * (rates.rounding / (jobs.bandwidth * rates.memory))


def _experts(jobs: JobTable, rates: Rates, sparse: Column) -> tuple[Column, Column]:
    """Products of the routed experts and the copies around them, in an average block."""
    tokens = jobs.tokens / jobs.tensor  # tensor ranks share the tokens that they route
    routed = tokens * jobs.active
    experts = np.maximum(jobs.experts, 1)
    width = np.maximum(jobs.expert_ffn, 1)
    rows = routed * jobs.expert * jobs.expert_tensor / experts
    # Two of an expert's three matrices are one product of twice the width.
    slow = 1 + rates.knee * (1 / jobs.dim + 1 / np.maximum(rows, 1) + 2 / 3 * jobs.expert_tensor / width)
    flops = 6 * jobs.dim * width
    router = 2 * tokens * jobs.dim * jobs.experts / (jobs.peak16 * rates.gemm)
    # Of three products, that of the weight gradient stays in 16 bits. `jobs.peak` is that of all blocks together.
    own = 3 / (2 / jobs.peak + 1 / jobs.peak16)
    peak = np.where(rates.eight > 0, jobs.peak, np.where(jobs.fp8_experts > 0, own, jobs.peak16))
    products = routed * flops * slow / (peak * rates.gemm) + router
    # Tokens are sorted by expert and back, each with a read and a write; the activation is read and written too.
    moved = (
        routed * (rates.copies * jobs.dim + 3 * width) * rates.traffic * jobs.compute_bytes / (jobs.bandwidth * rates.memory)
    )
    # Rounded in separate passes, as these blocks are not compiled: inputs and gradients of three products, and the weights.
    weights = 3 * jobs.dim * width * jobs.experts / (jobs.expert * jobs.expert_tensor)
    values = jobs.fp8_experts * (3 * routed * (jobs.dim + width) + weights)
    moved = moved + values * (rates.rounding / (jobs.bandwidth * rates.memory))
    return sparse * products, sparse * moved


def head_time(jobs: JobTable, rates: Rates) -> BlockTime:
    """The output matrix and the loss, once more for each MTP depth."""
    if np.any(jobs.traced_flops):
        return BlockTime(0.0, 0.0, 0.0, 0.0)
    tokens = jobs.tokens * (1 + jobs.mtp_depth) / jobs.tensor
    rows = 1 + rates.knee * (1 / jobs.dim + 1 / jobs.tokens)
    matrices = tokens * rows * (2 * jobs.dim * jobs.vocab / (jobs.peak16 * rates.gemm))
    moved = tokens * (rates.logits * jobs.vocab / (jobs.bandwidth * rates.memory))
    return BlockTime(matrices, 0.0, 0.0, moved, np.where(jobs.adapters > 0, 0.0, 1.0))


# --- messages ---
# Ranks are numbered with tensor groups innermost, then context, shard, data and pipeline; an island of fast links holds
# neighboring ranks. Collectives are rings: an all-gather or a reduce-scatter of n bytes sends n·(size-1)/size bytes over each
# rank's link, an all-reduce twice that.

BUS = 64e9
"""Bytes/s in one direction below which devices share a bus instead of having links of their own."""


class Group(NamedTuple):
    """A group of ranks, as collectives see it."""

    per_byte: Column
    """Seconds of an all-gather or reduce-scatter per byte of the whole tensor."""
    latency: Column
    """Seconds of a collective besides its bytes."""


def group(jobs: JobTable, rates: Rates, size: Column, stride: Column = 1) -> Group:
    """A group of `size` ranks, `stride` apart. Between islands every member uses a network card of its own, and rings use
    all of them."""
    if not np.any(size > 1):
        return Group(0.0, 0.0)
    inside = np.maximum(np.minimum(jobs.island / stride, size), 1.0)
    nodes = size / inside
    near = _near(jobs, rates)
    bandwidth = np.where(nodes > 1, np.minimum(near, inside * (jobs.network * rates.network)), near)
    latency = np.where(size > 1, (rates.latency - rates.far_latency) + rates.far_latency * nodes, 0.0)
    return Group((size - 1) / (size * bandwidth), latency)


def _near(jobs: JobTable, rates: Rates) -> Column:
    """Bytes/s of a rank inside its island."""
    shared = np.where(jobs.island_bandwidth < BUS, rates.bus, 1.0)
    return jobs.island_bandwidth * rates.island * shared


def gather(wires: Group, size: Column) -> Column:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in total."""
    return size * wires.per_byte + wires.latency


def exchange(jobs: JobTable, rates: Rates, size: Column, copies: Column, stride: Column = 1) -> Column:
    """Seconds of an all-to-all over `size` ranks in which each rank sends `copies` bytes, evenly to all of them.

    Inside the island the fast links carry them; the rest leaves through the rank's network card. A token is sent to an
    island once, however many of its experts are there, and to at most `active_groups` islands.
    """
    inside = np.minimum(np.maximum(jobs.island / stride, 1.0), size)
    nodes = size / inside
    groups = np.where(jobs.active_groups > 0, jobs.active_groups, 4)
    most = np.maximum(np.minimum(np.minimum(jobs.active, nodes), groups), 1)
    away = np.where(nodes > 1, copies * most / np.maximum(jobs.active, 1) * (1 - 1 / nodes), 0.0)
    near = copies * (1 - 1 / inside) / _near(jobs, rates)
    far = away / (jobs.network * rates.network)
    latency = np.where(size > 1, rates.latency + rates.far_latency * (nodes - 1), 0.0)
    return np.maximum(near, far) + latency


def hop(jobs: JobTable, rates: Rates, size: Column, stride: Column) -> Column:
    """Seconds of a message of `size` bytes to the rank `stride` away."""
    near = stride < jobs.island
    bandwidth = np.where(near, _near(jobs, rates), jobs.network * rates.network)
    return size / bandwidth + rates.latency
