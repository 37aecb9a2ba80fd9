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


@contextmanager
def devices() -> Iterator[PoolProcess]:
    """A process with virtual devices: `alone(function, …)` calls `function(mesh, …)` there."""
    with PoolProcess(1, timeout=1800.0) as pool:
        yield pool


def small_run(layout: Layout, steps: int, *, compute: Any = "fp32", model: ModelSpec | None = None) -> Run:
    small = ModelSpec(dim=24, layers=1, heads=4, kv_heads=2, ffn=24, vocab=257, context=16, init_std=0.1)
    return Run(
        model=model or small,
        layout=layout,
        engine=Engine(name="xla"),
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
    )


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    digests: list[str]
    evaluated: float
    files: list[str]


def train(mesh: Mesh, run: Run, folder: Path, until: int) -> Trained:
    """Restores the newest checkpoint of a run directory, trains to a step with the run's engine, evaluates and saves."""
    trainer: Any
    if run.engine.name == "xla":
        use_virtual_devices(DEVICES)
        from phalanx.xla.xla_trainer import XlaTrainer

        trainer = XlaTrainer(run, plan_of(run), folder / "checkpoints")
    else:
        from phalanx.training.trainer import Trainer

        trainer = Trainer(run, plan_of(run), mesh, folder / "checkpoints")
    trainer.build()
    trainer.restore()
    steps: list[Step] = []
    while trainer.progress.step < until:
        steps.append(trainer.step())
    evaluated = trainer.evaluate()
    saved = trainer.save()
    trainer.close()
    files = sorted(path.name for path in Path(saved.path).glob("*.safetensors"))
    return Trained([step.loss for step in steps], [step.batch_digest for step in steps], evaluated.loss, files)


@dataclass(frozen=True)
class Program:
    """What the compiler made of a step."""

    flops: float
    arguments: int
    donated: int


def compiled(mesh: Mesh, run: Run, folder: Path) -> Program:
    """Compiles the step of a run and takes it once."""
    use_virtual_devices(DEVICES)
    from phalanx.xla.xla_trainer import XlaTrainer

    trainer = XlaTrainer(run, plan_of(run), folder / "checkpoints")
    trainer.build()
    trainer.step()
    step = trainer.compiled
    trainer.close()
    return Program(step.flops, step.argument_bytes, step.donated_bytes)


def lowered(run: Run) -> Any:
    """The step of a run for arguments of the right shapes and places, without their values."""
    import jax

    from phalanx.xla.abstract_step import abstract_arguments
    from phalanx.xla.forward import traced_model
    from phalanx.xla.train_step import make_step

    model, plan = traced_model(run, plan_of(run)), plan_of(run)
    with jax.set_mesh(model.mesh):
        return make_step(model, run).lower(*abstract_arguments(model, run, plan))


def products(mesh: Mesh, run: Run) -> dict[str, int]:
    """How many products of a step have operands of which formats, before anything is compiled."""
    use_virtual_devices(DEVICES)
    operands = re.findall(r"(?:dot_general|ragged_dot).*?: \(tensor<([^>]*)>, tensor<([^>]*)>", lowered(run).as_text())
    return dict(Counter(" ".join(lengths.rpartition("x")[2] for lengths in pair) for pair in operands))


def compile_without_constraint(mesh: Mesh, run: Run) -> None:
    """Compiles a step whose look-ups in the embedding say nothing about places: a planted mistake."""
    use_virtual_devices(DEVICES)
    plant_missing_constraint()
    lowered(run).compile()


def plant_missing_constraint() -> None:
    """From now on, look-ups in the embedding say nothing about places."""
    import jax.numpy as jnp

    from phalanx.xla import model_seams
    from phalanx.xla.bridge import call_jax

    def look_up(module: Any, mesh: Any, keep: Any, tokens: Any) -> Any:
        return call_jax(lambda table, rows: jnp.take(table, rows, axis=0), module.weight, tokens)

    model_seams._look_up = look_up


@dataclass(frozen=True)
class Bridged:
    refusal: str
    gradients: list[float]
    """Of a value and of the loss that is attached to it."""
    products: list[str]
    """Formats of a linear layer's result with and without autocast, and of one inside that asks for full precision."""


def bridge(mesh: Mesh) -> Bridged:
    """Small modules through the bridge; nothing is compiled for several devices."""
    use_virtual_devices(DEVICES)
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    from phalanx.models.moe import AttachLoss, ZeroUnusedGradients
    from phalanx.spec.errors import RunFailed
    from phalanx.xla.bridge import call_module, full_precision

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
            with full_precision():
                exact = self.inner(x)
            return torch.cat((self.inner(x), self.inner(x))), exact  # type: ignore[return-value]

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
        both, exact = call_module(Linear(), weights, (jnp.ones((1, 2)),), products)[0]
        formats += [str(both.dtype), str(exact.dtype)]
    return Bridged(refusal, [float(gradient) for gradient in gradients], formats)
