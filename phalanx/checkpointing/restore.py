"""Reads tensors of a checkpoint of any layout. A rank reads for itself: the sidecars and headers tell which saved boxes overlap its slices,
and only the blocks of these are read, each compared with its checksum. Also compares two checkpoints, whatever layouts they were saved on, with
one block of each in memory (`phalanx checkpoint diff`)."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpointing.checkpoint_info import Difference
from phalanx.checkpointing.directory import CheckpointFiles, read_marker
from phalanx.checkpointing.format import BLOCK, Marker, SavedBox, SavedTensor, Sidecar, name_hash
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.state_tensor import DTYPES, StateTensor, as_state_tensors, raw_bytes
from phalanx.spec.errors import RunFailed
from phalanx.spec.fields import current_tensor, has_own_module, original_tensor
from phalanx.spec.tensor_slice import Box, TensorSlice


def load(path: Location | Path, tensors: Mapping[str, Tensor | StateTensor]) -> Marker:
    """Fill `tensors` in place from a checkpoint of any layout; returns its marker.

    Raises DamagedCheckpoint if something read is not what was saved; then some tensors may have new values and others old ones.
    """
    needed = as_state_tensors(tensors)
    with closing(CheckpointReader(path, needed)) as reader:
        reader.fill(needed)
        return reader.marker


@dataclass(frozen=True, slots=True)
class _Read:
    """Values to read: a region of a saved box, which becomes a region of a local tensor."""

    file: str
    saved: SavedBox
    source: Box
    target: Box


class CheckpointReader:
    """The tensors of a checkpoint by name. Raises DamagedCheckpoint if a byte that is read is not what was saved."""

    def __init__(self, path: Location | Path, needed: Mapping[str, StateTensor] | None = None):
        """`needed`: look only for boxes that overlap these slices; None: for all. For a tensor of which nothing is needed, one box
        is still looked up, because it has the whole shape."""
        self.path = open_location(path)
        self.marker = read_marker(self.path)
        self._files = CheckpointFiles(self.path, self.marker)
        self._needed = needed
        self._tensors: dict[str, SavedTensor] = {}
        # Modules of the built-in decoder had other names once.
        current = (lambda name: name) if has_own_module(self.marker.run.run or "") else current_tensor
        for file, sidecar in self._files.sidecars(self._files_of_needed_stages(current)):
            if self._may_need(sidecar):
                for saved in self._files.boxes(file, sidecar):
                    self._add(current(saved.name), file, saved)

    def _files_of_needed_stages(self, current: Callable[[str], str]) -> list[str]:
        needed = self._needed
        stages = {
            stage
            for stage, names in enumerate(self.marker.names)
            if needed is None or not needed.keys().isdisjoint(map(current, names))
        }
        return [name for name, record in self.marker.rank_files.items() if (record.stage or 0) in stages]

    def _may_need(self, sidecar: Sidecar) -> bool:
        """Of thousands of files a rank needs a few; the sidecars tell which."""
        if self._needed is None or sidecar.boxes is None:
            return True
        names = self._names_of_hashes
        pairs = ((name, box) for key, box in sidecar.boxes_of(names) for name in names[key])
        return any(name not in self._tensors or _overlaps(box, self._needed[name].slice) for name, box in pairs)

    @cached_property
    def _names_of_hashes(self) -> dict[int, list[str]]:
        hashes: dict[int, list[str]] = {}
        for name in self._needed or ():
            for saved_name in {name, original_tensor(name)}:
                hashes.setdefault(name_hash(saved_name), []).append(name)
        return hashes

    def _add(self, name: str, file: str, saved: SavedBox) -> None:
        if self._needed is not None and name not in self._needed:
            return
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = SavedTensor(name, saved.dtype, saved.whole)
        elif self._needed is not None and not _overlaps(saved.box, self._needed[name].slice):
            return
        tensor.boxes.append((file, saved))

    # Loading.

    def fill(self, tensors: Mapping[str, StateTensor]) -> None:
        """Read the values of these state tensors. RunFailed if the checkpoint does not have them."""
        reads = {name: self._reads(name, state.slice) for name, state in tensors.items()}
        in_memory = [
            (read, state.tensor.detach()[read.target.index])
            for name, state in tensors.items()
            if isinstance(state.tensor, Tensor)
            for read in reads[name]
        ]
        for read, target in sorted(in_memory, key=lambda pair: (pair[0].file, pair[0].saved.begin)):
            self._read(read, target)  # file by file, each from beginning to end
        for name, state in tensors.items():
            if not isinstance(state.tensor, Tensor) and reads[name]:  # one at a time, as they do not fit into memory
                values = state.tensor.read()
                for read in reads[name]:
                    self._read(read, values[read.target.index])
                state.tensor.write(values)

    def _reads(self, name: str, wanted: TensorSlice) -> list[_Read]:
        if 0 in wanted.whole:
            return []  # it has no values, and is in no file
        if name not in self._tensors:
            raise RunFailed(f"The checkpoint has no tensor {name}: it was saved by a run with other settings.")
        saved = self._tensors[name]
        if saved.shape != wanted.whole:
            raise RunFailed(
                f"The checkpoint has {name} of shape {list(saved.shape)}, but this run has {list(wanted.whole)}: it was saved by a "
                "run with other settings."
            )
        reads = [
            _Read(file, box, source, target)
            for file, box in saved.boxes
            for target, source in wanted.overlaps(TensorSlice(saved.shape, (box.box,)))
        ]
        if sum(read.source.numel for read in reads) != wanted.numel:
            raise RunFailed(f"The checkpoint does not have all of {name}: values of this rank's part are in none of its files.")
        return reads

    def _read(self, read: _Read, target: Tensor) -> None:
        """Read values into a tensor of the source's shape, and convert them to its number format."""
        saved, source = read.saved, read.source
        shape, offset, lengths = saved.box.shape or (1,), source.offset or (0,), source.shape or (1,)
        rows = target if saved.box.shape else target.view(1)
        dtype = DTYPES[saved.dtype]
        row = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, BLOCK // row)
        for first in range(0, lengths[0], step):
            count = min(step, lengths[0] - first)
            buffer = torch.frombuffer(mmap.mmap(-1, count * row), dtype=torch.uint8)  # the allocator would keep the memory
            self._files.read(read.file, saved.begin + (offset[0] + first) * row, raw_bytes(buffer))
            values = buffer.view(dtype).view(count, *shape[1:])
            for dim in range(1, len(shape)):
                values = values.narrow(dim, offset[dim], lengths[dim])
            rows.narrow(0, first, count).copy_(values)

    # Reading a tensor, or some rows of one, at a time.

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole shape; None if there is no such tensor."""
        return self._tensors[name].shape if name in self._tensors else None

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._tensors[name].dtype]

    def row_ranges(self, name: str, multiple: int = 1) -> list[tuple[int, int]]:
        """Ranges (first, last) of the first dimension that are about a block each, in multiples of `multiple` rows."""
        shape = self._tensors[name].shape or (1,)
        row = math.prod(shape[1:]) * self.dtype(name).itemsize
        step = max(1, BLOCK // max(1, row * multiple)) * multiple
        return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first … last, in the number format they are saved in; of a single number, the number."""
        whole = self._tensors[name].shape
        if not whole:
            return self.read_box(name, Box((), ()))
        end = whole[0] if last is None else last
        return self.read_box(name, Box((first, *[0] * (len(whole) - 1)), (end - first, *whole[1:])))

    def read_box(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, in the number format it is saved in."""
        values = torch.empty(box.shape, dtype=self.dtype(name))
        for read in self._reads(name, TensorSlice(self._tensors[name].shape, (box,))) if box.numel else ():
            self._read(read, values[read.target.index])
        return values

    def close(self) -> None:
        self._files.close()


def _overlaps(box: Box, wanted: TensorSlice) -> bool:
    if len(box.offset) != len(wanted.whole):
        return True  # of another tensor of this name; `fill` reports it
    return any(map(box.overlap, wanted.boxes))


# Comparing.


def compare(a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference | str]:
    """For each name in either: its difference, or only the name if the tensor is bitwise equal."""
    for name in sorted({*a.names, *b.names}):
        yield _compare(name, a, b) or name


def compare_metadata(a: CheckpointReader, b: CheckpointReader) -> dict[str, tuple[object, object]]:
    """What differs in the part of the state that is not in tensors. Version and layout of the run are not part of the state."""
    first, second = _state(a.marker), _state(b.marker)
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def _state(marker: Marker) -> dict[str, object]:
    run = marker.run
    return {"step": marker.step, "progress": run.progress, "seed": run.seed, "data": run.data, "replicas": run.replicas}


def _compare(name: str, a: CheckpointReader, b: CheckpointReader) -> Difference | None:
    shape_a, shape_b = a.shape(name), b.shape(name)
    if shape_a is None or shape_b is None:
        return Difference(name=name, kind="only in B" if shape_a is None else "only in A")
    if shape_a != shape_b:
        return Difference(name=name, kind="shape", a=str(list(shape_a)), b=str(list(shape_b)))
    formats = [str(reader.dtype(name)).removeprefix("torch.") for reader in (a, b)]
    unequal, largest, relative, values = 0, 0.0, 0.0, 0
    for first, last in a.row_ranges(name):
        left, right = a.read(name, first, last), b.read(name, first, last)
        values += left.numel()
        count, absolute, ratio = _differ(left, right)
        unequal += count
        largest, relative = max(largest, absolute), max(relative, ratio)
    same_format = formats[0] == formats[1]
    if not unequal and same_format:
        return None
    kind, (format_a, format_b) = ("values", ("", "")) if same_format else ("format", formats)
    return Difference(
        name=name, kind=kind, a=format_a, b=format_b, unequal=unequal, values=values, largest=largest, relative=relative
    )


def _differ(a: Tensor, b: Tensor) -> tuple[int, float, float]:
    """(number of values that differ, largest absolute difference, largest relative difference)."""
    if a.dtype == b.dtype:
        if torch.equal(_bits(a), _bits(b)):
            return 0, 0.0, 0.0
        differing = (_bits(a) != _bits(b)).view(a.numel(), -1).any(1)
    else:
        differing = a.double().view(-1) != b.double().view(-1)
    left, right = a.double().view(-1)[differing], b.double().view(-1)[differing]
    if not len(left):
        return 0, 0.0, 0.0
    apart = (left - right).abs()
    scale = torch.maximum(left.abs(), right.abs())
    apart[apart.isnan()] = torch.inf  # one is NaN, or both are NaN or infinite with different bits
    ratio = torch.where(apart == 0, 0.0, apart / scale)
    ratio[ratio.isnan()] = torch.inf
    return len(left), float(apart.max()), float(ratio.max())


def _bits(values: Tensor) -> Tensor:
    """As bits, a NaN equals itself, and -0 differs from 0."""
    return values.contiguous().view(-1).view(torch.uint8)
