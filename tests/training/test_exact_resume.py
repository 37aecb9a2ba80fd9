"""Twenty steps, a save, new processes and twenty more are forty steps, bit for bit: losses, parameters and optimizer states, on
every kind of layout. A few of them, with fewer steps, are proven at each run of the tests; all of them in the slow suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from ranks import copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.events.records import Step
from phalanx.parallel.mesh import Mesh
from phalanx.spec.check import check
from phalanx.spec.layout import Layout, Schedule
from phalanx.spec.run import Run
from phalanx.verification.cases import MODELS

Row = tuple[str, dict[str, Any], tuple[str, ...]]
NVME = ("memory.offload=nvme", "memory.offload_buffer=1")
ROWS: dict[str, Row] = {
    "one rank": ("dense", {}, ()),
    "replicas": ("gpt", {"data": 2}, ()),
    "zero-1": ("dense", {"shard": 2, "zero": 1}, ()),
    "zero-2, hybrid": ("dense", {"data": 2, "shard": 2, "zero": 2}, ()),
    "zero-3": ("gpt", {"shard": 2, "zero": 3}, ()),
    "zero-3 of four": ("moe", {"shard": 4, "zero": 3}, ()),
    "tensor": ("mla-dense", {"tensor": 2}, ()),
    "tensor + sequence": ("dense", {"tensor": 2, "sequence": True}, ()),
    "tensor × zero-3": ("dense", {"tensor": 2, "shard": 2}, ()),
    **{
        f"context, {method}": ("dense", {"context": 2, "context_method": method}, ())
        for method in ("ring", "gather", "ulysses")
    },
    **{f"pipeline, {one}": ("dense", {"pipeline": 2, "schedule": one}, ()) for one in get_args(Schedule)},
    "pipeline, tied × zero-1": ("gpt", {"pipeline": 2, "shard": 2, "zero": 1}, ()),
    "pipeline, experts": ("mla", {"pipeline": 2, "schedule": "zbv"}, ()),
    "experts": ("moe", {"data": 2, "expert": 2}, ()),
    "experts, cut": ("mla", {"data": 2, "shard": 2, "expert": 2, "expert_tensor": 2}, ()),
    "states on the host": ("dense", {"shard": 2}, ("memory.offload=cpu",)),
    "states in files": ("dense", {"shard": 2, "tensor": 2}, NVME),
    "states in files, pipeline": ("gpt", {"pipeline": 2}, NVME),
    "short states": ("dense", {"shard": 2}, ("precision.optimizer=bf16",)),
    "muon": ("dense", {"shard": 2, "tensor": 2}, ("optimizer.name=muon",)),
    "muon, pipeline": ("moe", {"pipeline": 2, "data": 2}, ("optimizer.name=muon",)),
    "adapters": ("dense", {"shard": 2, "tensor": 2}, ("lora.rank=3",)),
    "adapters of experts, pipeline": (
        "moe",
        {"pipeline": 2, "data": 2, "expert": 2},
        ("lora.rank=3", 'lora.targets=["query", "down"]'),
    ),
    "adapters, local steps": ("dense", {"data": 2}, ("lora.rank=3", "optimizer.sync_every=3")),
    "local steps": ("dense", {"data": 2}, ("optimizer.sync_every=3",)),  # twenty steps end amid a round
    "local steps × zero-3": ("moe", {"data": 2, "shard": 2}, ("optimizer.sync_every=7",)),
    "local steps, states in files": ("dense", {"data": 2}, ("optimizer.sync_every=3", *NVME)),
}
QUICK = ["pipeline, zbv", "experts", "states in files, pipeline", "local steps", "adapters"]


def run_of(row: Row, steps: int, compute: str) -> Run:
    model, layout, overrides = row
    run = tiny_run(f"train.steps={steps}", "train.sequence_length=24", *overrides)
    precision = replace(run.precision, compute=compute)
    run = replace(run, model=MODELS[model], layout=Layout(**{"data": 1} | layout), precision=precision)
    assert not check(run)
    return run


def train(mesh: Mesh, run: Run, folder: Path, steps: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Go on from what is there by that many steps, and save. What all of them said, and all that this rank holds then."""
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    trainer.restore()
    taken = [trainer.step() for _ in range(steps)]
    held = copied(trainer.tensors())
    trainer.save()
    trainer.close()
    return [(e.step, e.loss, e.grad_norm, e.batch_digest) if isinstance(e, Step) else e for e in taken], held


def prove(name: str, compute: str, steps: int, folder: Path) -> None:
    run = run_of(ROWS[name], steps, compute)
    ranks, layout, half = run.layout.ranks, run.layout, steps // 2
    whole = run_ranks(train, ranks, run, folder / "whole", steps, layout=layout, timeout=300)
    first = run_ranks(train, ranks, run, folder / "parts", half, layout=layout, timeout=300)
    second = run_ranks(train, ranks, run, folder / "parts", steps - half, layout=layout, timeout=300)  # in new processes
    for rank in range(ranks):
        taken = first[rank][0] + second[rank][0]
        assert len(taken) == steps and taken == whole[rank][0]
        assert differing(second[rank][1], whole[rank][1]) == []
        changed = differing(first[rank][1], whole[rank][1])
        assert len(changed) > len(whole[rank][1]) / 2, "something was learned in the second half"


@pytest.mark.parametrize("name", QUICK)
def test_some_layouts_resume_bit_for_bit(name: str, tmp_path: Path) -> None:
    prove(name, "fp32", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ROWS)
def test_every_layout_resumes_bit_for_bit(name: str, compute: str, tmp_path: Path) -> None:
    prove(name, compute, 40, tmp_path)


@pytest.mark.slow
def test_a_loss_scale_resumes_where_it_was(tmp_path: Path) -> None:
    """It begins far too high, so that the first steps overflow and are skipped; it is part of what is restored."""
    run = run_of(("dense", {"shard": 2}, ("precision.loss_scale=1e9", "resilience.max_skipped=40")), 40, "fp16")
    results = [run_ranks(train, 2, run, tmp_path / name, steps, layout=run.layout) for name, steps in (("whole", 40), ("parts", 20), ("parts", 20))]  # fmt: skip
    whole, first, second = (result[0] for result in results)
    skipped = [event for event in whole[0] if not isinstance(event, tuple)]
    assert 0 < len(skipped) < 20
    assert [(e.step, e.samples) for e in (*first[0], *second[0]) if not isinstance(e, tuple)] == [
        (e.step, e.samples) for e in skipped
    ]
    assert [e for e in (*first[0], *second[0]) if isinstance(e, tuple)] == [e for e in whole[0] if isinstance(e, tuple)]
    assert differing(second[1], whole[1]) == []
