"""Writes a whole checkpoint from one process, with one block in memory at a time: imported weights, or a saved checkpoint as another layout
would have saved it. Called by `phalanx import` and `phalanx checkpoint reshard`; `read_needs` by `inspect --layout`.

The result is a checkpoint like any other. Resharding is not needed to resume: any layout loads any checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import BLOCK, RankFile, RunMetadata, SavedBox, SavedTensor, write_rank_file
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.staging import raw_bytes
from phalanx.checkpointing.state_tensor import DTYPE_NAMES, StateTensor, WrittenBox, written_boxes
from phalanx.spec.errors import RunError
from phalanx.spec.safetensors_index import SIZES
from phalanx.spec.tensor_slice import Box, TensorSlice

StateOfRank = Callable[[int], Mapping[str, StateTensor]]
"""What a rank of a layout holds, by name; only shapes and slices of the tensors are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedBox:
    """A box of a tensor, and how to get its values."""

    box: Box
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor:
    """A tensor that is read box by box. It needs the memory of one box if the boxes are contiguous and in order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[StreamedBox]

    @property
    def in_order(self) -> bool:
        boxes = [part.box for part in self.boxes]
        starts = [_flat_index(box.offset, self.shape) for box in boxes]
        consecutive = all(second - first == box.numel for (first, second), box in zip(pairwise(starts), boxes, strict=False))
        return consecutive and all(_is_contiguous(box.shape, self.shape) for box in boxes)

    def values(self) -> Iterator[memoryview]:
        """All of its bytes, in order."""
        if self.in_order:
            for part in self.boxes:
                yield raw_bytes(part.read())
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part in self.boxes:
            whole[part.box.index] = part.read()
        yield raw_bytes(whole)


def _flat_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    index = 0
    for begin, size in zip(offset, shape, strict=True):
        index = index * size + begin
    return index


def _is_contiguous(box: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box's values are contiguous in the whole: lengths of 1, then a range, then full dimensions."""
    cut = [dim for dim, (size, full) in enumerate(zip(box, shape, strict=True)) if size != full]
    return not cut or all(size == 1 for size in box[: cut[-1]])


def write_checkpoint(
    checkpoints: Location | Path, step: int, tensors: Sequence[StreamedTensor], metadata: RunMetadata | None = None
) -> Location:
    """Write a checkpoint of one rank file; returns where it is."""
    partial = directory.begin(checkpoints, step)
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    boxes = [SavedBox(t.name, DTYPE_NAMES[t.dtype], t.shape, Box((0,) * len(t.shape), t.shape)) for t in ordered]
    file = RankFile(0, 1, boxes, names={saved.name: saved.bytes for saved in boxes})
    write_rank_file(partial, file, lambda: (chunk for tensor in ordered for chunk in tensor.values()))
    return directory.commit(partial, step, metadata or RunMetadata())


def reshard(
    saved: CheckpointReader,
    state_of: StateOfRank,
    ranks_and_stages: tuple[int, int],
    checkpoints: Location,
    metadata: RunMetadata,
) -> Location:
    """Write a checkpoint as the ranks of another layout would have saved it, file by file the same; returns where it is."""
    ranks, stages = ranks_and_stages
    partial = directory.begin(checkpoints, saved.marker.step)
    seen: set[str] = set()
    try:
        for rank in range(ranks):
            state = _present(saved, state_of(rank))
            seen |= state.keys()
            boxes = written_boxes(state)
            stage, index = divmod(rank, ranks // stages)
            names = None if index else {name: tensor.whole_bytes for name, tensor in state.items()}
            file = RankFile(rank, ranks, [box.saved for box in boxes], stage, names)
            write_rank_file(partial, file, functools.partial(_all_values, saved, boxes))
        if missing := [name for name in saved.names if name not in seen]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RunError(
                [
                    f"{saved.path} has {missing[0]}{more}, which no rank of the layout would hold: it was saved by a run with other "
                    "settings than its run file has."
                ]
            )
        return directory.commit(partial, saved.marker.step, metadata, ranks)
    except BaseException:
        partial.remove()
        raise


def _present(saved: CheckpointReader, state: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """The tensors that the checkpoint has, in its number formats: imported weights have no optimizer states, for example."""
    present = {}
    for name, tensor in state.items():
        shape = saved.shape(name)
        if shape is None:
            continue
        if shape != tensor.slice.whole:
            raise RunError(
                [
                    f"{saved.path} has {name} of shape {list(shape)}, the model of its run file {list(tensor.slice.whole)}: undo what was "
                    "changed there."
                ]
            )
        present[name] = replace(tensor, tensor=torch.empty(tensor.slice.shape, dtype=saved.dtype(name), device="meta"))
    return present


def _all_values(saved: CheckpointReader, boxes: list[WrittenBox]) -> Iterator[memoryview]:
    return (chunk for box in boxes for chunk in _values(saved, box))


def _values(saved: CheckpointReader, written: WrittenBox) -> Iterator[memoryview]:
    if not written.box.shape:
        yield raw_bytes(saved.read_box(written.name, written.box))
        return
    rows = written.box.shape[0]
    step = max(1, BLOCK // max(1, written.bytes // max(1, rows)))
    for first in range(0, rows, step):
        yield raw_bytes(saved.read_box(written.name, written.box.narrow(0, first, min(step, rows - first))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadNeed:
    """What a rank would read of a checkpoint."""

    rank: int
    bytes: int
    files: int
    """Number of rank files that these bytes are in."""
    tensors: int


Cuts = dict[str, set[TensorSlice]]
"""The slices that ranks hold of each tensor."""


def read_needs(
    tensors: Mapping[str, SavedTensor], state_of: StateOfRank, ranks: Iterable[int], cuts: Cuts
) -> Iterator[ReadNeed]:
    """What ranks of a layout would read of a checkpoint. Adds the slices that they hold to `cuts`."""
    for rank in ranks:
        size, files, count = 0, set[str](), 0
        for name, state in state_of(rank).items():
            tensor = tensors.get(name)
            if tensor is None or state.slice.empty:
                continue
            cuts.setdefault(name, set()).add(state.slice)
            count += 1
            for file, saved in tensor.boxes:
                shared = sum(common.numel for own in state.slice.boxes if (common := saved.box.overlap(own)) is not None)
                if shared:
                    size += shared * SIZES[saved.dtype]
                    files.add(file)
        yield ReadNeed(rank=rank, bytes=size, files=len(files), tensors=count)
