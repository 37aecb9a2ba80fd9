"""What a rank is foreseen to hold is what a real one of that layout holds, and foreseeing takes neither memory nor other ranks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.training.build import dry_build_tensors

MOE = (
    "model.moe.experts=4",
    "model.moe.active=2",
    "model.moe.ffn=16",
    "model.moe.router=sigmoid",
)
FOUR = "model.layers=4"
CASES: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "replicas": (Layout(data=2), ()),
    "zero 1": (Layout(data=2, shard=2, zero=1), ("precision.compute=bf16",)),
    "zero 2": (Layout(data=1, shard=4, zero=2), ("model.tied=true",)),
    "zero 3": (Layout(data=2, shard=2, zero=3), ("precision.compute=bf16", "precision.optimizer=bf16")),
    "zero 3, more ranks than rows": (Layout(data=1, shard=3, zero=3, tensor=2), ("model.dim=16", "model.ffn=20")),
    "tensor, uneven keys": (Layout(data=1, tensor=4, sequence=True), ()),
    "pipeline, tied": (Layout(data=1, pipeline=2, shard=2, zero=1), (FOUR, "model.tied=true")),
    "pipeline, V": (Layout(data=1, pipeline=2, schedule="zbv", tensor=2), (FOUR, "model.tied=true")),
    "pipeline, V, zero 3": (Layout(data=1, pipeline=2, schedule="dualpipev", shard=2, zero=3), (FOUR,)),
    "pipeline, loops": (Layout(data=2, pipeline=2, schedule="interleaved-1f1b"), (FOUR,)),
    "experts": (Layout(data=4, expert=2, expert_tensor=2), MOE),
    "experts, zero 3": (Layout(data=1, shard=4, zero=3, expert=2), MOE),
    "experts, zero 1, tensor": (Layout(data=1, shard=2, zero=1, tensor=2, expert=2), MOE),
    "context, offloaded": (Layout(data=1, context=2, shard=2, zero=2), ("memory.offload=cpu",)),
    "states in files": (Layout(data=2), ("memory.offload=nvme",)),
    "muon": (Layout(data=1, shard=2, zero=3, tensor=2), ("optimizer.name=muon",)),
    "local steps": (Layout(data=2, shard=2, zero=1), ("optimizer.sync_every=2",)),
}


def told(pieces: dict[str, StateTensor]) -> dict[str, Any]:
    return {name: (one.tensor.dtype, one.slice, one.replicas) for name, one in pieces.items()}


def real(mesh: Mesh, run: Run, folder: Path) -> dict[str, Any]:
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    found = told(trainer.tensors())
    trainer.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_dry_build_gives_the_tensors_of_a_real_rank(case: str, tmp_path: Path) -> None:
    layout, settings = CASES[case]
    run = tiny_run(*settings)
    found = run_ranks(real, layout.ranks, run, tmp_path, layout=layout)
    for rank, expected in enumerate(found):
        assert list(expected) and told(dry_build_tensors(run, layout, rank)) == expected


def test_dry_build_of_a_single_process(tmp_path: Path) -> None:
    run = tiny_run()
    pieces = dry_build_tensors(run, Layout(), 0)
    assert told(pieces) == real(ALONE, run, tmp_path)
    assert all(isinstance(one.tensor, torch.Tensor) and one.tensor.is_meta for one in pieces.values())
    assert not dist.is_initialized()


def test_dry_build_of_a_rank_of_sixteen_thousand_takes_no_memory() -> None:
    sizes = ("dim=16384", "layers=126", "heads=128", "kv_heads=8", "ffn=53248", "vocab=128256", "tied=false")
    run = tiny_run(*(f"model.{size}" for size in sizes), "precision.compute=bf16")
    layout = Layout(pipeline=16, data=8, shard=16, tensor=8, zero=3)
    dry_build_tensors(run, Layout(), 0)  # what torch loads the first time is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces = dry_build_tensors(run, layout, 16_383)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB; the rank itself would have 2.4 GB
    assert pieces["model/head.weight"].slice.whole == (128256, 16384)
    # The last stage, tensor rank and part of the state: 1/8 of the head's rows, of which 1/16, and others hold the same 8 times.
    assert pieces["model/head.weight"].slice.offset == (128256 * 127 // 128, 0)
    assert pieces["model/head.weight"].slice.shape == (128256 // 128, 16384)
    assert pieces["model/head.weight"].replicas.index == 7 and pieces["model/head.weight"].replicas.count == 8


def test_dry_build_refuses_measured_stages() -> None:
    with pytest.raises(RunError, match=r"layout\.stage_split"):
        dry_build_tensors(tiny_run(FOUR), Layout(pipeline=2, stage_split="measured"), 1)
