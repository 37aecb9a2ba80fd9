"""Checkpoints for tests: saved at once, listed file by file, damaged. Imported by tests as `checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.save import Saver
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import Saved
from phalanx.parallel.mesh import Mesh


def saved(folder: Path, step: int, tensors: Mapping[str, Tensor | StateTensor], contents: dict[str, Any], mesh: Mesh) -> Path:
    """A checkpoint of these tensors, by all ranks together; where it is."""
    saver = Saver(open_location(folder), mesh)
    (ended,) = saver.save(step, tensors, RunMetadata.from_json(contents), wait=True)
    saver.close()
    assert isinstance(ended, Saved), ended
    return Path(ended.path)


def contents(path: Path | Location) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, in the format it is stored in."""
    found = CheckpointReader(path)
    try:
        return {name: found.read(name) for name in found.names}
    finally:
        found.close()


def flip(file: Path, place: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def values(path: Path) -> Path:
    """The largest file of a checkpoint: most of it is tensors."""
    return max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)


def various(seed: int) -> dict[str, Tensor]:
    """Tensors of every kind."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model/matrix": torch.randn(37, 53, generator=dice),
        "model/turned": torch.randn(8, 5, generator=dice).T,
        "model/vector": torch.randn(101, generator=dice),
        "optimizer/matrix/step": torch.tensor(float(seed)),
        "low": torch.randn(64, generator=dice).bfloat16(),
        "whole": torch.randint(1 << 40, (9,), generator=dice),
        "special": torch.tensor([0.0, -0.0, torch.inf, 1e-45]),
        "flags": torch.rand(13, generator=dice) < 0.5,
        "none": torch.zeros(3, 0),
    }
