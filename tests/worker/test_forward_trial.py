from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import tiny_run

from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.worker.measure_process import measure

torch.set_num_threads(1)
SOURCE = """
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def plain(block, x):
    return x


def later(block, x):
    return x + x.flip(1)


def random_scale(block, x):
    return x * (1 + random.random())


def dropped(block, x):
    return F.dropout(x, 0.1)


def counted(block, x):
    block.calls += 1
    return x * (1 + 0.01 * block.calls)


def of_the_environment(block, x):
    return x * float(os.environ.get("RANK", "1"))


def of_the_process(block, x):
    return x * (1 + os.getpid() % 7)


def of_the_rank(block, x):
    return x * (1 + (dist.get_rank() if dist.is_initialized() else 0))


class Block(nn.Module):
    def __init__(self, dim, change):
        super().__init__()
        self.up, self.down, self.change, self.calls = nn.Linear(dim, 40), nn.Linear(40, dim), change, 0

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.change(self, x))))


class Model(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.embed = nn.Embedding(spec.rows, spec.dim)
        change = globals()[spec.option("change", "plain")]
        self.blocks = nn.ModuleList(Block(spec.dim, change) for _ in range(2))
        if spec.option("shared", False):
            self.blocks[1] = self.blocks[0]
        self.head = nn.Linear(spec.dim, spec.rows)

    def forward(self, tokens, positions, documents=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def tried(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str, layout: Layout, **options: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name = f"trial_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(SOURCE)
    given = [f"model.options.{key}={value}" for key, value in options.items()]
    run = tiny_run(f'model.module="{name}:Model"', f'model.options.change="{change}"', *given)
    measure(replace(run, layout=layout))


TWO_STAGES = Layout(data=1, pipeline=2)
FOUND = {
    "later": "its logits at a position depend on later tokens",
    "random_scale": "gives other logits when it is called with the same tokens again",
    "dropped": "gives other logits when it is called with the same tokens again",
    "counted": "gives other logits when it is called with the same tokens again",
    "of_the_environment": r"blocks.0 \(Block\) reads environment variables when it is called",
    "of_the_process": r"blocks.0 \(Block\) reads the process or the machine",
    "of_the_rank": r"blocks.0 \(Block\) reads its rank",
}


def test_a_plain_forward_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(tmp_path, monkeypatch, "plain", TWO_STAGES)


@pytest.mark.parametrize("change", FOUND)
def test_what_ranks_would_not_agree_on_is_refused(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=FOUND[change]):
        tried(tmp_path, monkeypatch, change, TWO_STAGES)


@pytest.mark.parametrize("change", ["random_scale", "dropped", "counted", "of_the_environment"])
def test_one_rank_may_do_what_it_likes(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(tmp_path, monkeypatch, change, Layout(data=1))


def test_logits_that_see_later_tokens_are_refused_on_one_rank_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="later tokens"):
        tried(tmp_path, monkeypatch, "later", Layout(data=1))


def test_a_layer_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(tmp_path, monkeypatch, "plain", Layout(data=1), shared="true")
    with pytest.raises(RunError, match="layer 0 is called 2 times"):
        tried(tmp_path, monkeypatch, "plain", TWO_STAGES, shared="true")
