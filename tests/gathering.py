"""Whole tensors from every rank's boxes, by name, for comparing them with those of one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard


def wholes(boxes: Mapping[str, tuple[Tensor, ParamShard]], mesh: Mesh) -> dict[str, Tensor]:
    """Every tensor that any rank has a box of, whole, in fp32 or its own format, on the CPU of all ranks; they call it together.

    Boxes that several ranks hold are taken from the first; an element that none holds would be NaN.
    """
    mine = {name: (tensor.detach().cpu(), spot) for name, (tensor, spot) in boxes.items()}
    found: dict[str, Tensor] = {}
    for theirs in reversed(mesh.gather_objects(mine)):
        for name, (tensor, spot) in theirs.items():
            if name not in found:
                found[name] = torch.full(spot.slice.whole, torch.nan, dtype=tensor.dtype)
            for box, local in spot.slice.regions():
                found[name][box.index] = tensor[local.index]
    return found
