"""Communication and memory of one step on one rank, measured and in theory. `verification/parity` measures, `phalanx verify
--account` prints."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from phalanx.observe.counters import MemoryCounter, Sent, TrafficCounter
from phalanx.parallel.data_parallel import storage_bytes
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RankAccount:
    """Communication and memory of one rank."""

    sent: Sent
    """Bytes sent in one step, by technique and collective."""
    memory: dict[str, int]
    """Bytes of parameters, gradients, optimizer and activations."""


@dataclass(frozen=True, slots=True)
class Theory:
    """Communication and memory of a rank by the formulas of each technique."""

    sent: dict[str, float]
    """Bytes sent in one step, by technique with a known formula."""
    memory: dict[str, float]
    per_parameter: str
    """Bytes of state per parameter, as a formula in the number of ranks that shard it."""
    notes: tuple[str, ...] = ()
    """Notes on measured differences."""


def measure_step(trainer: Trainer) -> RankAccount:
    """Measures the trainer's next step. The first steps also allocate persistent state: measure a later one."""
    known = list(chain(*_persistent_tensors(trainer).values()))  # kept, so that no storage is reused in the step
    with MemoryCounter(known, trainer.mesh.device) as live, TrafficCounter() as traffic:
        trainer.step()
    memory = {name: storage_bytes(tensors) for name, tensors in _persistent_tensors(trainer).items()}
    return RankAccount(traffic.sent, memory | {"activations": live.peak})


def _persistent_tensors(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Tensors that persist between steps: parameters, gradients, and optimizer state with its master weights."""
    owned = trainer.sharded.owned
    own = [parameter for part in trainer.sharded.parts for parameter in part.parameters()]
    parameters = [_local(parameter) for parameter in own]
    gradients = [_local(parameter.grad) for parameter in own if parameter.grad is not None]
    gradients += [param.gradient for param in owned if param.gradient is not None]
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    masters = [param.value for param in owned if param.value.untyped_storage().data_ptr() not in seen]
    states = [value for value in trainer.optimizer.state().values() if isinstance(value, Tensor) and value.ndim]
    return {"parameters": parameters, "gradients": gradients, "optimizer": masters + states}


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def theory(run: Run, plan: Plan) -> Theory:
    """The theory for the mean rank: tensor and pipeline ranks shard parameters evenly."""
    layout = plan.layout
    each = plan.parameters / (layout.tensor * layout.pipeline)
    n, zero = layout.shard, layout.zero if layout.shard > 1 else 0
    # In ZeRO-1 and 2 the model computes in a 2-byte copy, and the optimizer has the master weights.
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
    notes: tuple[str, ...] = ()
    if (n := (layout.data or 1) * layout.context) > 2 and layout.shard == 1 and n & (n - 1) == 0:
        notes = (
            f"On CPU {n} replicas add their gradients in a binary tree, for bitwise equality: it sends {n.bit_length() - 1} times the "
            f"gradients, a ring {2 * (n - 1) / n:g} times.",
        )
    return Theory(_sent(run, plan, each), memory, formula, notes)


def _sent(run: Run, plan: Plan, each: float) -> dict[str, float]:
    layout, model, times = plan.layout, run.model, plan.accumulation
    wire, number = 2 if run.precision.reduce == "bf16" else 4, 4 if plan.compute == "fp32" else 2
    tokens = plan.micro_batch * run.train.sequence_length // layout.context
    replicas = (layout.data or 1) * layout.context if run.optimizer.sync_every == 1 else 1
    sent = {}
    if replicas > 1:
        sent["data"] = 2 * _remote_part(replicas) * each / layout.shard * wire
    if layout.shard > 1:  # ZeRO-3 gathers for the forward and again for the backward, as nothing is cached between them
        gathers = (2 * times if layout.zero == 3 else 1) * number
        bytes_ = each * (gathers + (1 if layout.zero == 1 else times) * wire)
        if run.precision.fp8_gather and layout.zero == 3 and model.is_builtin:
            bytes_ -= 2 * times * _linear_in_fp8(run) / (layout.tensor * layout.pipeline)
        sent["shard"] = _remote_part(layout.shard) * bytes_
    if layout.tensor > 1:
        # A sum after attention and feed-forward, and in the backward before them; one after the embedding and one before the head.
        sums = (4 * model.layers + 2) / layout.pipeline
        sent["tensor"] = sums * times * 2 * _remote_part(layout.tensor) * tokens * model.dim * number
    if layout.context > 1:
        sent["context"] = model.layers / layout.pipeline * times * tokens * _context(run, number)
    if layout.pipeline > 1:  # the mean rank; the residual stream of CPUs is in fp32
        boundaries = layout.pipeline * layout.stages_per_rank - 1
        slices = layout.tensor if layout.sequence else 1  # a tensor rank then sends its slice of the sequence
        sent["pipeline"] = 2 * boundaries / layout.pipeline * times * tokens / slices * model.dim * 4
    if model.moe is not None and layout.expert > 1:  # there and back, forward and backward
        rows = (model.layers - model.dense_layers) / layout.pipeline * times * tokens / layout.tensor * model.moe.active
        sent["expert"] = 4 * _remote_part(layout.expert) * rows * model.dim * number
    return sent


def _linear_in_fp8(run: Run) -> float:
    """Parameters of the linear layers that compute in fp8."""
    model, sparse = run.model, run.model.layers - run.model.dense_layers
    shared = model.moe.shared * model.moe.ffn if model.moe is not None else 0
    matrices = model.layers * model.attention_matrices() + model.dim * (
        (2 + model.gated) * model.dense_layers * model.hidden + 3 * sparse * shared
    )
    return matrices if run.fp8_blocks is None else matrices * len(run.fp8_blocks) / model.layers


def _remote_part(ranks: int) -> float:
    """The part of a collective that does not stay on a rank."""
    return (ranks - 1) / ranks


def _context(run: Run, number: int) -> float:
    """Bytes per token and layer, forward and backward; gradients of keys and values are sent in fp32."""
    layout, model, mla = run.layout, run.model, run.model.mla
    n, queries = layout.context, model.heads / layout.tensor
    keys = queries if mla is not None else max(1.0, model.kv / layout.tensor)
    width = model.head if mla is None else mla.nope_dim + mla.rope_dim
    values = model.head if mla is None else mla.value_dim
    if layout.context_method == "ulysses":
        return 2 * _remote_part(n) * number * (queries + keys) * (width + values)
    back = n if layout.context_method == "ring" else n - 1  # in a ring, gradients also return to their rank
    return keys * (width + values) * (2 * (n - 1) * number + back * 4)
