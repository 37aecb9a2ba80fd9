"""The account of one step on one rank, and what theory says of it. Taken by `verification/sides`, printed by `phalanx verify`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.observe.counters import MemoryCounter, Sent, TrafficCounter
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RankAccount:
    """One rank's."""

    sent: Sent
    """Bytes of one step, by technique and collective."""
    memory: dict[str, int]
    """Bytes of parameters, gradients, optimizer and activations."""


@dataclass(frozen=True, slots=True)
class Theory:
    """What a rank would send and keep if nothing but the technique itself counted."""

    sent: dict[str, float]
    """Bytes of one step by technique, of those that a formula is known for."""
    memory: dict[str, float]
    per_parameter: str
    """Bytes of state per parameter, as a formula in the number of ranks that share it."""
    said: tuple[str, ...] = ()
    """Where what is measured may differ, and why."""


def take(trainer: Trainer) -> RankAccount:
    """Of the trainer's next step. The first steps also make what lasts: take a later one."""
    parameters, gradients, optimizer = states(trainer)
    live, account = MemoryCounter((*parameters, *gradients, *optimizer), trainer.mesh.device), TrafficCounter()
    with live, account:
        trainer.step()
    parameters, gradients, optimizer = states(trainer)
    memory = {
        "parameters": _bytes(parameters),
        "gradients": _bytes(gradients),
        "optimizer": _bytes(optimizer),
        "activations": live.peak,
    }
    return RankAccount(account.sent, memory)


def states(trainer: Trainer) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What lasts from step to step: parameters, gradients, and the optimizer's states with its own copy of the weights, if any."""
    parameters = [_local(parameter) for part in trainer.sharded.parts for parameter in part.parameters()]
    gradients = [_local(p.grad) for part in trainer.sharded.parts for p in part.parameters() if p.grad is not None]
    gradients += [one.gradient for one in trainer.sharded.owned if one.gradient is not None]
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    masters = [one.value for one in trainer.sharded.owned if one.value.untyped_storage().data_ptr() not in seen]
    return parameters, gradients, [*masters, *_tensors(trainer.optimizer.state().values())]


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their memory, each piece once; single numbers such as step counts are left out."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.ndim or t.numel() > 1}
    return sum(storages.values())


def theory(run: Run, plan: Plan) -> Theory:
    """Of the mean rank: tensor and pipeline ranks share parameters evenly."""
    layout = plan.layout
    each = plan.parameters / (layout.tensor * layout.pipeline)
    n, zero = layout.shard, layout.zero if layout.shard > 1 else 0
    # In ZeRO-1 and 2 the model computes in a copy of 2 bytes, and the optimizer keeps the weights themselves.
    low = plan.compute != "fp32" and zero in (1, 2)
    weight, gradient, state = (2, 2, 12) if low else (4, 4, 8)
    shared = {1: state, 2: state + gradient, 3: state + gradient + weight}.get(zero, 0)
    whole = weight + gradient + state - shared
    formula = f"{whole} + {shared}/{n}" if whole and shared else f"{shared}/{n}" if shared else str(whole)
    memory = {
        "parameters": each * weight / (n if zero == 3 else 1),
        "gradients": each * gradient / (n if zero >= 2 else 1),
        "optimizer": each * state / (n if zero else 1),
    }
    said: tuple[str, ...] = ()
    if (n := (layout.data or 1) * layout.context) > 2 and layout.shard == 1 and n & (n - 1) == 0:
        said = (
            f"On CPU {n} replicas add their gradients in a binary tree, for equal bits: it sends {n.bit_length() - 1} times the "
            f"gradients, a ring {2 * (n - 1) / n:g} times.",
        )
    return Theory(_sent(run, plan, each), memory, formula, said)


def _sent(run: Run, plan: Plan, each: float) -> dict[str, float]:
    layout, model, times = plan.layout, run.model, plan.accumulation
    wire, number = 2 if run.precision.reduce == "bf16" else 4, 4 if plan.compute == "fp32" else 2
    tokens = plan.micro_batch * run.train.sequence_length // layout.context
    replicas = (layout.data or 1) * layout.context if run.optimizer.sync_every == 1 else 1
    found = {}
    if replicas > 1:
        found["data"] = 2 * _most(replicas) * each / layout.shard * wire
    if layout.shard > 1:  # ZeRO-3 gathers for the forward and again for the backward, as long as nothing is kept between them
        gathers = (2 * times if layout.zero == 3 else 1) * number
        found["shard"] = _most(layout.shard) * each * (gathers + (1 if layout.zero == 1 else times) * wire)
    if layout.tensor > 1:
        # A sum after attention and feed-forward, and in the backward before them; one after the embedding and one before the head.
        sums = (4 * model.layers + 2) / layout.pipeline
        found["tensor"] = sums * times * 2 * _most(layout.tensor) * tokens * model.dim * number
    if layout.context > 1:
        found["context"] = model.layers / layout.pipeline * times * tokens * _context(run, number)
    if layout.pipeline > 1:  # the mean rank; the residual stream is in fp32 whatever is computed in
        boundaries = layout.pipeline * layout.stages_per_rank - 1
        slices = layout.tensor if layout.sequence else 1  # a tensor rank then sends its slice of the sequence
        found["pipeline"] = 2 * boundaries / layout.pipeline * times * tokens / slices * model.dim * 4
    if model.moe is not None and layout.expert > 1:  # there and back, forward and backward
        rows = (model.layers - model.dense_layers) / layout.pipeline * times * tokens / layout.tensor * model.moe.active
        found["expert"] = 4 * _most(layout.expert) * rows * model.dim * number
    return found


def _most(ranks: int) -> float:
    """What does not stay on a rank."""
    return (ranks - 1) / ranks


def _context(run: Run, number: int) -> float:
    """Bytes of one token in one layer, forward and backward; the gradients of keys and values travel in fp32."""
    layout, model, mla = run.layout, run.model, run.model.mla
    n, queries = layout.context, model.heads / layout.tensor
    keys = queries if mla is not None else max(1.0, model.kv / layout.tensor)
    width = model.head if mla is None else mla.nope_dim + mla.rope_dim
    values = model.head if mla is None else mla.value_dim
    if layout.context_method == "ulysses":
        return 2 * _most(n) * number * (queries + keys) * (width + values)
    back = n if layout.context_method == "ring" else n - 1  # round the ring, gradients also come home
    return keys * (width + values) * (2 * (n - 1) * number + back * 4)
