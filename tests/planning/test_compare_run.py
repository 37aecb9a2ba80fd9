"""A run's plan beside what the run measured: shown, and corrected so that the same run is predicted as it was."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from phalanx.dashboard.plan_text import show_comparison
from phalanx.events.log import EventLog
from phalanx.events.records import RunStarted, Step, StepAccounted, StepTimed
from phalanx.planning.feedback import after, compare, correction
from phalanx.planning.planner import plan_run
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Gpu, Machine
from phalanx.spec.run import Cluster, Run, Train

MIB = 2**20
LAPTOP = Machine(host="a", cpu="some", cores=4, memory=2**34, core_flops=1e11)
SERVER = replace(LAPTOP, cores=96, memory=2**40, gpus=(Gpu(name="NVIDIA H100 80GB HBM3", memory=80 * 2**30),) * 8)


ONE_WITH = {"launch": "compute", "pipeline": "bubble", "offload": "optimizer"}
"""Parts of a promise that a run measures as one with others."""


def directory(
    tmp_path: Path,
    machine: Machine,
    slower: float | dict[str, float],
    steps: int = 8,
    layout: Layout = Layout(),  # noqa: B008 - frozen
) -> Path:
    """A run that took `slower` times what was promised, and 100 MiB more. By parts: what each took, timed on the last two of four ranks,
    the other two waiting twice as long for gradients and computing less."""
    model = ModelSpec(dim=256, layers=4, heads=8, vocab=257)
    train = Train(batch=32, sequence_length=256, steps=steps)
    run = Run(model=model, train=train, cluster=Cluster(cpu_ranks=4), layout=layout)
    settled = plan_run(run, machine)
    plan = settled.plan
    assert plan.promise is not None
    (tmp_path / "run.toml").write_text(dump(settled.run))
    (tmp_path / "plan.json").write_text(plan.to_json())
    log = EventLog(tmp_path / "events.jsonl")
    about = {"version": "1", "steps": steps, "parameters": 1, "micro_batch": 1, "accumulation": 1, "compute": plan.compute}
    log.emit(RunStarted(ranks=plan.ranks, device=plan.device, layout=asdict(plan.layout), promise=plan.promise, **about))  # type: ignore[arg-type]
    parts: dict[str, float] = {}
    if isinstance(slower, dict):
        for name, spent in plan.promise.split.items():
            part = ONE_WITH.get(name, name)
            parts[part] = parts.get(part, 0.0) + slower.get(part, 1.0) * spent
        seconds = sum(parts.values())
    else:
        seconds = slower * plan.promise.seconds
    bytes_ = int(plan.promise.total_memory + 100 * MIB)
    memory = {name: int(plan.promise.memory[name]) for name in ("parameters", "gradients", "optimizer")} | {
        "activations": 50 * MIB
    }
    sent = {"data": {"all-reduce": 6 * MIB}}
    log.emit(StepAccounted(step=2, rank=0, sent=sent, memory=memory, flops={"all": 10**9}))
    for number in range(1, steps + 1):
        took = 10 * seconds if number < 3 else seconds
        usual = {
            "loss": 1.0,
            "samples": 1,
            "batch_digest": "",
            "learning_rate": 1.0,
            "grad_norm": 1.0,
            "flops_per_second": 1.0,
            "mfu": None,
        }
        log.emit(Step(step=number, tokens=8192, seconds=took, tokens_per_second=8192 / took, memory=bytes_, **usual))  # type: ignore[arg-type]
        if parts and number in (3, 4, 5):
            disturbed = {3: 1.0, 4: 5.0, 5: 0.9}[number]  # something came between the fourth, the fifth was lucky
            for rank in range(4):
                moved = 0.0 if rank > 1 else min(parts["data"], parts["compute"]) / 2
                here = parts | {"data": parts["data"] + moved, "compute": parts["compute"] - moved}
                here = {name: disturbed * spent for name, spent in here.items() if spent > 0}
                log.emit(StepTimed(step=number, rank=rank, seconds=disturbed * seconds, parts=here))
    log.close()
    return tmp_path


@pytest.mark.parametrize("machine", [LAPTOP, SERVER], ids=["cores", "GPUs"])
@pytest.mark.parametrize("slower", [0.6, 1.9])
def test_a_correction_predicts_the_run_as_it_was(tmp_path: Path, machine: Machine, slower: float) -> None:
    found = compare(directory(tmp_path, machine, slower), machine)
    assert found.predicted.seconds * slower == pytest.approx(found.seconds), "the first two steps do not count"
    constants = correction(found, machine)
    device = "cuda" if machine.gpus else "cpu"
    assert all(name.startswith(f"{device}.") for name in constants)
    again = after(found, machine, constants)
    assert again.seconds == pytest.approx(found.seconds, rel=0.05)
    # And so does whoever plans on the machine from now on.
    told = replace(machine, measured=tuple(constants.items()))
    assert compare(tmp_path, told).rows[0].error == pytest.approx(0, abs=0.05)
    if device == "cpu":
        assert again.total_memory == pytest.approx(found.memory, rel=0.01)


def test_comparison_shows_promise_and_measurement_by_component(tmp_path: Path) -> None:
    comparison = compare(directory(tmp_path, LAPTOP, 1.25), LAPTOP)
    told = comparison.to_json()
    json.dumps(told, allow_nan=False)
    by_name = {row["name"]: row for row in told["rows"]}
    assert by_name["step"]["error"] == pytest.approx(-0.2)
    assert by_name["optimizer"]["predicted"] == pytest.approx(by_name["optimizer"]["measured"], abs=1)
    assert by_name["memory"]["measured"] - by_name["memory"]["predicted"] == pytest.approx(100 * MIB, abs=1)
    console = Console(width=100, record=True)
    show_comparison(console, comparison)
    text = console.export_text()
    assert "−20.0%" in text and "50.0 MiB" in text and "6.0 MiB by all-reduce" in text


FACTORS = {"compute": 1.6, "tensor": 2.5, "data": 2.5, "bubble": 1.6, "optimizer": 0.4, "other": 2.0}


@pytest.mark.parametrize(
    ("machine", "layout"),
    [
        (LAPTOP, Layout()),
        (LAPTOP, Layout(tensor=2)),
        (LAPTOP, Layout(shard=4)),
        (SERVER, Layout(data=4)),
        (SERVER, Layout(tensor=4)),
    ],
    ids=["replicas", "tensor", "shards", "replicas of GPUs", "tensor on GPUs"],
)
def test_correction_moves_the_wrong_constant(tmp_path: Path, machine: Machine, layout: Layout) -> None:
    """Each part of the step comes nearer to what was measured, and the whole is right."""
    found = compare(directory(tmp_path, machine, FACTORS, layout=layout), machine)
    assert found.timed is not None and (found.timed.step, found.timed.rank) == (3, 2), (
        "the median step, on a rank that works longest"
    )
    before = {row.name: row for row in found.rows}
    constants = correction(found, machine)
    after_ = {row.name: row for row in found.against(after(found, machine, constants))}
    assert after_["step"].error == pytest.approx(0, abs=0.02)
    parts = [name for name, row in before.items() if name.startswith("  ") and (row.measured or 0) > 0.02 * found.seconds]
    assert len(parts) >= 2
    for name in parts:
        was, is_ = before[name].error, after_[name].error
        assert was is not None and is_ is not None and abs(is_) < abs(was) / 2, (name, was, is_)


def test_comparison_shows_parts_of_a_step(tmp_path: Path) -> None:
    found = compare(directory(tmp_path, LAPTOP, FACTORS, steps=5), LAPTOP)
    told = found.to_json(found.predicted)
    json.dumps(told, allow_nan=False)
    parts = {row["name"].strip(): row for row in told["rows"] if row["name"].startswith("  ")}
    assert sum(row["measured"] for row in parts.values()) == pytest.approx(found.seconds)
    assert sum(row["predicted"] for row in parts.values()) == pytest.approx(found.predicted.seconds)
    assert parts["computing, launching"]["error"] == pytest.approx(1 / 1.6 - 1)
    assert parts["gradients and shards"]["error"] == pytest.approx(1 / 2.5 - 1)
    assert all(row["refitted"] == row["predicted"] for row in told["rows"])
    assert sum(told["timed"]["mean"].values()) == pytest.approx(told["timed"]["seconds"])
    console = Console(width=120, record=True)
    show_comparison(console, found, found.predicted)
    text = console.export_text()
    assert "in the proportions of step 3" in text and "on rank 2, which waited least of 4" in text and "refitted" in text


def test_run_without_plan_or_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no plan\.json: name the directory of a run"):
        compare(tmp_path, LAPTOP)
    with pytest.raises(RunError, match="has 2 steps in its last launch: train at least 3"):
        compare(directory(tmp_path, LAPTOP, 1.0, steps=2), LAPTOP)


def test_a_layout_that_was_given_is_compared_as_it_was(tmp_path: Path) -> None:
    found = compare(directory(tmp_path, LAPTOP, 1.0), LAPTOP)
    assert found.plan.layout == Layout(data=4) and found.rows[0].error == pytest.approx(0, abs=1e-6)
