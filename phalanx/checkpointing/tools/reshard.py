"""A checkpoint as another layout would have saved it, written by one process, a block in memory at a time; and what a layout would
have to read of a checkpoint. Called by `phalanx checkpoint reshard` and `inspect --layout`.

Neither is needed in order to train on: any layout loads any checkpoint. Whoever calls says what each rank of the layout holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.checkpointing import directory, stream
from phalanx.checkpointing.checksums import BLOCK
from phalanx.checkpointing.info import Held
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.rank_file import Box
from phalanx.checkpointing.shard_io import Holding, box, laid_out, raw
from phalanx.checkpointing.slices import Part, Piece, written
from phalanx.checkpointing.stream import Saved
from phalanx.spec.errors import RunError
from phalanx.spec.safefiles import SIZES

Holds = Callable[[int], Mapping[str, Piece]]
"""What a rank of a layout holds, by name; of the tensors only shapes and places are looked at."""


def reshard(saved: Saved, holds: Holds, shape: tuple[int, int], checkpoints: Location, contents: dict[str, Any]) -> Location:
    """Write `saved` as the ranks of a layout would have; `shape`: how many ranks in how many stages. Returns where it is.

    The bytes written add up to the tensors' or nothing is kept, as with every checkpoint.
    """
    ranks, stages = shape
    partial = directory.begin(checkpoints, contents["step"])
    seen: set[str] = set()
    try:
        for rank in range(ranks):
            pieces = _stored(saved, holds(rank))
            seen |= pieces.keys()
            parts = laid_out(written(pieces))
            stage, among = divmod(rank, ranks // stages)
            names = None if among else {name: piece.whole_bytes for name, piece in pieces.items()}
            values = (part for one in parts for part in _values(saved, one))
            stream.write_file(partial, (rank, ranks), [box(part) for part in parts], values, Holding(stage, names))
        if missing := [name for name in saved.names if name not in seen]:
            raise RunError(
                [
                    f"{saved.path} holds {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}, which no rank of the "
                    "layout would: it was saved by a run of other settings than its run file says."
                ]
            )
        return directory.commit(partial, contents, ranks)
    except BaseException:
        partial.remove()
        raise


def _stored(saved: Saved, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """The pieces of what a checkpoint has, in the format it has them: imported weights have no optimizer states, for example."""
    found = {}
    for name, piece in pieces.items():
        shape = saved.shape(name)
        if shape is None:
            continue
        if shape != piece.whole:
            raise RunError(
                [
                    f"{saved.path} has {name} of shape {list(shape)}, the model of its run file {list(piece.whole)}: undo what was changed there."
                ]
            )
        found[name] = replace(piece, tensor=torch.empty(piece.shape, dtype=saved.dtype(name), device="meta"))
    return found


def _values(saved: Saved, part: Part) -> Iterator[memoryview]:
    if not part.shape:
        yield raw(saved.read_box(part.name, (), ()))
        return
    row = math.prod(part.shape[1:]) * part.piece.tensor.dtype.itemsize
    step = max(1, BLOCK // max(1, row))
    for first in range(0, part.shape[0], step):
        offset = (part.offset[0] + first, *part.offset[1:])
        yield raw(saved.read_box(part.name, offset, (min(step, part.shape[0] - first), *part.shape[1:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a rank would read."""

    rank: int
    bytes: int
    files: int
    """That these lie in."""
    tensors: int


Cuts = dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]]
"""The boxes (offset, shape) that ranks hold of each tensor."""


def needs(tensors: Mapping[str, Held], holds: Holds, ranks: Iterable[int], cuts: Cuts) -> Iterator[Need]:
    """What ranks of a layout would read of a checkpoint; the boxes they hold are put into `cuts`."""
    for rank in ranks:
        size, files, count = 0, set[str](), 0
        for name, piece in holds(rank).items():
            held = tensors.get(name)
            if held is None or piece.empty:
                continue
            cuts.setdefault(name, set()).add((piece.offset, piece.shape))
            count += 1
            for file, stored in held.boxes:
                if shared := _shared(stored, piece):
                    size += shared * SIZES[stored.dtype]
                    files.add(file)
        yield Need(rank=rank, bytes=size, files=len(files), tensors=count)


def _shared(box: Box, piece: Piece) -> int:
    """Values that lie in both."""
    lengths = [
        min(a + n, b + m) - max(a, b) for a, n, b, m in zip(box.offset, box.shape, piece.offset, piece.shape, strict=True)
    ]
    return math.prod(lengths) if all(length > 0 for length in lengths) else 0
