"""What a survivor leaves in host memory when a generation of ranks ends: its live state, of which each of the living writes a share,
as a copy that any next generation restores. Called by training, on every rank that has the newest state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpointing import rank_file
from phalanx.checkpointing.replicas.memory_checkpoint import Slot, ask
from phalanx.checkpointing.replicas.shm_slots import HANDED, Copy, Shelf
from phalanx.checkpointing.shard_io import box, laid_out
from phalanx.checkpointing.slices import Piece, written


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the files of the handed-over state is this rank's."""

    generation: int
    index: int
    count: int
    stage: int
    names: bool
    """It tells, for its stage, what there is."""


def hand_over(folder: Path, share: Share, step: int, tensors: Mapping[str, Piece], contents: dict[str, Any]) -> int:
    """Copy, and return when it is there; the bytes. `folder`: of this node's holder. OSError where there is no room."""
    parts = laid_out(written(tensors))
    boxes = [box(part) for part in parts]
    head = rank_file.header(boxes)
    values = sum(part.bytes for part in parts)
    shelf = Shelf(folder)
    which = {"generation": share.generation, "rank": share.index}
    ask(shelf, {"op": "reserve", "bytes": len(head) + values, "slots": [HANDED], "alone": True} | which)
    device = next(
        (part.piece.tensor.device for part in parts if isinstance(part.piece.tensor, torch.Tensor)), torch.device("cpu")
    )
    slot = Slot(device, shelf.image(share.generation, share.index, HANDED), head, pin=False)
    slot.map(values)
    if parts:
        slot.begin(parts)
        slot.chunks()  # waits for it
    slot.close()
    about = rank_file.about(rank_file.file_name(share.index, share.count), len(head) + values, values, [], boxes) | {
        "stage": share.stage
    }
    if share.names:
        about["names"] = {name: piece.whole_bytes for name, piece in tensors.items()}
    copy = Copy(
        node=0,  # the holder knows
        generation=share.generation,
        rank=share.index,
        ranks=share.count,
        slot=HANDED,
        step=step,
        about=about,
        contents=contents | {"time": time.time()} if share.index == 0 else None,
    )
    ask(shelf, {"op": "seal", "copy": copy.to_json(), "alone": True})
    return copy.size
