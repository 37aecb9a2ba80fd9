"""Exports a checkpoint's tensors to files that need nothing of Phalanx: safetensors, or one file for torch.load. Every tensor is whole and
has its plain name; one block is in memory at a time. Called by `phalanx checkpoint export`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.checkpointing.hf_folder import WeightsWriter, write_at
from phalanx.checkpointing.location import atomic_directory
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.staging import raw_bytes
from phalanx.spec.errors import RunError, RunFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What was written."""

    tensors: int
    values: int
    bytes: int
    files: int
    formats: tuple[str, ...]


def exported_names(saved: CheckpointReader, *, optimizer: bool) -> dict[str, str]:
    """Exported name to name in the checkpoint: parameters without "model/", and states as optimizer/NAME/STATE."""
    model = {name.removeprefix("model/"): name for name in saved.names if name.startswith("model/")}
    return model | ({name: name for name in saved.names if not name.startswith("model/")} if optimizer else {})


class _Export:
    """Which tensors are exported, and in which number formats."""

    def __init__(self, saved: CheckpointReader, optimizer: bool, dtype: torch.dtype | None):
        self.saved, self.names = saved, exported_names(saved, optimizer=optimizer)
        self.dtypes = {name: self._dtype(original, dtype) for name, original in self.names.items()}

    def _dtype(self, original: str, dtype: torch.dtype | None) -> torch.dtype:
        stored = self.saved.dtype(original)
        return dtype if dtype is not None and stored.is_floating_point and original.startswith("model/") else stored

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.saved.shape(self.names[name])
        assert shape is not None
        return shape

    def summary(self, files: int) -> ExportSummary:
        sizes = {name: math.prod(self.shape(name)) for name in self.names}
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
        writer = WeightsWriter(partial, {name: (export.shape(name), export.dtypes[name]) for name in ordered}, shard_size)
        for name in ordered:
            shape = export.shape(name)
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
        raise RunError([f"{out} already exists: name a new file."])
    export = _Export(saved, optimizer, dtype)
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for name, begin in _write_without_values(partial, export).items():
            row = math.prod(export.shape(name)[1:]) * export.dtypes[name].itemsize
            for first, last in saved.row_ranges(export.names[name]):
                values = saved.read(export.names[name], first, last).to(export.dtypes[name])
                _write_values(partial, raw_bytes(values), begin + first * row)
        os.replace(partial, out)
    except OSError as error:
        raise RunFailed(f"{out} could not be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return export.summary(1)


def _write_without_values(file: Path, export: _Export) -> dict[str, int]:
    """Write a file of tensors without values; returns the offset of each tensor's values."""
    with FakeTensorMode():
        empty = {name: torch.empty(export.shape(name), dtype=dtype) for name, dtype in export.dtypes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(empty, file)
    with FakeTensorMode():
        tensors = torch.load(file, weights_only=True)
    return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in tensors.items()}


def _write_values(file: Path, data: memoryview, offset: int) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_at(fd, data, offset)
    finally:
        os.close(fd)
