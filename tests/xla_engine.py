"""Tests of the XLA engine: the mark of those that need its extra, and functions for a process in which the CPU stands for several devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpointing.replicas import replica_index
from phalanx.checkpointing.replicas.memory_checkpoint import MemoryCopies
from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.events.frames import Address
from phalanx.events.records import Step
from phalanx.host.env import use_virtual_devices
from phalanx.parallel.mesh import Mesh
from phalanx.spec.engine import Engine
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Plan
from phalanx.spec.run import Checkpoint, Data, Optimizer, Precision, Run, Train
from phalanx.verification.cases import random_documents
from phalanx.verification.pool_process import PoolProcess

needs_xla = pytest.mark.skipif(
    find_spec("jax") is None or find_spec("torchax") is None, reason="the XLA engine needs the extra `xla`"
)
DEVICES = 8
SMALL = ModelSpec(dim=24, layers=1, heads=4, kv_heads=2, ffn=24, vocab=257, context=16, init_std=0.1)


@contextmanager
def devices() -> Iterator[PoolProcess]:
    """A process with virtual devices: `alone(function, …)` calls `function(mesh, …)` there."""
    with PoolProcess(1, timeout=1800.0) as pool:
        yield pool


def train_together(run: Run, folder: Path, until: int) -> Trained:
    """As `train`, with the processes that the run asks for; what rank 0 has seen."""
    processes = plan_of(run).processes
    with PoolProcess(processes, timeout=1800.0) as pool:
        trained: list[Trained] = pool.run(train, Layout(data=processes), run, folder, until)
    assert all(other.losses == trained[0].losses and other.digests == trained[0].digests for other in trained)
    return trained[0]


def small_run(
    layout: Layout, steps: int, *, compute: Any = "fp32", model: ModelSpec | None = None, each: int | None = None
) -> Run:
    """`each`: devices of each process; None: one process for all."""
    return Run(
        model=model or SMALL,
        layout=layout,
        engine=Engine(name="xla", devices_per_process=each),
        train=Train(batch=8, sequence_length=16, steps=steps, micro_batch=1),
        optimizer=Optimizer(learning_rate=1e-3, schedule="constant", eps=1e-4),
        precision=Precision(compute=compute),
        checkpoint=Checkpoint(keep_last=9),
        data=Data(source="memory", documents=random_documents(0), eval_fraction=0.1),
    )


def on_torch(run: Run) -> Run:
    return replace(run, engine=Engine())


def plan_of(run: Run) -> Plan:
    layout = replace(run.layout, data=run.layout.data or 1)
    each = run.engine.devices_per_process or layout.ranks
    accumulation = run.batch // layout.replicas
    return Plan(
        layout=layout,
        device="cpu",
        threads=1,
        micro_batch=1,
        accumulation=accumulation,
        compute=run.precision.compute or "fp32",
        parameters=1,
        flops_per_token=1.0,
        peak_flops=None,
        devices_per_process=each if run.engine.name == "xla" else 1,
    )


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    digests: list[str]
    evaluated: float | None
    """None: the run was not trained to its end."""
    files: list[str]


def train(mesh: Mesh, run: Run, folder: Path, until: int) -> Trained:
    """Restores the newest checkpoint of a run directory, trains to a step with the run's engine and saves; evaluates at the end of the run."""
    trainer: Any
    if run.engine.name == "xla":
        use_virtual_devices(run.engine.devices_per_process or DEVICES)
        from phalanx.xla.join_processes import join
        from phalanx.xla.xla_trainer import XlaTrainer

        join(mesh, plan_of(run))
        trainer = XlaTrainer(run, plan_of(run), folder / "checkpoints", processes=mesh)
    else:
        from phalanx.training.trainer import Trainer

        trainer = Trainer(run, plan_of(run), mesh, folder / "checkpoints")
    trainer.build()
    trainer.restore()
    steps: list[Step] = []
    while trainer.progress.step < until:
        steps.append(trainer.step())
    evaluated = trainer.evaluate() if trainer.finished else None
    saved = trainer.save()
    trainer.close()
    files = sorted(path.name for path in Path(saved.path).glob("*.safetensors"))
    return Trained([step.loss for step in steps], [step.batch_digest for step in steps], evaluated and evaluated.loss, files)


@dataclass(frozen=True)
class ThroughMemory:
    """What has become of a state that was copied into memory and read again."""

    wrong: list[str]
    """Arrays that have other values."""
    files: int
    bytes: int
    whole: int
    """Bytes of all arrays, each once."""


def through_memory(mesh: Mesh, run: Run, other: Run, folder: Path, server: Address, token: str) -> ThroughMemory:
    """Copies the state of a run into memory, loses its arrays, and restores the copy on the layout of another run."""
    use_virtual_devices(DEVICES)
    import jax
    import numpy as np

    from phalanx.xla.device_state import named_arrays
    from phalanx.xla.xla_trainer import XlaTrainer

    dice = np.random.default_rng(7)
    trainers = [XlaTrainer(each, plan_of(each), folder / "checkpoints") for each in (run, other)]
    for trainer in trainers:
        trainer.build()
    before, after = trainers
    # Every moment differs from every other, in numbers that bf16 has.
    before.state = jax.tree.map(
        lambda array: jax.device_put(dice.integers(-200, 200, array.shape).astype(array.dtype), array.sharding), before.state
    )
    expected = {name: np.array(array) for name, array in named_arrays(before.state).items()}
    copies = MemoryCopies(mesh, folder)
    copies.take(3, before.tensors(), before.checkpointer.metadata(before.progress))
    copies.release()
    jax.tree.map(lambda array: array.delete(), before.state)
    copies.settle()
    copies.close()
    (state,) = replica_index.complete_states([server], token)
    after.restore(MemoryLocation(state, token))
    found = named_arrays(after.state)
    wrong = [name for name, values in expected.items() if not np.array_equal(values, np.array(found[name]))]
    size = sum(replicas[0].copy.sidecar.tensors for replicas in state.replicas)
    return ThroughMemory(wrong, len(state.rank_files), size, sum(values.nbytes for values in expected.values()))


@dataclass(frozen=True)
class Program:
    """What the compiler made of a step."""

    flops: float
    arguments: int
    donated: int
    batch: int
    """Bytes of the arguments that are no state."""


UNUSED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""What LLVM makes of a program that is only looked at takes most of the time."""


def programs(mesh: Mesh, runs: list[Run]) -> list[Program]:
    """Compiles the steps of runs, which are not taken."""
    use_virtual_devices(DEVICES)
    return [_program(run) for run in runs]


def _program(run: Run) -> Program:
    from phalanx.xla.program_text import read_program

    compiled = lowered(run).compile(UNUSED)
    memory, layout = compiled.memory_analysis(), run.layout
    tokens = 4 * 4 * run.batch_tokens // layout.replicas // layout.context
    flops = read_program(compiled.as_text(), layout.ranks).flops
    return Program(flops, memory.argument_size_in_bytes, memory.alias_size_in_bytes, tokens + 3 * 4)


def lowered(run: Run, platform: str | None = None) -> Any:
    """The step of a run for arguments of the right shapes and places, without their values, for this platform or another one."""
    import jax

    from phalanx.xla.abstract_step import abstract_arguments
    from phalanx.xla.forward import traced_model
    from phalanx.xla.train_step import make_step

    model, plan = traced_model(run, plan_of(run), platform), plan_of(run)
    with jax.set_mesh(model.mesh):
        step = make_step(model, run).trace(*abstract_arguments(model, run, plan))
        return step.lower(lowering_platforms=None if platform is None else (platform,))


def formats_of_sums(mesh: Mesh, run: Run, folder: str) -> set[str]:
    """Formats in which devices add up arrays, as the compiler divides the step. Afterwards CPUs widen those that they cannot add."""
    use_virtual_devices(DEVICES)
    lowered(run).compile(
        {**UNUSED, "xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
    )
    (divided,) = Path(folder).glob("*after_spmd-partitioning*")
    return set(re.findall(r"= (\w+)\[\d[^ ]* all-reduce\(", divided.read_text()))


def products(mesh: Mesh, run: Run, platform: str | None = None) -> dict[str, int]:
    """How many products of a step have operands of which formats, before anything is compiled, for this platform or another one."""
    use_virtual_devices(DEVICES)
    if platform is not None:
        assume_cudnn()
    text = lowered(run, platform).as_text()
    operands = re.findall(r"(?:dot_general|ragged_dot).*?: \(tensor<([^>]*)>, tensor<([^>]*)>", text)
    return dict(Counter(" ".join(lengths.rpartition("x")[2] for lengths in pair) for pair in operands))


def assume_cudnn() -> None:
    """There is none here to ask for its version, and nothing is compiled or run."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_cudnn_version = lambda: 91000


def kernels(mesh: Mesh, run: Run, platform: str) -> dict[str, int]:
    """Attention kernels by name in the step of a run, lowered for another platform."""
    use_virtual_devices(DEVICES)
    assume_cudnn()
    text = lowered(run, platform).as_text()
    found = re.findall(r'@__cudnn\$(\w+)|kernel_name = "splash_[a-z]+_([a-z]+)_', text)
    return dict(Counter(cudnns or splash for cudnns, splash in found))


def programs_without_constraint(mesh: Mesh, run: Run) -> list[Program]:
    """Compiles a step whose parameters stay divided while they compute: a planted mistake."""
    use_virtual_devices(DEVICES)
    plant_missing_constraint()
    return [_program(run)]


def plant_missing_constraint() -> None:
    """From now on, parameters stay divided while they compute."""
    from phalanx.xla import forward, model_seams

    forward.gathered = model_seams.gathered = list


def programs_with_undivided_experts(mesh: Mesh, run: Run) -> list[Program]:
    """Compiles a step in which every device computes the experts of all tokens of the batch: a planted mistake."""
    use_virtual_devices(DEVICES)
    from jax.sharding import PartitionSpec as P

    from phalanx.xla import moe_layer

    moe_layer.spec = lambda *dims: P()  # every device has all tokens
    return [_program(run)]


def compare_without_a_backward(mesh: Mesh, case: Any, reference: Any) -> Any:
    """`compare_devices` with an engine that differentiates the forward of the balancing loss, which is the identity: a planted mistake."""
    use_virtual_devices(case.layout.ranks)
    from phalanx.verification.xla_devices import compare_devices
    from phalanx.xla import bridge

    bridge.MAPPED = {function: lambda x, loss, scale: x for function in bridge.MAPPED}
    return compare_devices(mesh, case, reference)


@dataclass(frozen=True)
class Bridged:
    refusal: str
    gradients: list[float]
    """Of a value and of the loss that is attached to it."""
    products: list[str]
    """Formats of a linear layer's result with and without autocast."""


def bridge(mesh: Mesh) -> Bridged:
    """Small modules through the bridge; nothing is compiled for several devices."""
    use_virtual_devices(DEVICES)
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    from phalanx.models.moe import AttachLoss, ZeroUnusedGradients
    from phalanx.spec.errors import RunFailed
    from phalanx.xla.bridge import call_module

    class Unmapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ZeroUnusedGradients.apply(x, x)

    class Attached(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return AttachLoss.apply(x, y * y, 0.5).sum()

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((self.inner(x), self.inner(x)))

    refusal = ""
    try:
        call_module(Unmapped(), {}, (jnp.ones(2),), None)
    except RunFailed as refused:
        refusal = str(refused)
    gradients = jax.grad(lambda x, y: call_module(Attached(), {}, (x, y), None)[0], argnums=(0, 1))(
        jnp.ones(()), jnp.float32(3)
    )
    weights = {"inner.weight": jnp.ones((2, 2)), "inner.bias": jnp.ones(2)}
    formats = []
    for products in (torch.bfloat16, None):
        formats.append(str(call_module(Linear(), weights, (jnp.ones((1, 2)),), products)[0].dtype))
    return Bridged(refusal, [float(gradient) for gradient in gradients], formats)
