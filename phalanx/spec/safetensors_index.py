"""The tensors of a folder of safetensors files, from its index and headers alone: reads no weights and needs no torch. Used by
`spec/hf_config` and by `checkpointing/hf_folder`, which reads the data."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.spec.errors import RunError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
"""Bytes per value of each safetensors format."""
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file."""

    file: Path
    dtype: str
    """As safetensors writes it, such as "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name. Raises RunError if something is broken; each file's size is compared with its header."""
    index = folder / INDEX
    for path in (index, folder / SINGLE):
        if os.path.lexists(path) and not path.is_file():
            raise RunError(f"{path} is not a file: it is a folder or a broken link. {_AGAIN}")
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise RunError(_no_weights(folder))
        return header(folder / SINGLE)
    shards = _weight_map(index)
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    for shard in sorted(set(shards.values())):
        try:
            inside = header(folder / shard)
        except RunError as error:
            problems += error.problems
            continue
        expected = {name for name, file in shards.items() if file == shard}
        missing, foreign = sorted(expected - inside.keys()), sorted(inside.keys() - expected)
        problems += [f"{index} places the tensor {name} in {shard}, which does not have it." for name in missing]
        problems += [f"{folder / shard} holds the tensor {name}, which {index.name} does not place there." for name in foreign]
        tensors |= inside
    if problems:
        raise RunError(problems[:10])
    return tensors


def names(folder: Path) -> set[str]:
    """The names of a folder's tensors; empty if it holds no weights."""
    if (folder / INDEX).is_file():
        return set(_weight_map(folder / INDEX))
    return set(header(folder / SINGLE)) if (folder / SINGLE).is_file() else set()


def files(folder: Path) -> list[str]:
    """The shards that a folder's index names, whether or not they exist."""
    return sorted(set(_weight_map(folder / INDEX).values()))


def header(file: Path) -> dict[str, Stored]:
    """The tensors of one file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= min(size - 8, _LONGEST_HEADER) else b""
    except FileNotFoundError:
        raise RunError(f"{file} is missing. {_AGAIN}") from None
    except OSError as error:
        raise RunError(f"{file} cannot be read ({error.strerror or error}).") from None
    if len(start) < 8 or len(text) < length:
        short = f"its {size} bytes cannot hold the header it announces"
        raise RunError(f"{file} is not a safetensors file, or was cut short: {short}. {_AGAIN}")
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        tensors = {name: _stored(file, entry, 8 + length) for name, entry in table.items()}
        if not all(name.isprintable() for name in tensors):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{file} does not have a safetensors header. {_AGAIN}") from None
    if (problem := _inconsistency(tensors, 8 + length, size)) is not None:
        raise RunError(f"{file}{problem}. {_AGAIN}")
    return tensors


_AGAIN = "Copy or download the file again."


def _stored(file: Path, entry: dict[str, Any], base: int) -> Stored:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    valid = all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape))
    if not valid or begin > end or not isinstance(entry["dtype"], str):
        raise ValueError
    return Stored(file, entry["dtype"], shape, base + begin, base + end)


def _inconsistency(tensors: dict[str, Stored], base: int, size: int) -> str | None:
    """Why the tensors do not fill the file without gap or overlap, as the format requires; None if each has its bytes."""
    position = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        given, needed = tensor.end - tensor.begin, math.prod(tensor.shape) * SIZES.get(tensor.dtype, 0)
        if tensor.dtype in SIZES and given != needed:
            what = f"the tensor {name} of shape {list(tensor.shape)} in {tensor.dtype}"
            return f": {what} needs {needed} bytes, but the header gives it {given}"
        if tensor.end > size:
            return f" was cut short: the tensor {name} ends at byte {tensor.end}, the file at {size}"
        if tensor.begin != position:
            return f": the tensor {name} begins at byte {tensor.begin}; the one before it ends at {position}"
        position = tensor.end
    return None if position == size else f" has {size} bytes, of which its tensors need {position}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        table = json.loads(index.read_text())["weight_map"]
        shards = dict(table.items())
        if not all(isinstance(file, str) and file.isprintable() for file in shards.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError(f'{index} is not the index of a sharded model: it has no readable "weight_map". {_AGAIN}') from None
    outside = [file for file in shards.values() if os.path.basename(file) != file]
    if outside:
        raise RunError(f"{index} names the shard {outside[0]!r}, which is not a file of this folder.")
    return shards


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder."
    others = sorted(path.name for path in folder.glob("*.bin")) or sorted(path.name for path in folder.glob("*.safetensors"))
    has = f" It has {others[0]}: save the model again with transformers, which writes that file." if others else ""
    return f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there.{has}"
