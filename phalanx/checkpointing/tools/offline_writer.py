"""A checkpoint as another layout would have saved it, written by one process, a block in memory at a time; and what a layout would
have to read of a checkpoint. Called by `phalanx checkpoint reshard` and `inspect --layout`.

Neither is needed in order to train on: any layout loads any checkpoint. Whoever calls says what each rank of the layout holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.format import BLOCK, Box
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.shard_io import WORDS, Holding, box, laid_out, raw
from phalanx.checkpointing.state_tensor import Part, StateTensor, written
from phalanx.checkpointing.tools.checkpoint_info import SavedTensor
from phalanx.spec.errors import RunError
from phalanx.spec.safetensors_index import SIZES

Holds = Callable[[int], Mapping[str, StateTensor]]
"""What a rank of a layout holds, by name; of the tensors only shapes and places are looked at."""


def reshard(
    saved: CheckpointReader, holds: Holds, shape: tuple[int, int], checkpoints: Location, contents: dict[str, Any]
) -> Location:
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
            write_file(partial, (rank, ranks), [box(part) for part in parts], values, Holding(stage, names))
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


def _stored(saved: CheckpointReader, pieces: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
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


def _values(saved: CheckpointReader, part: Part) -> Iterator[memoryview]:
    if not part.shape:
        yield raw(saved.read_box(part.name, (), ()))
        return
    row = math.prod(part.shape[1:]) * part.piece.tensor.dtype.itemsize
    step = max(1, BLOCK // max(1, row))
    for first in range(0, part.shape[0], step):
        offset = (part.offset[0] + first, *part.offset[1:])
        yield raw(saved.read_box(part.name, offset, (min(step, part.shape[0] - first), *part.shape[1:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadNeed:
    """What a rank would read."""

    rank: int
    bytes: int
    files: int
    """That these lie in."""
    tensors: int


Cuts = dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]]
"""The boxes (offset, shape) that ranks hold of each tensor."""


def read_needs(tensors: Mapping[str, SavedTensor], holds: Holds, ranks: Iterable[int], cuts: Cuts) -> Iterator[ReadNeed]:
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
        yield ReadNeed(rank=rank, bytes=size, files=len(files), tensors=count)


def _shared(box: Box, piece: StateTensor) -> int:
    """Values that lie in both."""
    lengths = [
        min(a + n, b + m) - max(a, b) for a, n, b, m in zip(box.offset, box.shape, piece.offset, piece.shape, strict=True)
    ]
    return math.prod(lengths) if all(length > 0 for length in lengths) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedBox:
    """A box of a tensor, and how to get its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor:
    """A tensor that is not whole in memory, where its chunks follow each other as its values do."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[StreamedBox]

    @property
    def in_order(self) -> bool:
        starts = [_start(chunk.offsets, self.shape) for chunk in self.chunks]
        sizes = [math.prod(chunk.sizes) for chunk in self.chunks]
        following = all(second - first == size for (first, second), size in zip(pairwise(starts), sizes, strict=False))
        return following and all(_in_one_piece(chunk.sizes, self.shape) for chunk in self.chunks)

    def values(self) -> Iterator[memoryview]:
        """All of its bytes, in order."""
        if self.in_order:
            for chunk in self.chunks:
                yield raw(chunk.read())
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = chunk.read()
        yield raw(whole)


def _start(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    place = 0
    for offset, size in zip(offsets, shape, strict=True):
        place = place * size + offset
    return place


def _in_one_piece(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box's values stand side by side in the whole: ones first, then a range, then all."""
    cut = [dim for dim, (size, all_) in enumerate(zip(sizes, shape, strict=True)) if size != all_]
    return not cut or all(size == 1 for size in sizes[: cut[-1]])


def write_checkpoint(
    checkpoints: Location | Path, step: int, tensors: Sequence[StreamedTensor], contents: dict[str, Any]
) -> Location:
    """Write a checkpoint of `tensors`, chunk by chunk, with `contents` beside them; returns where it is."""
    partial = directory.begin(checkpoints, step)
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    whole = [Box(t.name, WORDS[t.dtype], t.shape, (0,) * len(t.shape), t.shape) for t in ordered]
    holding = Holding(0, {box.name: box.bytes for box in whole})
    write_file(partial, (0, 1), whole, (part for tensor in ordered for part in tensor.values()), holding)
    return directory.commit(partial, contents | {"step": step})


def write_file(
    folder: Location, place: tuple[int, int], boxes: Sequence[Box], values: Iterator[memoryview], holding: Holding
) -> None:
    """One rank's file of a checkpoint, and what tells about it, where all ranks are written by one process; `place`: rank, ranks."""
    name, head = format.file_name(*place), format.header(boxes)

    def chunks() -> Iterator[memoryview | bytes]:
        yield head
        yield from values

    sums = format.write(folder / name, chunks())
    size = sum(box.bytes for box in boxes)
    about = format.about(name, len(head) + size, size, sums, boxes) | {"stage": holding.stage}
    if holding.names is not None:
        about["names"] = dict(holding.names)
    format.write(folder / format.beside(name), [json.dumps(about).encode() + b"\n"])
