"""A rank's file of a checkpoint: a safetensors file whose tensors are boxes, with their places in its header as torch's
distributed checkpoint writes them for such files (its HuggingFaceStorageReader reads them). Knows no tensors.

    state-00003-of-00008.safetensors    this rank's boxes
    state-00003-of-00008.json           checksums of the file's blocks; the names that the rank's stage holds, where it speaks for it
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.checkpointing.checksums import BLOCK, Checked
from phalanx.spec.safefiles import SIZES

SUFFIX = ".safetensors"
_PLACES = "DCP_SHARDING_INFO"
_ALIGNED = 4096  # a page: where it stands, and where the values behind it begin, a disk can take them directly


def file_name(rank: int, ranks: int) -> str:
    return f"state-{rank:05d}-of-{ranks:05d}{SUFFIX}"


def beside(file: str) -> str:
    """The name of what tells about a file of boxes."""
    return file.removesuffix(SUFFIX) + ".json"


def about(file: str, size: int, tensors: int, sums: list[int], boxes: Sequence[Box] | None = None) -> dict[str, Any]:
    """What is told about a file of boxes: its bytes, those of them that are values, its blocks' checksums and, in short, its boxes."""
    found = {"file": file, "bytes": size, "tensors": tensors, "block": BLOCK, "crc32": sums}
    if boxes is None:
        return found
    found["header"] = zlib.crc32(header(boxes))  # so that whoever looks for boxes need not read a block to trust its first page
    # As one string: whoever reads thousands of these for their checksums has no need to take it apart.
    return found | {"boxes": ";".join(" ".join(map(str, (mark(box.name), *box.offset, *box.shape))) for box in boxes)}


def mark(name: str) -> int:
    """A short sign for a tensor. Two may have the same: then a file is looked into in vain."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor in a file."""

    name: str
    dtype: str
    """As safetensors writes it."""
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int = 0
    """Its first byte in the file."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


def header(boxes: Sequence[Box]) -> bytes:
    """What stands before the boxes, which follow in this order without a gap. One box of a tensor, at most."""
    table: dict[str, object] = {}
    places, begin = {}, 0
    for box in boxes:
        assert box.name not in table, f"two boxes of {box.name} in one file"
        table[box.name] = {"dtype": box.dtype, "shape": box.shape, "data_offsets": [begin, begin + box.bytes]}
        places[box.name] = {"saved_offsets": box.offset, "whole": box.whole}
        begin += box.bytes
    table["__metadata__"] = {_PLACES: json.dumps(places), "format": "pt"}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def boxes(file: Checked, size: int) -> list[Box]:
    """The boxes of a file, in order; ValueError where its header is not one of these."""
    start = bytearray(8)
    file.read(0, memoryview(start), ahead=False)
    length = int.from_bytes(start, "little")
    if length > size - 8:
        raise ValueError(f"a header of {length} bytes does not fit into {size}")
    text = bytearray(8 + length)
    file.read(0, memoryview(text), ahead=False)  # perhaps nothing else of this file is needed
    return parsed(text)


def parsed(head: bytes | bytearray) -> list[Box]:
    """The boxes that a header tells of, in order; ValueError, KeyError or TypeError where it is not one of these."""
    length = len(head) - 8
    if int.from_bytes(head[:8], "little") != length:
        raise ValueError(f"it announces another length than {length} bytes")
    table = json.loads(head[8:])
    places = json.loads(table.pop("__metadata__")[_PLACES])
    found = []
    for name, entry in table.items():
        place = places[name]
        whole, offset, shape = tuple(place["whole"]), tuple(place["saved_offsets"]), tuple(entry["shape"])
        found.append(Box(name, entry["dtype"], whole, offset, shape, 8 + length + entry["data_offsets"][0]))
    return sorted(found, key=lambda box: box.begin)
