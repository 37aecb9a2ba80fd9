"""What rounding does to one process: measured by disturbing its gradients, and what follows for the limits of a proof."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ALONE, tiny_run

from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.layout import Layout
from phalanx.verification.cases import Case, make_case
from phalanx.verification.parity import measure_noise, prove, verify
from phalanx.verification.rank_pool import RankPool
from phalanx.verification.reference import train_reference
from phalanx.verification.tolerance import MARGIN, ROUNDING, TOLERANCES, Noise

MUON = "optimizer.name=muon"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


def small_weights(*overrides: str, steps: int = 2) -> Case:
    """Matrices wide enough for some of their numbers to lie next to a rounding boundary, and as small as models begin with."""
    overrides = ("model.dim=96", "model.ffn=96", *overrides)
    return make_case(tiny_run("layout.data=2", *overrides), steps=steps)


def noise_of(case: Case, folder: Path) -> Noise:
    case = replace(case, folder=str(folder))
    return measure_noise(ALONE, case, train_reference(ALONE, case, folder / "reference.pt"))


def largest(noise: Noise, kind: str) -> float:
    return max(value for (of_kind, _, _), value in noise.items() if of_kind == kind)


def in_bf16(case: Case) -> Case:
    """The case with Newton–Schulz iterations as a run has them."""
    return replace(case, reference=replace(case.reference, precision=replace(case.reference.precision, newton_schulz="bf16")))


def test_iterations_in_bf16_amplify_rounding_and_those_in_fp32_do_not(tmp_path: Path) -> None:
    muon = small_weights(MUON)
    assert ROUNDING["fp32"] == 5e-7
    # The update hangs on the last bit of a gradient: no limit for parameters would separate that from a mistake.
    assert largest(noise_of(in_bf16(muon), tmp_path), "parameters") > 5 * TOLERANCES["fp32"].parameters
    for case in (muon, small_weights()):
        noise = noise_of(case, tmp_path)
        assert largest(noise, "parameters") < 0.2 * TOLERANCES["fp32"].parameters
        assert largest(noise, "gradients") < 0.2 * TOLERANCES["fp32"].gradients


def test_noise_begins_with_the_first_update_and_does_not_fall(tmp_path: Path) -> None:
    case = small_weights(MUON, "precision.compute=bf16", steps=2)
    noise = noise_of(case, tmp_path)
    name = "blocks.1.attention.output.weight"
    assert noise["gradients", 1, name] == noise["loss", 1, ""] == noise["parameters", 0, name] == 0.0
    rising = [noise["parameters", step, name] for step in range(case.steps + 1)]
    assert rising[1] > 0 and rising == sorted(rising)
    assert noise_of(case, tmp_path) == noise  # the same in every run


def test_replicas_that_meet_now_and_then_have_noise_too(tmp_path: Path) -> None:
    noise = noise_of(make_case(tiny_run("layout.data=2", "optimizer.sync_every=2"), steps=2), tmp_path)
    assert 0 < largest(noise, "parameters") < TOLERANCES["fp32"].parameters


def test_a_gradient_that_differs_in_its_last_bits_passes_with_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ShardedModel.finish

    def rounded_otherwise(self: ShardedModel) -> None:
        finish(self)
        for one in self.owned:
            if one.gradient is not None and self.mesh.ranks > 1:
                one.gradient *= 1 + 1e-7 * torch.randn_like(one.gradient)  # one rounding in fp32 is 6e-8

    monkeypatch.setattr(ShardedModel, "finish", rounded_otherwise)
    report = prove(small_weights(MUON), pool=RankPool)
    found = {check.name: check for check in report.checks}
    assert report.passed, report.first
    assert found["gradients"].accepted == found["parameters"].accepted == 1e-4
    assert found["gradients"].largest > 0 and found["parameters"].largest > 0
    assert any("precision.newton_schulz" in sentence for sentence in report.case.notes)


def test_what_rounding_explains_passes_and_says_so(pool: RankPool) -> None:
    run = replace(tiny_run(MUON, "precision.compute=fp16"), layout=Layout(data=1, tensor=2))
    report = verify(run, steps=2, pool=pool)
    assert report.passed, report.failure or report.first
    check: dict[str, Any] = json.loads(json.dumps(report.to_json()))["checks"][-1]
    assert check["name"] == "parameters" and check["largest"] > TOLERANCES["fp16"].parameters
    assert check["accepted"] == MARGIN * check["noise"]
    found = {check.name: check for check in report.checks}
    assert found["gradients"].noise is None and found["gradients"].accepted == TOLERANCES["fp16"].gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "layout"),
    [
        ("fp32", {"shard": 2, "tensor": 2, "sequence": True}),
        ("fp32", {"pipeline": 2, "tensor": 2}),
        ("bf16", {"shard": 4, "zero": 2}),
        ("fp16", {"shard": 2, "tensor": 2, "sequence": True}),
    ],
    ids=["fp32 sharded", "fp32 pipelined", "bf16", "fp16"],
)
def test_muon_on_a_llama_shape_passes(compute: str, layout: dict[str, Any], pool: RankPool) -> None:
    shape = ("model.dim=96", "model.layers=6", "model.heads=12", "model.kv_heads=6", "train.sequence_length=32")
    run = tiny_run(*shape, MUON, "memory.recompute=full", f"precision.compute={compute}")
    report = verify(replace(run, layout=Layout(**{"data": 1} | layout)), pool=pool)
    assert report.passed, report.failure or report.first
