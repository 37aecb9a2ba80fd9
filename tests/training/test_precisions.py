"""Number formats in whole runs: fp16's loss scale, on which all ranks agree, and what few bits cost after many steps."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from ranks import copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor, nn

from phalanx.events.records import Step, StepSkipped
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer

UNTIED = ("precision.compute=fp16", "precision.loss_scale=1024", "model.layers=4", "model.tied=false", "train.micro_batch=1")
PLANTED = (1, 3)
"""Steps done before those whose gradient is made to overflow."""

LAYOUTS = {
    "tensor × pipeline": (Layout(data=1, tensor=2, pipeline=2), ()),
    "pipeline zbv × zero 2": (Layout(data=1, pipeline=2, schedule="zbv", shard=2, zero=2), ()),
    "zero 3 × tensor": (Layout(data=1, shard=2, tensor=2), ()),
    "replicas by themselves": (Layout(data=2), ("optimizer.sync_every=3",)),
}


class Overflow:
    """In the backward of the embedding of one rank: the gradient of its one parameter there, and of no other."""

    def __init__(self, trainer: Trainer):
        self.fired = 0
        self._trainer = trainer
        for part in trainer.sharded.parts:
            embed = getattr(part, "embed", None)
            if trainer.mesh.rank == 0 and isinstance(embed, nn.Module):
                embed.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, given: Any, output: Tensor) -> None:
        if output.requires_grad and self._trainer.progress.step in PLANTED:
            output.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> Tensor:
        self.fired += 1
        return gradient * torch.inf


def taken(trainer: Trainer, count: int) -> list[tuple[str, float, int]]:
    """What became of each step, and the scale after it; a skipped one has changed nothing."""
    found = []
    for _ in range(count):
        before = copied(trainer.tensors())
        step = trainer.step()
        assert isinstance(step, Step | StepSkipped)
        changed = differing(before, copied(trainer.tensors()))
        assert bool(changed) == isinstance(step, Step), "a skipped step has changed something, or a good one nothing"
        what = float.hex(step.loss) if isinstance(step, Step) else "skipped"
        found.append((what, trainer.stepper.scale.value, trainer.stepper.scale.good_steps))
    return found


def with_overflows(mesh: Mesh, run: Run, folder: Path) -> dict[str, Any]:
    first = tiny_trainer(mesh, run, folder)
    planted = Overflow(first)
    steps = taken(first, 5)
    first.save()
    straight = taken(first, 1)
    second = tiny_trainer(mesh, run, folder)
    second.restore()
    resumed = taken(second, 1)
    first.close()
    second.close()
    return {"fired": planted.fired, "steps": steps, "straight": straight, "resumed": resumed}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("tensor × pipeline", "zero 3 × tensor") else name
        for name in LAYOUTS
    ],
)
def test_all_ranks_skip_an_overflow_of_one_rank_and_keep_one_loss_scale(name: str, tmp_path: Path) -> None:
    layout, more = LAYOUTS[name]
    found = run_ranks(with_overflows, layout.ranks, tiny_run(*UNTIED, *more), tmp_path / "checkpoints", layout=layout)
    assert found[0].pop("fired") > 0 and all(other.pop("fired") == 0 for other in found[1:])
    assert all(other == found[0] for other in found[1:])
    steps = found[0]["steps"]
    assert [what == "skipped" for what, _, _ in steps] == [False, True, False, True, False]
    assert [(scale, good) for _, scale, good in steps] == [(1024, 1), (512, 0), (512, 1), (256, 0), (256, 1)]
    assert found[0]["resumed"] == found[0]["straight"]
    assert found[0]["resumed"][0][1:] == (256, 2)


def from_too_high(mesh: Mesh, run: Run, folder: Path) -> list[tuple[str, float, int]]:
    trainer = tiny_trainer(mesh, run, folder)
    found = taken(trainer, 12)
    trainer.close()
    return found


@pytest.mark.slow
def test_a_high_loss_scale_falls_alike_on_all_ranks(tmp_path: Path) -> None:
    """No step is harmed by it: where the scale fits at last, losses fall."""
    run = tiny_run(*UNTIED, "precision.loss_scale=16777216", "train.steps=12")
    layout = Layout(data=1, tensor=2, pipeline=2)
    first, *others = run_ranks(from_too_high, 4, run, tmp_path / "checkpoints", layout=layout)
    assert all(other == first for other in others)
    skipped = [what for what, _, _ in first].index(next(what for what, _, _ in first if what != "skipped"))
    assert skipped > 0
    assert [scale for _, scale, _ in first] == [2.0 ** (24 - min(n, skipped)) for n in range(1, 13)]
    assert [what == "skipped" for what, _, _ in first] == [n < skipped for n in range(12)]


# --- many steps -----------------------------------------------------------------------------------------------------

MANY = """
[model]
preset = "tiny-dense"
[data]
source = "stdlib"
[layout]
data = 1
tensor = 2
pipeline = 2
[train]
batch = 8
sequence_length = 64
micro_batch = 2
steps = 200
eval_sequences = 32
[optimizer]
learning_rate = 3e-3
warmup_steps = 20
[cluster]
device = "cpu"
threads = 1
"""
FORMATS = {
    "bf16": ("precision.compute=bf16",),
    "fp16": ("precision.compute=fp16",),
    "fp8 tensor": ("precision.compute=fp8",),
    "fp8 row": ("precision.compute=fp8", "precision.fp8_scaling=row"),
}


def curve(mesh: Mesh, run: Run, folder: Path) -> tuple[list[float], float]:
    """The loss of every step and of held-out text after the last; no step is skipped."""
    trainer = tiny_trainer(mesh, run, folder)
    losses = []
    while not trainer.finished:
        step = trainer.step()
        assert isinstance(step, Step)
        losses.append(step.loss)
    held_out = trainer.evaluate()
    assert held_out is not None
    trainer.close()
    return losses, held_out.loss


@pytest.mark.slow
def test_every_precision_trains_as_far_as_fp32(tmp_path: Path) -> None:
    """Within 2 %: all steps together, the last twenty, and text that was not trained on."""

    def trained(*overrides: str) -> tuple[list[float], float]:
        run = loads(MANY, overrides=overrides)
        return run_ranks(curve, 4, run, tmp_path / "checkpoints", layout=run.layout, timeout=500.0)[0]

    losses, held_out = trained("precision.compute=fp32")
    assert fmean(losses[-20:]) < 0.6 * losses[0]
    for name, overrides in FORMATS.items():
        others, other_held_out = trained(*overrides)
        apart = {
            "all steps": fmean(others) / fmean(losses) - 1,
            "last twenty": fmean(others[-20:]) / fmean(losses[-20:]) - 1,
            "held out": other_held_out / held_out - 1,
        }
        print(name, {key: f"{value:+.4%}" for key, value in apart.items()})
        assert others != losses, f"{name} is fp32 under another name"
        assert all(abs(value) < 0.02 for value in apart.values()), (name, apart)
