"""How long a step takes: the block's work, what travels and how much of that shows, the pipeline's bubble, the optimizer.

`step_times` judges every job of a Work at once; searches, comparisons and the fit to published steps call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.block_time import Part, block, expert_tokens, head, sparse_part
from phalanx.planning.cost.communication import exchange, gather, group, hop
from phalanx.planning.cost.job_table import METHODS, RECOMPUTE, JobTable
from phalanx.planning.cost.schedule_cost import CODE, bubble
from phalanx.planning.machines.rates import Column, Rates

CHUNK = 1 << 15
"""Jobs judged at a time: their columns stay in the processor's cache."""


def step_times(work: JobTable, rates: Rates) -> Times:
    """Seconds of a step and what they are made of, for each job."""
    size = work.size()
    if size <= 2 * CHUNK:
        return _judge(work, rates)
    parts = [slice(begin, begin + CHUNK) for begin in range(0, size, CHUNK)]
    judged = [_judge(work.take(part), _part(rates, part)) for part in parts]
    names = [field.name for field in fields(Times)]
    return Times(**{name: _joined([getattr(times, name) for times in judged], parts, size) for name in names})


def _part(rates: Rates, part: slice) -> Rates:
    values = {field.name: getattr(rates, field.name) for field in fields(Rates)}
    return Rates(**{name: value[part] if np.ndim(value) else value for name, value in values.items()})


def _joined(columns: list[Column], parts: list[slice], size: int) -> Column:
    if not any(np.ndim(column) for column in columns):
        return columns[0]
    whole = np.empty(size)
    for column, part in zip(columns, parts, strict=True):
        whole[part] = column
    return whole


class Shown(NamedTuple):
    """Exposed communication of one micro-batch in one block, in each direction."""

    tensor: Column
    context: Column
    context_backward: Column
    expert: Column

    tensor_backward: Column

    @property
    def forward(self) -> Column:
        return self.tensor + self.context + self.expert

    @property
    def backward(self) -> Column:
        return self.tensor_backward + self.context_backward + self.expert


def _judge(work: JobTable, rates: Rates) -> Times:
    here, last = block(work, rates), head(work, rates)
    shown = _shown(work, rates, here)
    layers = np.ceil(work.layers / work.pipeline)
    held = held_by(work, layers)
    slack = (layers * work.pipeline - work.layers) * rates.slack
    again = _again(work, rates, here, shown)
    host_forward, host_backward = _host(work, rates)
    gpu_forward = layers * (here.forward + shown.forward)
    gpu_backward = layers * (here.whole - here.forward + shown.backward + again)
    waits = layers * sparse_part(work) * rates.expert_wait if np.any(np.asarray(work.sparse_layers) > 0) else 0.0
    late_forward = _late(work, layers * host_forward, gpu_forward) + waits
    late_backward = _late(work, layers * host_backward, gpu_backward) + waits
    forward = gpu_forward + late_forward
    count = work.accumulation
    added = adding_seconds(work, rates, held) * (1 - 1 / count)
    weight = layers * here.matrices + added
    backward = gpu_backward + late_backward + added
    # The last stage has the head; where layers do not divide evenly, it has fewer of them.
    of_block = here.whole + again + shown.forward + shown.backward
    of_head = last.whole + work.ahead * of_block
    uneven = np.where(np.asarray(rates.balanced) > 0, of_head / work.pipeline, np.maximum(0.0, of_head - slack * of_block))
    extra = np.where(np.asarray(work.pipeline) > 1, uneven, of_head)

    one_hop = _hop(work, rates)
    waited, hops = bubble(work, count, forward, backward - weight, weight)
    again_forward = _repeats(work, rates)
    both = count * layers
    parts = {
        "compute": count * (layers * (here.whole + again - again_forward * shown.forward) + extra + added),
        "launch": count * (late_forward + late_backward),
        "tensor": both * (shown.tensor + shown.tensor_backward + again_forward * shown.tensor),
        "context": both * (shown.context + shown.context_backward + again_forward * shown.context),
        "expert": both * (2 * shown.expert + again_forward * shown.expert),
        "data": data_seconds(work, rates, held, count, forward + backward),
        "pipeline": hops * one_hop,
        "bubble": waited,
        "optimizer": optimizer_seconds(work, rates, held),
        "offload": offload_seconds(work, held, count, layers, forward + backward),
    }
    parts = {name: value * rates.software for name, value in parts.items()}
    named = sum(parts.values())
    parts["other"] = named * (rates.spread * np.log2(np.maximum(work.ranks / 8, 1))) + rates.overhead
    step = named + parts["other"]
    scale = rates.software
    # What was measured on cores is all of a step.
    far = 1.0 if np.all(work.on_cpu) else rates.doubt * unsure(parts, step)
    return Times(
        **parts,
        step=step,
        low=step * np.exp(far * np.log(rates.low)),
        high=step * np.exp(far * np.log(rates.high)),
        forward=forward * scale,
        input=(backward - weight) * scale,
        weight=weight * scale,
        head=extra * scale,
        hop=one_hop * scale,
        tail=parts["data"] + parts["optimizer"] + parts["offload"],
    )


def _hop(work: JobTable, rates: Rates) -> Column:
    """Seconds of a message between neighbouring stages."""
    shared = (np.asarray(work.sequence_parallel) > 0) | (np.asarray(rates.split) > 0)
    message = work.tokens * work.dim * work.compute_bytes / np.where(shared, work.tensor, 1)
    return np.where(np.asarray(work.pipeline) > 1, hop(work, rates, message, work.ranks / work.pipeline), 0.0)


def _late(work: JobTable, host: Column, device: Column) -> Column:
    """How much longer than the device's work the host makes it: a smooth maximum, for neither is ever quite steady. Cores are their
    own host, and do the one after the other."""
    if np.all(work.on_cpu):
        return host + 0 * device
    ratio = host / device
    ratio = ratio * ratio
    return device * (np.sqrt(np.sqrt(1 + ratio * ratio)) - 1)


def _repeats(work: JobTable, rates: Rates) -> Column:
    """How much of a block's forward pass is done twice, its communication too."""
    return (np.asarray(work.recompute) == RECOMPUTE.index("full")) * (rates.repeated / work.recompute_every)


def _again(work: JobTable, rates: Rates, here: Part, shown: Shown) -> Column:
    """Recomputed in the backward pass of a block: all of it, or what memory bounds (and attention, where that is meant)."""
    selective = np.asarray(work.recompute) == RECOMPUTE.index("selective")
    some = (rates.reread * here.moved + rates.selective * here.attention) / work.recompute_every
    return _repeats(work, rates) * (here.forward + shown.forward) + selective * some


def _host(work: JobTable, rates: Rates) -> tuple[Column, Column]:
    """Seconds that launching a block's kernels takes, going forward and back."""
    fused = np.where(np.asarray(work.compiled) > 0, 0.6, 1.0)
    each = rates.launch * np.where(np.asarray(work.pipeline) > 1, rates.staged, 1.0)
    forward = each * (rates.kernels * fused + sparse_part(work) * rates.expert_kernels)
    gathered = (np.asarray(work.zero) == 3) & (np.asarray(work.shard) > 1)
    waits = gathered * rates.gather_host
    repeats = (np.asarray(work.recompute) > 0) / np.asarray(work.recompute_every)
    return forward + waits, (2 + repeats) * forward + waits


def _shown(work: JobTable, rates: Rates, here: Part) -> Shown:
    """What of a block's communication computing does not cover."""
    size = work.tokens * work.dim * work.compute_bytes
    wires = group(work, rates, work.tensor)
    tensor = 4 * gather(wires, size) * (1 - rates.tensor_hidden)
    # Sequence-parallel inputs are gathered once more for the weights' gradients.
    tensor_back = tensor * np.where(np.asarray(work.sequence_parallel) > 0, 1.5, 1.0)
    context = back = expert = 0.0
    if np.any(np.asarray(work.context) > 1):
        context, back = _contexts(work, rates, here)
    if np.any(np.asarray(work.sparse_layers) > 0):
        paired = np.where(np.asarray(work.schedule) == CODE["dualpipev"], rates.paired, 0.0)
        expert = _routed(work, rates) * sparse_part(work) * ((1 - rates.expert_hidden) * (1 - paired))
    return Shown(tensor, context, back, expert, tensor_back)


def _contexts(work: JobTable, rates: Rates, here: Part) -> tuple[Column, Column]:
    """Of ranks that share a sequence, forward and back: keys and values behind attention, or gathered before it, or traded for heads."""
    wires = group(work, rates, work.context, work.tensor)
    each = work.tokens * work.compute_bytes / work.tensor
    sent = gather(wires, each * work.kv_width * work.context)
    traded = gather(wires, each * (work.score_width + work.value_width + work.kv_width)) + 3 * wires.latency
    way = np.asarray(work.method)
    behind = np.where(way == METHODS.index("ring"), rates.context_hidden, 0.0)
    traded_here = way == METHODS.index("ulysses")
    forward = np.where(traded_here, traded, np.maximum(0.0, sent - behind * here.attention))
    back = np.where(traded_here, traded, np.maximum(0.0, 2 * sent - behind * here.attention_backward))
    many = np.asarray(work.context) > 1
    return many * forward, many * back


def _routed(work: JobTable, rates: Rates) -> Column:
    """Seconds of sending tokens to their experts and back, in one direction of a block."""
    copies = expert_tokens(work) * work.active * work.dim * work.compute_bytes
    sent = 2 * exchange(work, rates, work.expert, copies, work.expert_tensor)
    cut = group(work, rates, work.expert_tensor)
    return sent + 2 * gather(cut, copies * work.expert_tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds. The first group sums up to `step`, as a critical rank sees it: what is hidden behind computing is not in it."""

    compute: Column
    """Matrices, attention and everything memory-bound, of all micro-batches, recomputation too."""
    launch: Column
    """Waiting for the host to launch kernels, beyond what computing covers."""
    tensor: Column
    """Exposed communication of each dimension …"""
    context: Column
    expert: Column
    data: Column
    """… of replicas and shards: gradients, gathered parameters."""
    pipeline: Column
    """Between stages."""
    bubble: Column
    optimizer: Column
    offload: Column
    other: Column
    """Stragglers, data, what no equation names."""
    step: Column
    low: Column
    """P10 of the step …"""
    high: Column
    """… and P90."""

    # Of one micro-batch in the busiest stage, exposed communication inside: what a simulation of the schedule starts from.
    forward: Column
    input: Column
    """Backward to the input."""
    weight: Column
    """Backward to the weights."""
    head: Column
    """Forward and backward that the last stage has beyond the others."""
    hop: Column
    """A message between neighbouring stages."""
    tail: Column
    """After the last micro-batch: exposed gradients, optimizer, gathering."""


PARTS = ("compute", "launch", "tensor", "context", "expert", "data", "pipeline", "bubble", "optimizer", "offload", "other")
"""Those that sum up to the step."""


_COMPUTE = 0.07
_PARTS = {"data": 0.4, "launch": 0.2, "expert": 0.2, "tensor": 0.25, "bubble": 0.1}
"""Deviation of what is predicted for each part, as a part of it: products are alike everywhere, networks and hosts are not."""
_FAMILY = 1.0
"""Variance between publications about one family of devices, over that of rows within one."""


def unsure(parts: Mapping[str, Column], step: Column) -> Column:
    """How many times as far off as a step that only computes."""
    squares = sum((doubt / _COMPUTE * parts[name]) ** 2 for name, doubt in _PARTS.items())
    return np.sqrt(1 + squares / (step * step))


def unfamiliar(publications: Column) -> Column:
    """How many times as far off, by the number of publications that the constants of a family rest on."""
    return np.sqrt(1 + _FAMILY / np.maximum(publications, 0.5))


class Held(NamedTuple):
    """Values of the fullest pipeline rank, before shards divide them."""

    dense: Column
    experts: Column


def held_by(work: JobTable, layers: Column) -> Held:
    """Of the fullest rank: its layers, and the embedding or the head (both, where there is no pipeline and they are not tied)."""
    sparse, matrices = sparse_part(work), 2 + np.asarray(work.gated)
    ffn = (1 - sparse) * work.ffn + sparse * work.shared_ffn
    block_values = work.attention_weights + matrices * work.dim * ffn + sparse * work.experts * work.dim
    ends = np.where((np.asarray(work.pipeline) > 1) | (np.asarray(work.tied) > 0), 1, 2) * work.vocab * work.dim
    # Where layers do not divide evenly, the ends have fewer of them beside their tables.
    spared = layers * work.pipeline - work.layers
    ends = np.where(spared > 0, np.maximum(0.0, ends - block_values), ends)
    dense = (layers * block_values + ends) / work.tensor
    experts = layers * sparse * 3 * work.dim * work.expert_ffn * work.experts / (work.expert * work.expert_tensor)
    return Held(dense, experts)


def adding_seconds(work: JobTable, rates: Rates, held: Held) -> Column:
    """Adding a micro-batch's gradients to those kept in 32 bits, in part behind the products. Sharded ones are few."""
    kept = np.where(np.asarray(work.zero) == 3, work.shard, 1)
    return rates.adding * (held.dense + held.experts) / kept / (work.bandwidth * rates.memory)


def data_seconds(work: JobTable, rates: Rates, held: Held, count: Column, busy: Column) -> Column:
    """Exposed: gradients summed over replicas, parameters gathered. Sharded parameters (`zero` 3) travel with every micro-batch."""
    third = (np.asarray(work.zero) == 3) & (np.asarray(work.shard) > 1)
    shards = work.shard * work.context
    inner = group(work, rates, shards, work.tensor)
    outer = group(work, rates, work.data, work.tensor * shards)
    every = group(work, rates, work.data * shards, work.tensor)
    gradient, value = work.wire, work.compute_bytes
    gathered = np.where(np.asarray(work.gathered) > 0, work.gathered, value)
    each = (2 * gathered + gradient) * held.dense * inner.per_byte + 3 * inner.latency * work.layers / work.pipeline
    replicated = 2 * gradient * held.dense / np.maximum(shards, 1) * outer.per_byte + 2 * outer.latency
    plain = (gradient + value) * held.dense * every.per_byte + 2 * every.latency * work.layers / work.pipeline
    sent = np.where(third, count * each + replicated, plain)
    if np.any(np.asarray(work.sparse_layers) > 0):
        apart = work.expert * work.expert_tensor
        same = np.maximum(work.ranks / work.pipeline / apart, 1)
        wires = group(work, rates, same, apart)
        rest = held.experts * wires.per_byte
        sent = sent + np.where(third, count * (2 * gathered + gradient) * rest, (gradient + value) * rest)
    cover = rates.data_hidden * np.where(third, count, 1) * busy
    return np.maximum(0.0, sent - cover) + np.where(third, rates.gathering, rates.contention) * np.minimum(sent, cover)


def optimizer_seconds(work: JobTable, rates: Rates, held: Held) -> Column:
    apart = work.expert * work.expert_tensor
    same = np.clip(work.ranks / work.pipeline / np.maximum(apart, 1), 1, None)
    mine = held.dense / (work.shard * work.context) + held.experts / np.minimum(work.shard * work.context, same)
    # Moments of 4 bytes each are 16 of some 28 bytes that are read and written.
    size = rates.optimizer_bytes * (12 + 2 * np.asarray(work.moments)) / 28
    return size * mine / (work.bandwidth * rates.memory)


def offload_seconds(work: JobTable, held: Held, count: Column, layers: Column, busy: Column) -> Column:
    """States that cross to the host and back every step, and activations that do so every micro-batch behind computing."""
    mine = (held.dense + held.experts) / (work.shard * work.context)
    states = np.where(np.asarray(work.offload) > 0, 16.0 * mine / work.host_bandwidth, 0.0)
    states = np.where(np.asarray(work.offload) > 1, 8 * states, states)
    if not np.any(np.asarray(work.activations_on_host) > 0):
        return states
    crossing = 2 * work.tokens * layers * 2 * work.dim * work.compute_bytes / work.host_bandwidth
    return states + np.where(np.asarray(work.activations_on_host) > 0, count * np.maximum(0.0, crossing - busy), 0.0)
