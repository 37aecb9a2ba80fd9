"""Folders of safetensors, read and written a few rows at a time, whatever their size. Knows no model: a table of names does.

Everything is checked from the headers before a weight is read. Reading goes through explicit offsets rather than maps, whose
pages would count as this process's memory. Called by `phalanx import`, `export`, and wherever a model is filled from a folder.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpointing.shard_io import WORDS
from phalanx.spec import safetensors_index
from phalanx.spec.errors import RunError, RunFailed

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Formats of weights, as safetensors writes them."""
_MOST_PROBLEMS = 10
_AGAIN = "config.json and the weights must describe one model: save or download the folder again."


class WeightsFolder:
    """The tensors of a folder by name. RunError, naming file and tensor, where its headers or sizes are not right."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = safetensors_index.stored(path)

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None: there is no such tensor."""
        return self.tensors[name].shape if name in self.tensors else None

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.tensors[name].dtype]

    def check(self, wanted: dict[str, tuple[int, ...]], ignored: Collection[str], together: list[list[str]]) -> None:
        """Every wanted tensor is there in its shape and in a format for weights, and none that is neither wanted nor ignored.

        `together`: tensors that become one, and so must have one format.
        """
        problems = [
            f"{self.path} lacks the tensor {name}, of shape {list(wanted[name])}."
            for name in wanted
            if name not in self.tensors
        ]
        known = {*wanted, *ignored}
        for name, tensor in self.tensors.items():
            if name not in known:
                problems.append(f"{tensor.file} holds the tensor {name}, of which this kind of model knows nothing.")
            elif name in wanted and tensor.shape != wanted[name]:
                problems.append(
                    f"{tensor.file}: the tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(wanted[name])}."
                )
            elif name in wanted and tensor.dtype not in DTYPES:
                problems.append(
                    f"{tensor.file}: the tensor {name} is in {tensor.dtype}; weights are read in {', '.join(DTYPES)}."
                )
        for group in together:
            formats = {self.tensors[name].dtype: name for name in group if name in self.tensors}
            if len(formats) > 1:
                found = ", ".join(f"{name} in {dtype}" for dtype, name in formats.items())
                problems.append(f"{self.path}: tensors that belong together differ in format: {found}.")
        if problems:
            more = len(problems) - _MOST_PROBLEMS
            rest = [f"… and {more} more like these."] if more > 0 else []
            raise RunError([*problems[:_MOST_PROBLEMS], *rest, _AGAIN])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a tensor seen as a matrix: all dimensions but the last are rows, and of a vector each value."""
        tensor = self.tensors[name]
        width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        size = width * safetensors_index.SIZES[tensor.dtype]
        buffer = torch.empty((last - first) * size, dtype=torch.uint8)
        _read(tensor.file, tensor.begin + first * size, buffer.numpy().data)
        return buffer.view(DTYPES[tensor.dtype]).view(last - first, width)


def _read(file: Path, offset: int, into: memoryview) -> None:
    filled = 0
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while filled < len(into):  # one call may give less than it was asked for
                got = os.preadv(fd, [into[filled:]], offset + filled)
                if got == 0:
                    raise RunFailed(f"{file} has shrunk since it was opened.")
                filled += got
        finally:
            os.close(fd)
    except OSError as error:
        raise RunFailed(f"{file} can no longer be read ({error.strerror}).") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightsWriter:
    """A folder of safetensors whose tensors may be written in any order and in parts: headers and sizes are laid out first."""

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], shard_size: int):
        self.path = path
        self.bytes = sum(_size(*tensor) for tensor in tensors.values())
        shards = _shards(tensors, shard_size)
        self.places: dict[str, _Place] = {}
        files: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = safetensors_index.SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._lay_out(path / file, {name: tensors[name] for name in names})
            files |= dict.fromkeys(names, file)
        self.files = len(shards)
        if len(shards) > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": files}
            (path / safetensors_index.INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, part: Tensor, first: int = 0, column: int | None = None) -> None:
        """Rows of a tensor from `first` on; of each row what begins at `column`, or all of it."""
        place = self.places[name]
        width = place.shape[-1] if len(place.shape) > 1 else 1
        raw = part.to(place.dtype).contiguous().view(part.shape[0], -1)
        size = place.dtype.itemsize
        data = raw.view(torch.uint8).numpy()
        fd = os.open(place.file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if column is None:
                _write(fd, data.reshape(-1).data, place.begin + first * width * size)
            else:
                for row in range(len(data)):
                    _write(fd, data[row].data, place.begin + ((first + row) * width + column) * size)
        finally:
            os.close(fd)

    def _lay_out(self, file: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers looks for it
        offset = 0
        begins = {}
        for name, (shape, dtype) in tensors.items():
            begins[name] = offset
            end = offset + _size(shape, dtype)
            header[name] = {"dtype": WORDS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # weights begin at a multiple of 8, as the format wants
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
        for name, (shape, dtype) in tensors.items():
            self.places[name] = _Place(file, 8 + len(text) + begins[name], shape, dtype)


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shards(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], most: int) -> list[list[str]]:
    """The tensors in order, cut where a file would become larger than `most`; a tensor is never cut."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = _size(*tensor)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceLogits:
    """A prompt and the logits at some of its places."""

    tokens_S: Tensor
    places_K: Tensor
    """Where in the prompt: some places are enough, as a vocabulary is large."""
    logits_KV: Tensor
    """In fp32, whatever they were computed in."""
    compute: str
    """The number format of matrix products that they were computed in: fp32, bf16, fp16 or fp8."""
    scaling: str = "tensor"
    """fp8: what one scale is for."""

    def write(self, file: Path) -> None:
        tensors = {"tokens": self.tokens_S, "places": self.places_K, "logits": self.logits_KV}
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            file,
            {"compute": self.compute, "scaling": self.scaling},
        )


def read_reference(file: Path) -> ReferenceLogits:
    """RunError where it is no such file."""
    try:
        with safe_open(file, "pt") as inside:
            tokens, places, logits = (inside.get_tensor(name) for name in ("tokens", "places", "logits"))
            told = inside.metadata()
        return ReferenceLogits(tokens, places, logits, told["compute"], told["scaling"])
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise RunError([f"{file} is no file of logits to compare with ({error}): name one that a run has written."]) from None
