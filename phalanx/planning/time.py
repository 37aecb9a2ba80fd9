"""How long a step takes: the block's work, what travels and how much of that shows, the pipeline's bubble, the optimizer.

`step_times` judges every job of a Work at once; searches, comparisons and the fit to published steps call it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np

from phalanx.planning.bubble import bubble
from phalanx.planning.communication import exchange, gather, group, hop
from phalanx.planning.doubt import unsure
from phalanx.planning.job_table import METHODS, RECOMPUTE, SCHEDULES, Column, Work
from phalanx.planning.layer import Part, block, expert_tokens, head, sparse_part
from phalanx.planning.rates import Rates
from phalanx.planning.state_time import adding_seconds, data_seconds, held_by, offload_seconds, optimizer_seconds
from phalanx.planning.times import Times

CHUNK = 1 << 15
"""Jobs judged at a time: their columns stay in the processor's cache."""


def step_times(work: Work, rates: Rates) -> Times:
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


def _judge(work: Work, rates: Rates) -> Times:
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


def _hop(work: Work, rates: Rates) -> Column:
    """Seconds of a message between neighbouring stages."""
    shared = (np.asarray(work.sequence_parallel) > 0) | (np.asarray(rates.split) > 0)
    message = work.tokens * work.dim * work.compute_bytes / np.where(shared, work.tensor, 1)
    return np.where(np.asarray(work.pipeline) > 1, hop(work, rates, message, work.ranks / work.pipeline), 0.0)


def _late(work: Work, host: Column, device: Column) -> Column:
    """How much longer than the device's work the host makes it: a smooth maximum, for neither is ever quite steady. Cores are their
    own host, and do the one after the other."""
    if np.all(work.on_cpu):
        return host + 0 * device
    ratio = host / device
    ratio = ratio * ratio
    return device * (np.sqrt(np.sqrt(1 + ratio * ratio)) - 1)


def _repeats(work: Work, rates: Rates) -> Column:
    """How much of a block's forward pass is done twice, its communication too."""
    return (np.asarray(work.recompute) == RECOMPUTE.index("full")) * (rates.repeated / work.recompute_every)


def _again(work: Work, rates: Rates, here: Part, shown: Shown) -> Column:
    """Recomputed in the backward pass of a block: all of it, or what memory bounds (and attention, where that is meant)."""
    selective = np.asarray(work.recompute) == RECOMPUTE.index("selective")
    some = (rates.reread * here.moved + rates.selective * here.attention) / work.recompute_every
    return _repeats(work, rates) * (here.forward + shown.forward) + selective * some


def _host(work: Work, rates: Rates) -> tuple[Column, Column]:
    """Seconds that launching a block's kernels takes, going forward and back."""
    fused = np.where(np.asarray(work.compiled) > 0, 0.6, 1.0)
    each = rates.launch * np.where(np.asarray(work.pipeline) > 1, rates.staged, 1.0)
    forward = each * (rates.kernels * fused + sparse_part(work) * rates.expert_kernels)
    gathered = (np.asarray(work.zero) == 3) & (np.asarray(work.shard) > 1)
    waits = gathered * rates.gather_host
    repeats = (np.asarray(work.recompute) > 0) / np.asarray(work.recompute_every)
    return forward + waits, (2 + repeats) * forward + waits


def _shown(work: Work, rates: Rates, here: Part) -> Shown:
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
        paired = np.where(np.asarray(work.schedule) == SCHEDULES.index("dualpipev"), rates.paired, 0.0)
        expert = _routed(work, rates) * sparse_part(work) * ((1 - rates.expert_hidden) * (1 - paired))
    return Shown(tensor, context, back, expert, tensor_back)


def _contexts(work: Work, rates: Rates, here: Part) -> tuple[Column, Column]:
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


def _routed(work: Work, rates: Rates) -> Column:
    """Seconds of sending tokens to their experts and back, in one direction of a block."""
    copies = expert_tokens(work) * work.active * work.dim * work.compute_bytes
    sent = 2 * exchange(work, rates, work.expert, copies, work.expert_tensor)
    cut = group(work, rates, work.expert_tensor)
    return sent + 2 * gather(cut, copies * work.expert_tensor)
