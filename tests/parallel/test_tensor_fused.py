"""Tensor parallelism of fused matrices: of [q|k|v] and [gate|up], each rank has a part of every segment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fused_models
import pytest
from checkpoints import contents
from fused_models import FFN, HEADS, KV, WIDE
from ranks import differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.models.init import build
from phalanx.parallel import tensor
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool
from phalanx.worker.measure_process import measure

SPEC = ModelSpec(vocab=257, dim=24, layers=2, heads=HEADS, kv_heads=KV, init_std=0.1, module="fused_models:Fused", tied=False)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that measure the module, too."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def fused_run(*overrides: str, **layout: Any) -> Run:
    run = tiny_run(
        "train.sequence_length=16", "train.batch=4", "data.document_mask=false", "precision.compute=fp32", *overrides
    )
    return replace(run, model=SPEC, layout=Layout(**{"data": 1} | layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 2}, *({"tensor": 2, "shard": 2, "zero": zero} for zero in (1, 2, 3))])
def test_fused_matrices_train_as_on_one_device(layout: dict[str, Any]) -> None:
    report = verify(fused_run(**layout), steps=2, pool=RankPool)
    assert report.passed, (report.failure, report.checks)


def steps(mesh: Mesh, run: Run, folder: Path, start: Path | None) -> tuple[list[float], dict[str, int]]:
    """Restores, saves what it restored under another name, and takes two steps; losses, and boxes of each parameter."""
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    if start is not None:
        trainer.restore(start)
        trainer.save()
    else:
        trainer.step()
        trainer.save()
    losses = [trainer.step().loss for _ in range(2)]
    boxes = {owned.name: len(owned.shard.slice.boxes) for owned in trainer.sharded.owned}
    trainer.close()
    return losses, boxes


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_of_fused_matrices_restore_on_any_degree(tmp_path: Path, optimizer: str) -> None:
    """tensor 2 × ZeRO-3 2 → 1 rank → tensor 4: the same bits are saved again, and the next losses are the same."""
    layouts = [Layout(tensor=2, shard=2, zero=3), Layout(), Layout(tensor=4), Layout(shard=4, zero=2)]
    saved, losses, before = [], [], None
    for number, layout in enumerate(layouts):
        run = fused_run(
            f"optimizer.name={optimizer}", "optimizer.eps=1e-4", "precision.newton_schulz=fp32", "train.micro_batch=1"
        )
        folder = tmp_path / str(number)
        results = run_ranks(steps, layout.ranks, replace(run, layout=layout), folder, before, layout=layout)
        before = folder / "checkpoints" / "step-00000001"
        saved.append(contents(before))
        losses.append(results[0][0])
        if layout.tensor == 4:
            assert results[0][1]["blocks.0.attention.qkv.weight"] == 3
    for again, said in zip(saved[1:], losses[1:], strict=True):
        assert differing(saved[0], again) == []
        assert said == pytest.approx(losses[0], rel=1e-5)


def cut(mesh: Mesh, axes: Any) -> dict[str, ParamShard]:
    model = build(SPEC)
    shards = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    return tensor.split([model], shards, fused_models.AXES | axes, mesh, sequence=False)


def test_a_rank_has_a_part_of_every_segment() -> None:
    first, second = run_ranks(cut, 2, {}, layout=Layout(tensor=2))
    q, k = HEADS * WIDE, KV * WIDE
    rows = {
        rank: [(box.offset[0], box.shape[0]) for box in shards["blocks.1.attention.qkv.weight"].slice.boxes]
        for rank, shards in enumerate((first, second))
    }
    assert rows[0] == [(0, q // 2), (q, k // 2), (q + k, k // 2)]
    assert rows[1] == [(q // 2, q // 2), (q + k // 2, k // 2), (q + k + k // 2, k // 2)]
    assert [box.offset for box in second["blocks.0.attention.qkv.bias"].slice.boxes] == [
        (q // 2,),
        (q + k // 2,),
        (q + k + k // 2,),
    ]
    assert [box.shape for box in second["blocks.0.mlp.gate_up.weight"].slice.boxes] == [(FFN // 2, 24)] * 2


def refused(mesh: Mesh, axes: Any) -> str:
    with pytest.raises(RunError) as caught:
        cut(mesh, axes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("dims", "ranks", "sentence"),
    [
        ((("heads", 24), ("kv_heads", 12)), 2, "segments of 24 + 12 = 36 elements for a dimension of blocks.0.attention.qkv.weight that has 48"),
        ((("heads", 24), ("kv_heads", 12), ("other", 12)), 2, "that ranks share and 'other', which they do not"),
        ((("heads", 24), ("kv_heads", 14), ("kv_heads", 10)), 2, "model.kv_heads = 4 does not divide its 14 elements"),
        ((("heads", 24), ("kv_heads", 12), ("kv_heads", 12)), 8, "does not divide model.kv_heads = 4, and blocks.0.attention.qkv.weight holds keys"),
    ],
)  # fmt: skip
def test_what_segments_cannot_be_is_said(dims: Any, ranks: int, sentence: str) -> None:
    said = run_ranks(refused, ranks, {"*.qkv.weight": (dims, "model")}, layout=Layout(tensor=ranks))[0]
    assert sentence in said


def measured(monkeypatch: pytest.MonkeyPatch, axes: dict[str, Any]) -> list[str]:
    """What is said of the module with some names of its table changed, before it starts on two ranks."""
    monkeypatch.setattr(fused_models, "AXES", fused_models.AXES | axes)
    try:
        measure(fused_run(tensor=2))
    except RunError as error:
        return list(error.problems)
    return []


def test_a_table_is_checked_against_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, {}) == []
    (said,) = measured(monkeypatch, {"*.gate_up.weight": ("ffn", "model")})
    assert "blocks.0.mlp.gate_up.weight 'ffn' with 40 elements, but the module reads 20 + 20" in said


def test_names_that_nothing_reads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = measured(monkeypatch, {"*.qkv.weight": ("inner", "model"), "*.qkv.bias": ("inner",)})
    assert "AXES names dimension 1 of blocks.0.attention.out.weight 'heads', but it cannot be divided" in said


class Residual(fused_models.Mlp):
    """Adds its input to its result, so that the input is read whole and in parts."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + super().forward(x_BSD)


def test_a_module_that_also_reads_its_input_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_models, "Mlp", Residual)
    (said,) = measured(monkeypatch, {})
    assert "AXES divides blocks.0.mlp.gate_up, but blocks.0.mlp, which holds it, also reads its input whole" in said
