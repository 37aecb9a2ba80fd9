"""Checkpoints of earlier versions, in which some modules of the decoder had other names, still load."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.offline_writer import StreamedTensor, write_checkpoint
from phalanx.checkpointing.restore import CheckpointReader, load
from phalanx.spec.tensor_slice import Box

VALUES = torch.arange(24.0).view(6, 4)


def saved_as(folder: Path, name: str, run: str) -> Path:
    """A checkpoint of one tensor, and the run file that its marker carries."""
    chunk = (Box((0, 0), (6, 4)), lambda: VALUES)
    tensor = StreamedTensor(name=name, shape=(6, 4), dtype=torch.float32, boxes=[chunk])
    return Path(str(write_checkpoint(folder, 3, [tensor], RunMetadata(run=run))))


def test_renamed_tensors_are_found_under_their_old_names(tmp_path: Path) -> None:
    for old, new in (
        ("model/places.weight", "model/position_embed.weight"),
        ("optimizer/ahead.0.join.weight/exp_avg", "optimizer/mtp.0.join.weight/exp_avg"),
    ):
        path = saved_as(tmp_path / new.replace("/", "-"), old, "[model]\n")
        found = torch.zeros(6, 4)
        load(path, {new: found})
        assert torch.equal(found, VALUES)
        assert CheckpointReader(path).names == [new] and torch.equal(CheckpointReader(path).read(new, 2, 4), VALUES[2:4])


def test_names_of_own_modules_are_never_translated(tmp_path: Path) -> None:
    path = saved_as(tmp_path, "model/ahead.weight", '[model]\nmodule = "mine:Model"\n')
    found = torch.zeros(6, 4)
    load(path, {"model/ahead.weight": found})
    assert torch.equal(found, VALUES) and CheckpointReader(path).names == ["model/ahead.weight"]
