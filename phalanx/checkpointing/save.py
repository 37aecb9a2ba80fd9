"""State to disk, all ranks together. Called by the trainer between steps.

torch's distributed checkpoint writes the tensors: each rank its part, replicas share the work, and any later layout can
read the result. `checkpointing/disk` makes the whole atomic.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
from torch import Tensor

from phalanx.checkpointing import disk
from phalanx.checkpointing.pieces import Piece, SavePieces, pieces
from phalanx.checkpointing.quiet import quiet


class Ranks(Protocol):
    """The ranks that save together."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    def barrier(self) -> None: ...


def save(checkpoints: Path, step: int, tensors: Mapping[str, Tensor | Piece], contents: dict[str, Any], ranks: Ranks) -> Path:
    """Write a checkpoint of `tensors` (by name, whole or in parts) with `contents` (plain values) beside them; returns where it is.

    When it returns, on any rank, the checkpoint is complete.
    """
    partial = disk.folder(checkpoints, step).with_suffix(disk.PARTIAL)
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.barrier()
    # Commit syncs every file once. Nothing is copied ahead: one tensor at a time is asked for, and may live elsewhere.
    writer = dcp.FileSystemWriter(partial, sync_files=False, per_thread_copy_ahead=0)
    with quiet():
        dcp.save({}, storage_writer=writer, planner=SavePieces(pieces(tensors)), no_dist=ranks.ranks == 1)
    if ranks.rank == 0:
        disk.commit(partial, contents | {"step": step})
    ranks.barrier()
    return disk.folder(checkpoints, step)
