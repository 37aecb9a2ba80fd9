"""Folders of plain safetensors weights, as Hugging Face uses them, read and written a few rows at a time; and `ReferenceLogits`, to which an
export is compared. Reads use offsets, not memory maps, whose pages would count as memory of this process."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpointing.state_tensor import DTYPE_NAMES
from phalanx.spec import safetensors_index
from phalanx.spec.errors import RunError, RunFailed

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Number formats of weights, by their safetensors names."""
_MAX_PROBLEMS = 10
_REMEDY = "config.json and the weights must describe one model: save or download the folder again."

TensorTypes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and number format of tensors by name."""


class WeightsFolder:
    """The tensors of a folder by name. RunError, naming file and tensor, if its headers or sizes are wrong."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors = safetensors_index.stored(path)

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None if there is no such tensor."""
        return self.tensors[name].shape if name in self.tensors else None

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.tensors[name].dtype]

    def check(self, wanted: dict[str, tuple[int, ...]], ignored: Collection[str], same_format: list[list[str]]) -> None:
        """RunError unless every wanted tensor is there in its shape and a number format for weights, and no tensor is neither wanted nor
        ignored. `same_format`: groups of tensors that become one tensor."""
        missing = [name for name in wanted if name not in self.tensors]
        problems = [f"{self.path} lacks the tensor {name}, of shape {list(wanted[name])}." for name in missing]
        known = {*wanted, *ignored}
        for name, tensor in self.tensors.items():
            if name not in known:
                problems.append(f"{tensor.file} has the tensor {name}, which this kind of model does not have.")
            elif name in wanted and tensor.shape != wanted[name]:
                problems.append(
                    f"{tensor.file}: the tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(wanted[name])}."
                )
            elif name in wanted and tensor.dtype not in DTYPES:
                problems.append(
                    f"{tensor.file}: the tensor {name} is in {tensor.dtype}; weights are read in {', '.join(DTYPES)}."
                )
        for group in same_format:
            formats = {self.tensors[name].dtype: name for name in group if name in self.tensors}
            if len(formats) > 1:
                listed = ", ".join(f"{name} in {dtype}" for dtype, name in formats.items())
                problems.append(f"{self.path}: tensors that belong together differ in number format: {listed}.")
        if problems:
            more = len(problems) - _MAX_PROBLEMS
            rest = [f"… and {more} more like these."] if more > 0 else []
            raise RunError([*problems[:_MAX_PROBLEMS], *rest, _REMEDY])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a tensor seen as a matrix: all dimensions but the last are rows; of a vector, each value is a row."""
        tensor = self.tensors[name]
        width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        size = width * safetensors_index.SIZES[tensor.dtype]
        buffer = torch.empty((last - first) * size, dtype=torch.uint8)
        try:
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.begin + first * size)
                if stream.readinto(buffer.numpy().data) < len(buffer):
                    raise RunFailed(f"{tensor.file} has shrunk since it was opened.")
        except OSError as error:
            raise RunFailed(f"{tensor.file} can no longer be read ({error.strerror}).") from error
        return buffer.view(DTYPES[tensor.dtype]).view(last - first, width)


class WeightsWriter:
    """Writes a folder of safetensors. Headers and files of full size are written first; then tensors in any order and in parts."""

    def __init__(self, path: Path, tensors: TensorTypes, shard_size: int):
        self._dtypes = {name: dtype for name, (_, dtype) in tensors.items()}
        self.bytes = sum(_size(*tensor) for tensor in tensors.values())
        shards = _shards(tensors, shard_size)
        files: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = safetensors_index.SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_header(path / file, {name: tensors[name] for name in names})
            files |= dict.fromkeys(names, file)
        self.files = len(shards)
        if len(shards) > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": files}
            (path / safetensors_index.INDEX).write_text(json.dumps(index, indent=2) + "\n")
        self._tensors = safetensors_index.stored(path)

    def write(self, name: str, part: Tensor, first: int = 0, column: int | None = None) -> None:
        """Write rows of a tensor from `first` on: whole rows, or the values of each row from `column` on."""
        tensor, dtype = self._tensors[name], self._dtypes[name]
        width = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        matrix = part.to(dtype).contiguous().view(part.shape[0], -1)
        rows = [matrix] if column is None else matrix.unbind()
        with tensor.file.open("r+b") as stream:
            for number, row in enumerate(rows):
                stream.seek(tensor.begin + ((first + number) * width + (column or 0)) * dtype.itemsize)
                stream.write(row.contiguous().view(torch.uint8).numpy().data)


def _write_header(file: Path, tensors: TensorTypes) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + _size(shape, dtype)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants weights to begin at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shards(tensors: TensorTypes, max_size: int) -> list[list[str]]:
    """The tensors in order, in files of at most `max_size` bytes; a tensor is never split."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = _size(*tensor)
        if shards[-1] and filled + size > max_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceLogits:
    """A prompt and the logits that a model in training had at some of its positions when it was saved. Training writes it,
    `phalanx export --check` reads it."""

    tokens_S: Tensor
    positions_K: Tensor
    """Some positions are enough, as a vocabulary is large."""
    logits_KV: Tensor
    """In fp32, whatever they were computed in."""
    compute: str
    """The number format of the matrix products that computed them: fp32, bf16, fp16 or fp8."""
    scaling: str = "tensor"
    """fp8: what one scale is for."""
    fp8_blocks: range | None = None
    """fp8: the blocks that compute in it; None: all."""
    fp8_experts: bool = False
    """fp8: whether their routed experts do."""

    def write(self, file: Path) -> None:
        tensors = {"tokens": self.tokens_S, "places": self.positions_K, "logits": self.logits_KV}
        on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        blocks = {} if self.fp8_blocks is None else {"fp8_blocks": f"{self.fp8_blocks.start}-{self.fp8_blocks.stop}"}
        experts = {"fp8_experts": "true"} if self.fp8_experts else {}
        save_file(on_host, file, {"compute": self.compute, "scaling": self.scaling} | blocks | experts)


def read_reference(file: Path) -> ReferenceLogits:
    """RunError if it is no such file."""
    try:
        with safe_open(file, "pt") as opened:
            tokens, positions, logits = (opened.get_tensor(name) for name in ("tokens", "places", "logits"))
            metadata = opened.metadata()
        blocks = range(*map(int, metadata["fp8_blocks"].split("-"))) if "fp8_blocks" in metadata else None
        experts = "fp8_experts" in metadata
        return ReferenceLogits(tokens, positions, logits, metadata["compute"], metadata["scaling"], blocks, experts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is no file of logits to compare with ({error}): name one that a run has written.") from None
