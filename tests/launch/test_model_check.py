"""One's own model, asked for its size in a process of its own; whatever it does wrong is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx as px
from phalanx.launch.model_check import measure
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
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


def test_the_built_in_decoder_is_not_asked() -> None:
    assert measure(loads("[train]\nbatch = 1\nsteps = 1\n")) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("small:Broken", ("ZeroDivisionError: division by zero", "small.py, line 57")),
        ("small:Smal", ("no class Smal", "Small")),
        ("lost:Any", ("No module named 'nothing_of_that_name'", "lost.py, line 2")),
        ("small:Failing", ("forward failed", "[2, 16]", "AttributeError", "'tail'", "small.py, line 36")),
        ("small:Narrow", ("[2, 16, 48]", "[2, 16, 257]")),
        ("small:Double", ("gives tuple", "[2, 16, 257]")),
        ("small:Fixed", ("depend on no parameter",)),
        ("small:Leaving", ("ended with exit code 7",)),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(name: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(RunError) as caught:
        px.plan(own(name))
    (sentence,) = caught.value.problems
    assert name in sentence and "\n" not in sentence
    for part in parts:
        assert part in sentence, sentence
