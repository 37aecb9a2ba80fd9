"""State from storage, into tensors that already lie where they belong. Called by the trainer, by sampling and by import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from phalanx.checkpointing.location import Location, at
from phalanx.checkpointing.quiet import quiet
from phalanx.checkpointing.shard_io import Reader
from phalanx.checkpointing.slices import LoadPieces, Piece, pieces
from phalanx.spec.errors import PhalanxError


def load(path: Location | Path, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Any]:
    """Fill `tensors` in place from a checkpoint of any layout; returns the plain values saved beside them.

    Each rank reads for itself, and only the rows it needs; what it reads is compared with the checksums. DamagedCheckpoint where
    something is wrong, and then the tensors may hold some of the new values and some of the old.
    """
    wanted = pieces(tensors)
    reader = Reader(at(path), wanted)
    try:
        reader.read_metadata()  # here, as torch would tell of a failure in words of its own
        with quiet():
            dcp.load({}, storage_reader=reader, planner=LoadPieces(wanted), no_dist=True)
    except CheckpointException as error:
        raise cause(error) from error
    finally:
        reader.close()
    return reader.marker


def cause(error: BaseException) -> BaseException:
    """What went wrong, out of the wrapping that torch gives it."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error


def reason(error: BaseException) -> str:
    """In words."""
    found = cause(error)
    if isinstance(found, OSError) and found.strerror:
        return f"{found.strerror} ({found.filename})" if found.filename else found.strerror
    return str(found) if isinstance(found, PhalanxError) else f"{type(found).__name__}: {found}"
