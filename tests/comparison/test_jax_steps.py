"""The trainers that compute with JAX start from Phalanx's weights and take the steps of its torch engine. JAX has a process of its own, as it starts threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison.step_jobs import MACHINE, MODELS, SETTINGS, tiny_job, tiny_run
from xla_child import run_child
from xla_engine import needs_xla

from phalanx.comparison.compare_step import bench_run
from phalanx.spec.errors import RunError
from phalanx.spec.run import Memory

pytestmark = needs_xla
STEPS = 3


def in_child(name: str, compute: str, folder: str) -> dict[str, Any]:
    """In a child: losses of single tokens and of steps, by the torch engine and by the trainers that compute with JAX."""
    from phalanx.comparison import jax_loop
    from phalanx.comparison.phalanx_steps import PhalanxSteps
    from phalanx.comparison.step_messages import TrainerJob
    from phalanx.comparison.trainer_process import make
    from phalanx.spec.dump import dump

    jax_loop._CHUNK = 50  # the 128 tokens of a step are several chunks
    run = tiny_run(MODELS[name])
    run = replace(run, precision=replace(run.precision, compute=compute))
    job = tiny_job(run)
    found = {"phalanx": (PhalanxSteps(job, Path(folder) / "torch"), "cpu")}
    for trainer, engine in (("phalanx-xla", "xla"), ("jax", "torch")):
        memory = Memory(loss_chunk=50, recompute="selective")
        planned = bench_run(replace(run, memory=memory), MACHINE, SETTINGS, engine)  # type: ignore[arg-type]
        task = TrainerJob(
            trainer=trainer, run=dump(planned.run), plan=planned.plan.to_json(), compile=False, folder=folder, parent=0
        )
        made, _, device = make(task)
        found[trainer] = (made, device.type)  # type: ignore[assignment]
    return {
        name: {
            "tokens": made.token_losses(*job.probe).tolist(),
            "steps": [float(made.step()) for _ in range(STEPS)],
            "settings": made.settings,
            "compute": made.compute,
            "device": device,
        }
        for name, (made, device) in found.items()
    }


def without_a_gpu(folder: str) -> list[str]:
    """In a child whose JAX sees CPUs only: what a plan for a GPU is answered."""
    import os

    from phalanx.comparison.jax_device import jax_device
    from phalanx.comparison.xla_steps import XlaSteps

    job = tiny_job()
    on_gpu = replace(job, plan=replace(job.plan, device="cuda"), on_host=True)
    refusals = []
    for make in (lambda: jax_device(on_gpu), lambda: XlaSteps(on_gpu, Path(folder))):
        try:
            make()
        except RunError as refused:
            refusals.append(refused.problems[0])
    return [*refusals, os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]]


def test_jax_without_a_gpu_does_not_compute_for_one(tmp_path: Path) -> None:
    found = run_child(__file__, "without_a_gpu", str(tmp_path), devices=1)
    assert found == [
        'JAX sees no GPU, but a device of kind "cpu": install jax with its plugin for CUDA.',
        'The plan is for device "cuda", but JAX sees only "cpu": install jax with the plugin of the device, or set cluster.device = "cpu".',
        "false",
    ]


def assert_same(found: dict[str, Any], tolerance: float) -> None:
    ours = found["phalanx"]
    assert max(ours["tokens"]) - min(ours["tokens"]) > 0.1, "tokens have different losses, so that equal ones mean something"
    assert ours["steps"][-1] < ours["steps"][0] - 0.1, "it learns"
    for trainer in ("phalanx-xla", "jax"):
        assert found[trainer]["tokens"] == pytest.approx(ours["tokens"], rel=tolerance, abs=tolerance)
        assert found[trainer]["steps"] == pytest.approx(ours["steps"], rel=tolerance)
        assert found[trainer]["compute"] == ours["compute"] and found[trainer]["device"] == "cpu"


def test_trainers_on_jax_take_the_same_steps(tmp_path: Path) -> None:
    found = run_child(__file__, "in_child", "llama", "fp32", str(tmp_path), devices=1)
    assert_same(found, 2e-5)
    words = "fp32 weights, loss in chunks of 50, documents not masked, selective recomputation"
    assert found["phalanx-xla"]["settings"] == words
    assert found["jax"]["settings"].startswith("plain JAX, fp32 weights, xla attention, products stored, loss in chunks of")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied, scaled", "qwen3"])
def test_variants_take_the_same_steps(name: str, tmp_path: Path) -> None:
    assert_same(run_child(__file__, "in_child", name, "fp32", str(tmp_path), devices=1), 2e-5)


@pytest.mark.slow
def test_sixteen_bits_round_the_same_steps(tmp_path: Path) -> None:
    found = run_child(__file__, "in_child", "llama", "bf16", str(tmp_path), devices=1)
    assert found["jax"]["compute"] == "bf16"
    assert_same(found, 2e-2)
