"""Checks that only torch can answer: the size of a custom model, its errors as sentences, and whether a run fits in memory."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ranks import tiny_run

import phalanx as px
from phalanx.launch import model_check
from phalanx.launch.model_check import measure
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.plan import Gpu, Machine, Plan
from phalanx.spec.run import Run

MODEL = """\
import json  # a file json.py in the working directory must not be taken for it
import torch
from torch import nn

print("imported", json.dumps({"parameters": -1}))
AXES = {"*.weight": ("any", "model")}


class Small(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.inner = nn.Linear(spec.dim, dict(spec.options)["wide"], bias=False)
        self.head = nn.Linear(dict(spec.options)["wide"], spec.rows, bias=False)

    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return self.head(self.inner(self.embed(tokens_BS)))


class Counted(Small):
    # Its forward reads a value, which only a tensor with memory has, and a buffer that must have been given its own.
    def __init__(self, spec):
        super().__init__(spec)
        self.register_buffer("one", torch.zeros(()))

    def reset_buffers(self):
        self.one.fill_(1)

    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        assert int(tokens_BS.max()) < 257 and self.one.item() == 1 and documents_BS is not None
        return super().forward(tokens_BS, positions_BS)


class Failing(Small):
    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return self.tail(self.embed(tokens_BS))


class Narrow(Small):
    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return self.embed(tokens_BS)


class Double(Small):
    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return super().forward(tokens_BS, positions_BS), None


class Fixed(Small):
    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return super().forward(tokens_BS, positions_BS).detach()


class Broken(Small):
    def __init__(self, spec):
        super().__init__(spec)
        self.ratio = 1 / 0


class Leaving(Small):
    def __init__(self, spec):
        import os

        os._exit(7)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(MODEL)
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')\n")
    (tmp_path / "lost.py").write_text("import torch\nimport nothing_of_that_name\n")
    return tmp_path


def own(name: str) -> Run:
    text = f"""
        [model]
        module = "{name}"
        dim = 48
        [model.options]
        wide = 10
        [train]
        batch = 2
        steps = 1
        sequence_length = 16
        [cluster]
        device = "cpu"
        cpu_ranks = 1
    """
    return loads(text)


def test_counts_come_from_the_module() -> None:
    plan = px.plan(own("small:Small"))
    assert plan.parameters == plan.active == 257 * 48 + 48 * 10 + 10 * 257
    assert plan.flops_per_token == 6 * (48 * 10 + 10 * 257), "an embedding is looked up, not multiplied"


def test_a_forward_is_tried_with_real_tensors() -> None:
    assert px.plan(own("small:Counted")).parameters == px.plan(own("small:Small")).parameters


def test_built_in_models_are_not_measured() -> None:
    assert measure(loads("[train]\nbatch = 1\nsteps = 1\n")) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("small:Broken", ("ZeroDivisionError: division by zero", "small.py, line 57")),
        pytest.param("small:Smal", ("no class Smal", "Small"), marks=pytest.mark.slow),
        ("lost:Any", ("No module named 'nothing_of_that_name'", "lost.py, line 2")),
        ("small:Failing", ("forward failed", "[2, 16]", "AttributeError", "'tail'", "small.py, line 36")),
        pytest.param("small:Narrow", ("[2, 16, 48]", "[2, 16, 257]"), marks=pytest.mark.slow),
        pytest.param("small:Double", ("gives tuple", "[2, 16, 257]"), marks=pytest.mark.slow),
        pytest.param("small:Fixed", ("depend on no parameter",), marks=pytest.mark.slow),
        ("small:Leaving", ("ended with exit code 7",)),
    ],
)
def test_broken_custom_models_are_refused_with_a_sentence(name: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(RunError) as caught:
        px.plan(own(name))
    (sentence,) = caught.value.problems
    assert name in sentence and "\n" not in sentence
    for part in parts:
        assert part in sentence, sentence


LARGE_MODEL = ("model.dim=1024", "model.layers=2", "model.vocab=32768", "train.micro_batch=8", "train.sequence_length=512")


def machine(memory: int, gpu: int = 0) -> Machine:
    gpus = (Gpu(name="NVIDIA H100 80GB HBM3", memory=gpu),) if gpu else ()
    return Machine(host="here", cpu="a cpu", cores=2, memory=memory, gpus=gpus)


def plan_of(run: Run, device: Any, ranks: int) -> Plan:
    return Plan(
        layout=Layout(data=ranks),
        device=device,
        threads=1,
        micro_batch=8 // ranks,
        accumulation=1,
        compute="bf16" if device == "cuda" else "fp32",
        parameters=run.model.parameters(),
        flops_per_token=0.0,
        peak_flops=None,
    )


def test_cpu_ranks_must_fit_in_the_shared_memory_together() -> None:
    run = tiny_run(*LARGE_MODEL)
    plan = plan_of(run, "cpu", 2)
    found = model_check.memory_problems(run, plan, machine(3 << 30))
    assert (
        len(found) == 1
        and "2 CPU ranks need" in found[0]
        and "this machine has 3.0 GiB" in found[0]
        and "--unrehearsed" in found[0]
    )


@pytest.mark.slow
def test_run_that_fits_in_a_rehearsal_has_no_problem() -> None:
    run = tiny_run(*LARGE_MODEL)
    plan = plan_of(run, "cpu", 2)
    assert model_check._estimate(run, plan, machine(6 << 30)) * 2 > 3 << 30  # more than half of it, so somebody is asked
    assert model_check.memory_problems(run, plan, machine(6 << 30)) == []


def test_a_gpu_that_is_too_small_is_told_with_the_layer() -> None:
    run = tiny_run(*LARGE_MODEL)
    found = model_check.memory_problems(run, plan_of(run, "cuda", 1), machine(64 << 30, gpu=4 << 30))
    assert len(found) == 1 and "Rank 0 needs" in found[0] and "runs out of memory in" in found[0]


def test_small_runs_start_without_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody needs to be asked")

    monkeypatch.setattr(subprocess, "run", refuse)
    run = tiny_run()
    assert model_check.memory_problems(run, plan_of(run, "cpu", 2), machine(8 << 30)) == []


def test_failed_rehearsal_does_not_refuse_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ChildProcessError("its process ended with exit code 1 and no answer")

    run = tiny_run(*LARGE_MODEL)
    monkeypatch.setattr(model_check, "ask_python", fail)
    assert model_check.memory_problems(run, plan_of(run, "cpu", 2), machine(1 << 30)) == []
