"""Checkpoints written and read part by part are like any other, and no more of one is in memory than a part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from phalanx.checkpointing import disk
from phalanx.checkpointing.load import load
from phalanx.checkpointing.save import save
from phalanx.checkpointing.stream import Chunk, Saved, Streamed, write

WHOLE = torch.arange(60.0).view(6, 10)


class Alone:
    rank, ranks = 0, 1

    def barrier(self) -> None:
        pass


def streamed(rows: int) -> Streamed:
    def chunk(first: int) -> Chunk:
        part = WHOLE[first : first + rows]
        return Chunk(offsets=(first, 0), sizes=tuple(part.shape), read=part.clone)

    return Streamed(name="model/w", shape=(6, 10), dtype=torch.float32, chunks=[chunk(first) for first in range(0, 6, rows)])


def test_it_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    columns = [Chunk(offsets=(0, at), sizes=(6, 5), read=WHOLE[:, at : at + 5].bfloat16) for at in (0, 5)]
    across = Streamed(name="model/across", shape=(6, 10), dtype=torch.bfloat16, chunks=columns)
    path = write(tmp_path, 0, [streamed(2), across], {"version": "1"})
    assert path == disk.folder(tmp_path, 0)
    disk.verify(path)
    # Into another format: a run computes in its own.
    tensors = {"model/w": torch.zeros(6, 10, dtype=torch.float64), "model/across": torch.zeros(6, 10)}
    contents = load(path, tensors, alone=True)
    assert (contents["version"], contents["step"]) == ("1", 0)
    assert torch.equal(tensors["model/w"], WHOLE.double())
    assert torch.equal(tensors["model/across"], WHOLE)  # whole numbers below 256 are exact in bf16


def test_parts_of_what_was_streamed_and_of_what_was_saved(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 0, [streamed(2)], {})
    apart = Saved(path)
    assert apart.parts("model/w") == [(0, 2), (2, 4), (4, 6)]
    whole = Saved(save(tmp_path / "b", 7, {"model/w": WHOLE}, {"progress": 1}, Alone()))
    assert whole.parts("model/w") == [(0, 6)]
    assert whole.contents["progress"] == 1
    for saved in (apart, whole):
        assert saved.shape("model/w") == (6, 10) and saved.shape("model/none") is None
        assert saved.dtype("model/w") is torch.float32
        assert torch.equal(saved.read("model/w"), WHOLE)
        assert torch.equal(saved.read("model/w", 1, 5), WHOLE[1:5])


PROGRAM = """
import resource, sys, torch
from pathlib import Path
from phalanx.checkpointing.stream import Chunk, Saved, Streamed, write
rows = 4 << 20
def tensor(index):
    chunk = Chunk(offsets=(0,), sizes=(rows,), read=lambda: torch.full((rows,), float(index)))
    return Streamed(name=f"t{index}", shape=(rows,), dtype=torch.float32, chunks=[chunk])
write(Path(sys.argv[1]) / "first", 0, [tensor(0)], {})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = write(Path(sys.argv[1]) / "second", 0, [tensor(index) for index in range(20)], {})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
saved = Saved(path)
assert all((saved.read(f"t{index}") == index).all() for index in (0, 7, 19))
"""


def test_one_part_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """The library's writer holds on to all that it has written until the file is closed: 20 tensors of 16 MB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40
