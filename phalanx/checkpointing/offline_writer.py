"""Writes, from one process and with one block in memory at a time: checkpoints of imported weights or of another layout, and exports that
need nothing of Phalanx. Called by `phalanx import` and `phalanx checkpoint`.

Resharding is not needed to resume: any layout loads any checkpoint.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.checkpointing import directory
from phalanx.checkpointing.checkpoint_info import ReadNeed
from phalanx.checkpointing.format import BLOCK, RankFile, RunMetadata, SavedBox, SavedTensor, write_rank_file
from phalanx.checkpointing.hf_folder import WeightsWriter
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.state_tensor import DTYPE_NAMES, StateTensor, WrittenBox, raw_bytes, written_boxes
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.safetensors_index import SIZES
from phalanx.spec.tensor_slice import Box, TensorSlice

StateOfRank = Callable[[int], Mapping[str, StateTensor]]
"""What a rank of a layout holds, by name; only shapes and slices of the tensors are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor:
    """A tensor that is read box by box. It needs the memory of one box if the boxes are contiguous and in order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[tuple[Box, Callable[[], Tensor]]]
    """Each with a function that reads its values."""

    @property
    def in_order(self) -> bool:
        """Whether each box is contiguous in the whole tensor and follows the one before."""
        whole, end = torch.empty(self.shape, device="meta"), 0
        for box, _ in self.boxes:
            values = whole[box.index]
            if not values.is_contiguous() or values.storage_offset() != end:
                return False
            end += values.numel()
        return True

    def values(self) -> Iterator[memoryview]:
        """All of its bytes, in order."""
        if self.in_order:
            for _, read in self.boxes:
                yield raw_bytes(read())
            return
        whole = torch.empty(self.shape, dtype=self.dtype)
        for box, read in self.boxes:
            whole[box.index] = read()
        yield raw_bytes(whole)


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
            write_rank_file(partial, file, functools.partial(_values, saved, boxes))
        if missing := [name for name in saved.names if name not in seen]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RunError(
                f"{saved.path} has {missing[0]}{more}, which no rank of the layout would hold: it was saved by a run with other "
                "settings than its run file has."
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
                f"{saved.path} has {name} of shape {list(shape)}, the model of its run file {list(tensor.slice.whole)}: undo what was "
                "changed there."
            )
        present[name] = replace(tensor, tensor=torch.empty(tensor.slice.shape, dtype=saved.dtype(name), device="meta"))
    return present


def _values(saved: CheckpointReader, boxes: list[WrittenBox]) -> Iterator[memoryview]:
    for written in boxes:
        rows = written.box.shape[0] if written.box.shape else 0
        if not rows:  # a single number
            yield raw_bytes(saved.read_box(written.name, written.box))
        step = max(1, BLOCK // max(1, written.bytes // max(1, rows)))
        for first in range(0, rows, step):
            yield raw_bytes(saved.read_box(written.name, written.box.narrow(0, first, min(step, rows - first))))


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


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yields a directory to write into. It is renamed to `out` on success and removed on failure."""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} already exists: name a new directory, or an empty one.")
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        where = f" ({error.filename})" if error.strerror and error.filename else ""
        raise RunFailed(f"{out} could not be written: {error.strerror or error}{where}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What was written."""

    tensors: int
    values: int
    bytes: int
    files: int
    formats: tuple[str, ...]


class _Export:
    """Which tensors are exported, and in which number formats."""

    def __init__(self, saved: CheckpointReader, optimizer: bool, dtype: torch.dtype | None):
        self.names = {name.removeprefix("model/"): name for name in saved.names if optimizer or name.startswith("model/")}
        """Exported name to name in the checkpoint: parameters without "model/", and states as optimizer/NAME/STATE."""
        self.shapes = {name: saved.shape(original) or () for name, original in self.names.items()}
        self.dtypes = {name: saved.dtype(original) for name, original in self.names.items()}
        for name, stored in self.dtypes.items():
            if dtype is not None and stored.is_floating_point and name != self.names[name]:
                self.dtypes[name] = dtype

    def summary(self, files: int) -> ExportSummary:
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        return ExportSummary(
            tensors=len(sizes),
            values=sum(sizes.values()),
            bytes=sum(count * self.dtypes[name].itemsize for name, count in sizes.items()),
            files=files,
            formats=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in self.dtypes.values()})),
        )


def to_safetensors(
    saved: CheckpointReader, out: Path, *, optimizer: bool, dtype: torch.dtype | None, shard_size: int
) -> ExportSummary:
    """Write a folder: one file, or several with an index if one would be larger than `shard_size`."""
    export = _Export(saved, optimizer, dtype)
    ordered = sorted(export.names, key=lambda name: (-export.dtypes[name].itemsize, name))  # so that each tensor is aligned
    with atomic_directory(out) as partial:
        writer = WeightsWriter(partial, {name: (export.shapes[name], export.dtypes[name]) for name in ordered}, shard_size)
        for name in ordered:
            shape = export.shapes[name]
            rows = math.prod(shape[1:-1])  # the writer sees a matrix: all dimensions but the last are its rows
            for first, last in saved.row_ranges(export.names[name]):
                part = saved.read(export.names[name], first, last)
                writer.write(name, part.reshape(-1, shape[-1] if len(shape) > 1 else 1), first * rows)
    return export.summary(writer.files)


def to_torch(saved: CheckpointReader, out: Path, *, optimizer: bool, dtype: torch.dtype | None) -> ExportSummary:
    """Write one file that `torch.load(weights_only=True)` reads, also with mmap=True: a dictionary of tensors by name.

    torch writes the file without values, which are then written block by block. So the zip checksums, which torch.load ignores, are not
    those of the values.
    """
    if os.path.lexists(out):
        raise RunError(f"{out} already exists: name a new file.")
    export = _Export(saved, optimizer, dtype)
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for name, begin in _write_without_values(partial, export).items():
            row = math.prod(export.shapes[name][1:]) * export.dtypes[name].itemsize
            for first, last in saved.row_ranges(export.names[name]):
                values = saved.read(export.names[name], first, last).to(export.dtypes[name])
                with partial.open("r+b") as stream:
                    stream.seek(begin + first * row)
                    stream.write(raw_bytes(values))
        os.replace(partial, out)
    except OSError as error:
        raise RunFailed(f"{out} could not be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return export.summary(1)


def _write_without_values(file: Path, export: _Export) -> dict[str, int]:
    """Write a file of tensors without values; returns the offset of each tensor's values."""
    with FakeTensorMode():
        empty = {name: torch.empty(export.shapes[name], dtype=dtype) for name, dtype in export.dtypes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(empty, file)
    with FakeTensorMode():
        tensors = torch.load(file, weights_only=True)
    return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in tensors.items()}
