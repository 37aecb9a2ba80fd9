"""A checkpoint's tensors as files that need nothing of Phalanx: safetensors, or one file for torch.load. Every tensor is whole in
them and goes by its plain name; a block of one is in memory at a time. Called by `phalanx checkpoint export`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.checkpointing.hf_folder import WeightsWriter
from phalanx.checkpointing.location import atomic_directory
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.shard_io import raw
from phalanx.spec.errors import RunError, RunFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written."""

    tensors: int
    values: int
    bytes: int
    files: int
    formats: tuple[str, ...]


def chosen(saved: CheckpointReader, *, optimizer: bool) -> dict[str, str]:
    """Names in the checkpoint by their names outside: those of the model bare, states as optimizer/NAME/STATE."""
    found = {name.removeprefix("model/"): name for name in saved.names if name.startswith("model/")}
    return found | ({name: name for name in saved.names if not name.startswith("model/")} if optimizer else {})


class _Plan:
    """Which tensors go out, and in which format."""

    def __init__(self, saved: CheckpointReader, optimizer: bool, dtype: torch.dtype | None):
        self.saved, self.names = saved, chosen(saved, optimizer=optimizer)
        self.formats = {name: self._format(theirs, dtype) for name, theirs in self.names.items()}

    def _format(self, theirs: str, dtype: torch.dtype | None) -> torch.dtype:
        stored = self.saved.dtype(theirs)
        return dtype if dtype is not None and stored.is_floating_point and theirs.startswith("model/") else stored

    def shape(self, name: str) -> tuple[int, ...]:
        found = self.saved.shape(self.names[name])
        assert found is not None
        return found

    def told(self, files: int) -> Written:
        sizes = {name: math.prod(self.shape(name)) for name in self.names}
        return Written(
            tensors=len(sizes),
            values=sum(sizes.values()),
            bytes=sum(count * self.formats[name].itemsize for name, count in sizes.items()),
            files=files,
            formats=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in self.formats.values()})),
        )


def to_safetensors(
    saved: CheckpointReader, out: Path, *, optimizer: bool, dtype: torch.dtype | None, shard_size: int
) -> Written:
    """A folder of them: one file, or several and an index where they would be larger than `shard_size`."""
    plan = _Plan(saved, optimizer, dtype)
    ordered = sorted(plan.names, key=lambda name: (-plan.formats[name].itemsize, name))  # so that each begins where it may
    with atomic_directory(out) as unfinished:
        writer = WeightsWriter(unfinished, {name: (plan.shape(name), plan.formats[name]) for name in ordered}, shard_size)
        for name in ordered:
            shape = plan.shape(name)
            rows = math.prod(shape[1:-1])  # the writer sees a matrix: all dimensions but the last are its rows
            for first, last in saved.parts(plan.names[name]):
                part = saved.read(plan.names[name], first, last)
                writer.write(name, part.reshape(-1, shape[-1] if len(shape) > 1 else 1), first * rows)
    return plan.told(writer.files)


def to_torch(saved: CheckpointReader, out: Path, *, optimizer: bool, dtype: torch.dtype | None) -> Written:
    """One file that `torch.load(weights_only=True)` reads, also with mmap=True: a dictionary of tensors by name.

    torch writes the file with room for the values, which are then put there one after the other. So the checksums that zip files
    have, which torch.load does not look at, are not those of the values.
    """
    if os.path.lexists(out):
        raise RunError([f"{out} is already there: name a new file."])
    plan = _Plan(saved, optimizer, dtype)
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for name, place in _with_room(partial, plan).items():
            row = math.prod(plan.shape(name)[1:]) * plan.formats[name].itemsize
            for first, last in saved.parts(plan.names[name]):
                values = saved.read(plan.names[name], first, last).to(plan.formats[name])
                _put(partial, raw(values), place + first * row)
        os.replace(partial, out)
    except OSError as error:
        raise RunFailed(f"{out} could not be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return plan.told(1)


def _with_room(file: Path, plan: _Plan) -> dict[str, int]:
    """Writes a file of tensors without values; returns where the values of each belong."""
    with FakeTensorMode():
        empty = {name: torch.empty(plan.shape(name), dtype=dtype) for name, dtype in plan.formats.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(empty, file)
    with FakeTensorMode():
        there = torch.load(file, weights_only=True)
    return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in there.items()}


def _put(file: Path, data: memoryview, offset: int) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while data:
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done
    finally:
        os.close(fd)
