"""State from disk into tensors that are already in place. Called by the trainer before the first step, and by generate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from phalanx.checkpointing import disk
from phalanx.checkpointing.pieces import LoadPieces, Piece, pieces
from phalanx.checkpointing.quiet import quiet


def load(path: Path, tensors: Mapping[str, Tensor | Piece], *, alone: bool) -> dict[str, Any]:
    """Fill `tensors`, whole ones or parts, by name from the checkpoint; returns the plain values saved with them.

    `alone`: this process reads by itself, whether or not there are other ranks.
    """
    contents = disk.read_marker(path)
    with quiet():
        dcp.load({}, storage_reader=dcp.FileSystemReader(path), planner=LoadPieces(pieces(tensors)), no_dist=alone)
    return contents
