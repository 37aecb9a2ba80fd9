"""`px.trainer` with the XLA engine: the same loop by hand, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest
from xla_engine import needs_xla

pytestmark = [needs_xla, pytest.mark.slow]

PROGRAM = '''
import sys

import phalanx as px

TEXT = """
[model]
dim = 24
layers = 1
heads = 4
kv_heads = 2
vocab = 264
[data]
source = "memory"
documents = ["a man a plan a canal panama", "able was I ere I saw elba", "never odd or even"]
[train]
batch = 4
sequence_length = 16
steps = 4
micro_batch = 1
[cluster]
device = "cpu"
"""
folder, *settings = sys.argv[1:]
with px.trainer(px.loads(TEXT, overrides=settings), checkpoints=folder) as trainer:
    trainer.restore()
    while not trainer.finished:
        print(trainer.step().loss)
    trainer.save()
'''


def losses(folder: Path, *settings: str) -> list[float]:
    done = run([sys.executable, "-c", PROGRAM, str(folder), *settings], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_steps_by_hand_are_those_of_the_torch_engine(tmp_path: Path) -> None:
    on_two = ("engine.name=xla", "cluster.cpu_ranks=2", f"data.cache={tmp_path / 'cache'}")
    theirs, ours = losses(tmp_path / "torch"), losses(tmp_path / "xla", *on_two)
    assert len(ours) == 4 and ours == pytest.approx(theirs, rel=1e-5)
    assert losses(tmp_path / "torch", *on_two) == []  # it goes on where the other engine has ended
