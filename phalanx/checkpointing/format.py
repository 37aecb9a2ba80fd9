"""The format of a checkpoint on disk: plain safetensors files of boxes of tensors, with checksums. Does not import torch.

    step-00000040/
        state-00003-of-00008.safetensors    rank 3's boxes
        state-00003-of-00008.json           its sidecar: checksums of the file's blocks, and a short index of the boxes
        …
        commit.json                         the marker, written last; without it the folder is not a checkpoint

**Rank file.** A safetensors file. Each of its tensors is one box of a tensor of the training state. The header's metadata has, under
DCP_SHARDING_INFO, a JSON table from key to `saved_offsets` (where the box begins in the whole tensor) and `whole` (the whole shape), as
torch's distributed checkpoint writes it, so that torch's HuggingFaceStorageReader reads these files. The key is the tensor's name. If a
rank writes several boxes of one tensor (of a fused [q|k|v] matrix, say), the second has the key NAME#1, the third NAME#2, …, and their
entries also have `tensor`, the name. The header is padded to whole pages; boxes follow in the header's order without gaps.

**Sidecar.** JSON; see `Sidecar`. Blocks of 16 MiB have a CRC-32 each, and the checksum of a file is the SHA-256 over those. They detect
damage, not forgery.

**Marker.** JSON; see `Marker`. It has the size and checksum of every other file, the tensor names of every pipeline stage, what the run
says about itself, and a checksum of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, TypedDict

from phalanx.checkpointing.location import Chunks, Location, retry
from phalanx.spec.json_value import Json
from phalanx.spec.layout import SavedLayout
from phalanx.spec.safetensors_index import SIZES
from phalanx.spec.tensor_slice import Box

BLOCK = 16 << 20
"""Bytes that have one checksum."""
FORMAT = 2
"""Version of the format."""
SUFFIX = ".safetensors"

_PLACES = "DCP_SHARDING_INFO"
_PAGE = 4096  # header and values begin at whole pages, so that they can be written with direct I/O
_CACHED_BLOCKS = 4  # per open file


# Checksums.


def file_checksum(block_sums: Sequence[int]) -> str:
    """A file's checksum from those of its blocks."""
    return hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in block_sums)).hexdigest()


def checksum_of(contents: bytes) -> str:
    """The checksum of a file with these contents."""
    return file_checksum([zlib.crc32(contents[begin : begin + BLOCK]) for begin in range(0, max(len(contents), 1), BLOCK)])


def read_block_sums(file: Location, progress: Callable[[int], object] = lambda count: None) -> list[int]:
    """Read a file and compute the checksums of its blocks, two at a time. `progress` is called with the bytes of each."""
    size = file.size() or 0

    def block_sum(begin: int) -> int:
        block = file.read_block(begin, min(BLOCK, size - begin))
        progress(len(block))
        return zlib.crc32(block)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(block_sum, range(0, max(size, 1), BLOCK)))


def write_file(file: Location, chunks: Chunks) -> list[int]:
    """Write a file from chunks of any length; returns the checksums of its blocks, which a thread computes meanwhile.

    The chunks of a list stay as they are, and are summed at the thread's own pace. Those of an iterator may be in the same memory, so
    each is summed before the next one is taken.
    """
    sums = _BlockSums()
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        if isinstance(chunks, list):
            summed = [pool.submit(sums.add, chunk) for chunk in chunks]
            file.write(chunks)
            for future in summed:
                future.result()
        else:
            file.write(_summed(chunks, sums, pool))
    return sums.found


def _summed(chunks: Chunks, sums: _BlockSums, pool: ThreadPoolExecutor) -> Iterator[memoryview | bytes]:
    for chunk in chunks:
        summed = pool.submit(sums.add, chunk)
        yield chunk
        summed.result()


class _BlockSums:
    """The checksums of the blocks of a file, from its bytes in order. An empty file has one block."""

    def __init__(self) -> None:
        self.found = [0]
        self._filled = 0

    def add(self, chunk: memoryview | bytes) -> None:
        view = memoryview(chunk).cast("B")
        while view:
            if self._filled == BLOCK:
                self.found.append(0)
                self._filled = 0
            part, view = view[: BLOCK - self._filled], view[BLOCK - self._filled :]
            self.found[-1] = zlib.crc32(part, self.found[-1])
            self._filled += len(part)


class DamagedFile(Exception):
    """A file does not have the contents that were saved."""


class CheckedFile:
    """Reads any bytes of a file and compares every block it reads with its checksum. Not thread-safe."""

    def __init__(self, file: Location, size: int, block_sums: Sequence[int]):
        self._file, self._size, self._sums = file, size, block_sums
        if len(block_sums) != max(1, math.ceil(size / BLOCK)):
            raise DamagedFile(f"its file {file.name} has checksums of {len(block_sums)} blocks for {size} bytes")
        self._pool = ThreadPoolExecutor(2)
        # Adjacent rows share a block.
        self._fetch = lru_cache(_CACHED_BLOCKS)(lambda number: self._pool.submit(self._read_block, number))

    def read(self, begin: int, into: memoryview, *, prefetch: bool = True) -> None:
        """Fill `into` with the bytes from `begin` on. `prefetch`: also start reading the block after them."""
        end = begin + len(into)
        if begin < 0 or end > self._size:
            raise DamagedFile(f"its file {self._file.name} has {self._size} bytes, of which {begin} to {end} were requested")
        first, last = begin // BLOCK, (max(end - 1, begin)) // BLOCK
        for number in range(first, last + 1):
            pending = self._fetch(number)
            if number < last or (prefetch and number + 1 < len(self._sums)):
                self._fetch(number + 1)
            part = memoryview(pending.result())[max(0, begin - number * BLOCK) : end - number * BLOCK]
            into[: len(part)] = part
            into = into[len(part) :]

    def _read_block(self, number: int) -> bytes | memoryview:
        begin = number * BLOCK
        size = min(BLOCK, self._size - begin)
        block = self._file.read_block(begin, size)
        if len(block) != size or zlib.crc32(block) != self._sums[number]:
            raise DamagedFile(
                f"its file {self._file.name} does not have the contents that were saved (bytes {begin} to {begin + size})"
            )
        return block

    def close(self) -> None:
        self._fetch.cache_clear()
        self._pool.shutdown(wait=False, cancel_futures=True)


# Rank files and their sidecars.


def rank_file_name(rank: int, ranks: int) -> str:
    return f"state-{rank:05d}-of-{ranks:05d}{SUFFIX}"


def sidecar_name(file: str) -> str:
    return file.removesuffix(SUFFIX) + ".json"


@dataclass(frozen=True, slots=True)
class SavedBox:
    """A box of a tensor in a rank file."""

    name: str
    dtype: str
    """By its safetensors name."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    begin: int = 0
    """Its first byte in the file."""

    @property
    def bytes(self) -> int:
        return self.box.numel * SIZES[self.dtype]


@dataclass(slots=True)
class SavedTensor:
    """A tensor of a checkpoint, and where its values are."""

    name: str
    dtype: str
    """By its safetensors name."""
    shape: tuple[int, ...]
    boxes: list[tuple[str, SavedBox]] = field(default_factory=list)
    """Files, and the boxes of the tensor in them."""

    @property
    def bytes(self) -> int:
        """Of all its boxes."""
        return sum(box.bytes for _, box in self.boxes)


def encode_header(boxes: Sequence[SavedBox]) -> bytes:
    """The safetensors header of a rank file with these boxes, which follow it in this order."""
    table: dict[str, object] = {}
    places: dict[str, dict[str, object]] = {}
    count: dict[str, int] = {}
    begin = 0
    for saved in boxes:
        number = count[saved.name] = count.get(saved.name, -1) + 1
        key = f"{saved.name}#{number}" if number else saved.name
        assert key not in table, f"two boxes have the key {key}"
        table[key] = {"dtype": saved.dtype, "shape": saved.box.shape, "data_offsets": [begin, begin + saved.bytes]}
        places[key] = {"saved_offsets": saved.box.offset, "whole": saved.whole} | ({"tensor": saved.name} if number else {})
        begin += saved.bytes
    table["__metadata__"] = {_PLACES: json.dumps(places), "format": "pt"}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


def decode_header(header: bytes | bytearray) -> list[SavedBox]:
    """The boxes of a rank file in file order. Raises ValueError, KeyError or TypeError if this is not such a header."""
    length = len(header) - 8
    if int.from_bytes(header[:8], "little") != length:
        raise ValueError(f"it announces another length than {length} bytes")
    table = json.loads(header[8:])
    places = json.loads(table.pop("__metadata__")[_PLACES])
    boxes = []
    for key, entry in table.items():
        place = places[key]
        box = Box(tuple(place["saved_offsets"]), tuple(entry["shape"]))
        begin = 8 + length + entry["data_offsets"][0]
        boxes.append(SavedBox(place.get("tensor", key), entry["dtype"], tuple(place["whole"]), box, begin))
    return sorted(boxes, key=lambda saved: saved.begin)


def read_header(file: CheckedFile, size: int) -> list[SavedBox]:
    """Like `decode_header`, of a file of `size` bytes."""
    start = bytearray(8)
    file.read(0, memoryview(start), prefetch=False)
    length = int.from_bytes(start, "little")
    if length > size - 8:
        raise ValueError(f"a header of {length} bytes does not fit into {size}")
    header = bytearray(8 + length)
    file.read(0, memoryview(header), prefetch=False)  # perhaps nothing else of this file is needed
    return decode_header(header)


def name_hash(name: str) -> int:
    """Stands for a tensor's name in a sidecar. Two names may share one: then a header is read in vain."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What stands next to a rank file."""

    file: str
    size: int
    """Bytes of the file."""
    tensors: int
    """Bytes of the file that are values of tensors."""
    crc32: Sequence[int]
    """Checksums of the file's blocks."""
    header: int | None = None
    """Checksum of the header, so that it can be trusted without reading a whole block. None in early files."""
    boxes: str | None = None
    """Hash of the name, offset and shape of every box. One string: of thousands of sidecars most are read for their checksums only."""
    stage: int
    """Pipeline stage of the rank. Ranks of one stage hold parts of the same tensors."""
    names: Mapping[str, int] | None = None
    """Names and total bytes of all tensors of the stage; written by one rank of each stage."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Sidecar:
        """Raises ValueError, KeyError or TypeError if this is not a sidecar."""
        table = json.loads(text)
        table.pop("block")
        return cls(size=table.pop("bytes"), **table)

    def to_json(self) -> bytes:
        table: dict[str, object] = {"file": self.file, "bytes": self.size, "tensors": self.tensors, "block": BLOCK}
        optional = {"header": self.header, "boxes": self.boxes, "stage": self.stage, "names": self.names}
        table |= {"crc32": list(self.crc32)} | {key: value for key, value in optional.items() if value is not None}
        return json.dumps(table).encode() + b"\n"

    def boxes_of(self, name_hashes: Mapping[int, Any]) -> Iterator[tuple[int, Box]]:
        """(name hash, box) of the boxes whose hash is among the given ones."""
        for entry in filter(None, (self.boxes or "").split(";")):
            hashed, _, place = entry.partition(" ")
            if (key := int(hashed)) in name_hashes:
                numbers = tuple(map(int, place.split()))
                half = len(numbers) // 2
                yield key, Box(numbers[:half], numbers[half:])


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file of a checkpoint: which one it is, and what it contains."""

    rank: int
    ranks: int
    boxes: Sequence[SavedBox]
    stage: int = 0
    names: Mapping[str, int] | None = None
    """As in `Sidecar`."""

    @property
    def name(self) -> str:
        return rank_file_name(self.rank, self.ranks)

    def sidecar(self, block_sums: Sequence[int] = ()) -> Sidecar:
        """What stands next to the file, if its blocks have these checksums."""
        header, values = encode_header(self.boxes), sum(saved.bytes for saved in self.boxes)
        index = ";".join(
            " ".join(map(str, (name_hash(saved.name), *saved.box.offset, *saved.box.shape))) for saved in self.boxes
        )
        return Sidecar(
            file=self.name, size=len(header) + values, tensors=values, crc32=block_sums, header=zlib.crc32(header), boxes=index,
            stage=self.stage, names=self.names,
        )  # fmt: skip


def write_rank_file(folder: Location, rank_file: RankFile, values: Callable[[], Chunks]) -> int:
    """Write a rank file and its sidecar; returns the bytes of the file. `values`: the bytes of the boxes, in order; called again if a
    store loses the connection and the file has to be sent again."""
    header, file = encode_header(rank_file.boxes), folder / rank_file.name

    def write() -> list[int]:
        chunks = values()
        return write_file(file, [header, *chunks] if isinstance(chunks, list) else itertools.chain([header], chunks))

    try:
        sums = write()
    except ConnectionError:
        sums = retry(f"{file} cannot be written", write)
    sidecar = rank_file.sidecar(sums)
    write_file(folder / sidecar_name(rank_file.name), [sidecar.to_json()])
    return sidecar.size


# The marker.


class SavedProgress(TypedDict, total=False):
    """How far a run had come: the fields of `training/run_progress.Progress`, as a checkpoint of this or an earlier version has them."""

    step: int
    samples: int
    skipped_in_a_row: int
    loss_scale: dict[str, float]
    spikes_in_a_row: int
    usual: dict[str, float]
    left_out: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
    """What a checkpoint says about its run besides the tensors. Written and read by training; keys of other versions are kept in `extra`."""

    progress: SavedProgress = field(default_factory=SavedProgress)
    seed: int | None = None
    data: str | None = None
    """Fingerprint of the training text; None for imported weights."""
    version: str | None = None
    """Of Phalanx."""
    torch: str | None = None
    layout: SavedLayout | None = None
    run: str | None = None
    """The resolved run file."""
    plan: str | None = None
    """The plan as JSON text."""
    replicas: int | None = None
    """Number of replicas with states of their own; None if all replicas are equal."""
    base: str | None = None
    """Digest of the weights below LoRA adapters; None if the checkpoint holds a whole model, or adapters of initial weights."""
    extra: Mapping[str, Json] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        known = {key: getattr(self, key) for key in _METADATA_KEYS}
        return {key: value for key, value in known.items() if value is not None or key == "data"} | dict(self.extra)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> RunMetadata:
        known = {key: value for key, value in table.items() if key in _METADATA_KEYS}
        return cls(**known, extra={key: value for key, value in table.items() if key not in _METADATA_KEYS})


_METADATA_KEYS = tuple(item.name for item in fields(RunMetadata) if item.name != "extra")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the marker says about a file."""

    bytes: int
    checksum: str
    stage: int | None = None
    """Of a rank file."""

    def to_json(self) -> dict[str, int | str]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What makes a folder a checkpoint: commit.json, written last."""

    step: int
    time: float | None = None
    """Seconds since 1970 when the checkpoint was complete."""
    names: Sequence[Sequence[str]] = ()
    """The tensors of each pipeline stage."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """Every other file."""
    run: RunMetadata = field(default_factory=RunMetadata)

    @property
    def rank_files(self) -> dict[str, FileRecord]:
        return {name: record for name, record in self.files.items() if name.endswith(SUFFIX)}

    def to_json(self) -> bytes:
        table = self.run.to_json() | {"step": self.step, "time": self.time, "format": FORMAT, "names": self.names}
        table |= {"files": {name: record.to_json() for name, record in self.files.items()}}
        return _marker_text(table | {"sha256": _marker_checksum(table)})

    @classmethod
    def from_json(cls, text: bytes) -> Marker:
        """Raises DamagedFile, with the reason, if the text is not exactly a marker that was written; ValueError if it is not JSON."""
        table = json.loads(text)
        if not isinstance(table, dict) or text != _marker_text(table):  # exactly: 1e-5 and 1E-5 are the same number
            raise DamagedFile("does not have the contents that were saved")
        if table.pop("sha256", None) != _marker_checksum(table):
            raise DamagedFile("does not have the contents that were saved")
        if (version := table.pop("format", 1)) != FORMAT:
            raise DamagedFile(f"was written in format {version}, this version reads format {FORMAT}")
        files = {name: FileRecord(**record) for name, record in table.pop("files").items()}
        own = {key: table.pop(key, None) for key in ("step", "time", "names")}
        return cls(**own, files=files, run=RunMetadata.from_json(table))


def _marker_text(table: Any) -> bytes:
    return json.dumps(table, indent=2).encode() + b"\n"


def _marker_checksum(table: Any) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
