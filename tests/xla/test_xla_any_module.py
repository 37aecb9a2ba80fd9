"""Models that were not written for Phalanx train on the XLA engine as on one process of the torch engine: tiny random ones of transformers, and
modules with attention, buffers and tied weights of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hf_families
import pytest
from xla_engine import devices, lowered, needs_xla

from phalanx.host.env import use_virtual_devices
from phalanx.parallel.mesh import Mesh
from phalanx.spec.engine import Engine
from phalanx.spec.errors import PhalanxError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Data, Memory, Run, Train
from phalanx.verification import parity
from phalanx.verification.cases import random_documents

pytestmark = needs_xla


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of this folder can be imported by every process that builds one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


GRID = Layout(data=1, shard=2, tensor=2)


def run_of(model: ModelSpec, layout: Layout, **memory: object) -> Run:
    return Run(
        model=model,
        layout=layout,
        engine=Engine(name="xla"),
        memory=Memory(**memory),  # type: ignore[arg-type]
        train=Train(batch=4, sequence_length=32, steps=2, micro_batch=1),
        data=Data(source="memory", documents=random_documents(0), eval_fraction=0.0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "gemma"])
def test_families_of_transformers(family: str) -> None:
    report = parity.verify(run_of(hf_families.spec(family), GRID), steps=2)
    assert report.passed, report.to_json()


@pytest.mark.slow
def test_a_family_with_sequence_parallelism_and_recomputed_layers() -> None:
    layout = replace(GRID, sequence=True)
    report = parity.verify(run_of(hf_families.spec("phi3"), layout, recompute="full"), steps=1)
    assert report.passed, report.to_json()


OWN = ModelSpec(vocab=264, dim=24, layers=2, init_std=0.1, tied=False)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["fused_models:Fused", "examples.own_model:Recurrent"])
def test_modules_of_the_user(module: str) -> None:
    report = parity.verify(run_of(replace(OWN, module=module), GRID, recompute="full"), steps=2)
    assert report.passed, report.to_json()


def test_a_module_with_buffers_and_padding() -> None:
    report = parity.verify(run_of(replace(OWN, layers=1, module="chance_modules:Plain"), Layout(data=1, shard=2)), steps=2)
    assert report.passed, report.to_json()


REFUSED = {
    "Dropped": "drop is a dropout of 0.25",
    "Drops": "calls dropout in its forward",
    "Noisy": "calls randn_like in its forward",
    "Clipped": "_Clipped has a backward of its own",
}


def refusals(mesh: Mesh, runs: dict[str, Run]) -> dict[str, str]:
    """What is said when each run's step is traced."""
    use_virtual_devices(2)
    found = {}
    for name, run in runs.items():
        try:
            lowered(run)
            found[name] = "nothing"
        except PhalanxError as refused:
            found[name] = str(refused)
    return found


def test_chance_hidden_backwards_and_experts_are_refused_by_name() -> None:
    runs = {name: run_of(replace(OWN, module=f"chance_modules:{name}"), Layout(data=2)) for name in REFUSED}
    runs["experts"] = run_of(hf_families.spec("mixtral"), Layout(data=2))
    with devices() as pool:
        found = pool.alone(refusals, runs)
    for name, words in (REFUSED | {"experts": "is of experts"}).items():
        assert words in found[name] and 'engine.name = "torch"' in found[name], found
