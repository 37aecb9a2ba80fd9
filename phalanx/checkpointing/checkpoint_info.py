"""Describes folders of checkpoints from markers and headers, and finds damaged bytes. Called by `phalanx checkpoint`. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from phalanx.checkpointing import directory
from phalanx.checkpointing.directory import CheckpointFiles, DamagedCheckpoint
from phalanx.checkpointing.format import BLOCK, Marker, SavedTensor, file_checksum, read_block_sums
from phalanx.checkpointing.location import Location
from phalanx.spec.layout import SavedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A folder that is a checkpoint, or the rest of an interrupted save."""

    path: str
    step: int | None
    bytes: int
    """Of all its files."""
    time: float | None = None
    """Seconds since 1970 when it was complete."""
    ranks: int | None = None
    """Number of ranks that wrote it."""
    layout: SavedLayout | None = None
    version: str | None = None
    problem: str | None = None
    """Why it cannot be loaded; None: its marker is valid and every file has its size and, if `verified`, its contents."""
    verified: bool = False
    """Every byte was compared with its checksum."""
    leftover: bool = False
    """Left by an interrupted save, or a checkpoint that was replaced: ignored, and removed by the next save."""


def listing(checkpoints: Location, *, verify: bool = False) -> list[CheckpointInfo]:
    """Everything that saves have written there, newest first. `verify`: compare contents with their checksums, not only sizes."""
    infos = [describe(path, verify=verify) for path in directory.list_checkpoints(checkpoints)]
    infos += [
        CheckpointInfo(
            path=str(checkpoints / name), step=directory.step_of(checkpoints / name.split(".")[0]),
            bytes=sum((checkpoints / name).sizes().values()),
            problem="left by an interrupted save, or replaced by a newer checkpoint", leftover=True,
        )
        for name in directory.partial_names(checkpoints)
    ]  # fmt: skip
    return sorted(infos, key=lambda info: (-1 if info.step is None else info.step, not info.leftover), reverse=True)


def describe(path: Location, *, verify: bool = False) -> CheckpointInfo:
    info = CheckpointInfo(path=str(path), step=directory.step_of(path), bytes=sum(path.sizes().values()))
    try:
        marker = directory.read_marker(path)
        info = replace(
            info, step=marker.step, time=marker.time, ranks=len(marker.rank_files), layout=marker.run.layout,
            version=marker.run.version,
        )  # fmt: skip
        if verify:
            directory.verify(path)
    except DamagedCheckpoint as bad:
        return replace(info, problem=bad.reason)
    return replace(info, verified=verify)


def layout_text(layout: SavedLayout | None) -> str:
    """A layout in a few words: its degrees and settings that differ from a single process."""
    plain = {
        "zero": 3, "sequence": False, "context_method": "ring", "schedule": "1f1b", "cut": "counted", "stage_split": "counted",
    }  # fmt: skip
    words = [
        key if value is True else f"{key} {value}"
        for key, value in (layout or {}).items()
        if value not in (None, plain.get(key, 1))
    ]
    return ", ".join(words) or "one rank"


def tensors(path: Location, marker: Marker) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by name. Raises DamagedCheckpoint if a header is not what was saved."""
    found: dict[str, SavedTensor] = {}
    with closing(CheckpointFiles(path, marker)) as files:
        for file, sidecar in files.sidecars(list(marker.rank_files)):
            for saved in files.boxes(file, sidecar):
                found.setdefault(saved.name, SavedTensor(saved.name, saved.dtype, saved.whole)).boxes.append((file, saved))
    return dict(sorted(found.items()))


def bytes_by_kind(found: Mapping[str, SavedTensor]) -> dict[str, int]:
    """Bytes of parameters ("model"), of optimizer states ("optimizer"), and of everything else."""
    sizes: dict[str, int] = {}
    for name, tensor in found.items():
        kind = name.partition("/")[0]
        sizes[kind] = sizes.get(kind, 0) + tensor.bytes
    return sizes


def matching(found: Mapping[str, SavedTensor], pattern: str | None) -> Iterator[SavedTensor]:
    """Tensors whose names contain a text, or match it if it has *, ? or [."""
    wild = pattern is not None and any(sign in pattern for sign in "*?[")
    for name, tensor in found.items():
        if pattern is None or (fnmatchcase(name, pattern) if wild else pattern in name):
            yield tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDamage:
    """What is wrong with a file of a checkpoint."""

    file: str
    reason: str
    ranges: tuple[tuple[int, int], ...] = ()
    """Bytes [begin, end) that are not what was saved, in whole blocks; empty if that cannot be determined."""


def find_damage(path: Location, progress: Callable[[int], None] = lambda count: None) -> list[FileDamage]:
    """Compare every byte of a checkpoint with its checksum. `progress` is called with the number of bytes read."""
    try:
        marker = directory.parse_marker(path)
    except DamagedCheckpoint as bad:
        return [FileDamage(file=directory.MARKER, reason=bad.reason)]
    problems = directory.size_problems(path, marker)
    damages = [FileDamage(file=name, reason=f"it {problem}") for name, problem in problems.items()]
    for name in (name for name in marker.files if name not in problems):
        try:
            sums = read_block_sums(path / name, progress)
        except OSError as error:
            damages.append(FileDamage(file=name, reason=f"it cannot be read ({error})"))
            continue
        if file_checksum(sums) != marker.files[name].checksum:
            ranges = tuple(_changed_blocks(path, name, marker, sums))
            damages.append(FileDamage(file=name, reason="it does not have the contents that were saved", ranges=ranges))
    return damages


def _changed_blocks(path: Location, name: str, marker: Marker, sums: list[int]) -> Iterator[tuple[int, int]]:
    """Which bytes of a rank file have changed; none if its sidecar, which is then reported by itself, is damaged."""
    try:
        saved = CheckpointFiles(path, marker).sidecar(name).crc32 if name in marker.rank_files else ()
    except (DamagedCheckpoint, OSError, ValueError, KeyError):
        return
    for number, (then, now) in enumerate(zip(saved, sums, strict=False)):
        if then != now:
            yield number * BLOCK, min((number + 1) * BLOCK, marker.files[name].bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that differs between checkpoints A and B."""

    name: str
    kind: str
    """only in A, only in B, shape, format or values."""
    a: str = ""
    """What A has, if the shape or number format differs."""
    b: str = ""
    unequal: int = 0
    """Values that differ in any bit."""
    values: int = 0
    """Values of the whole tensor."""
    largest: float = 0.0
    """Largest absolute difference; infinite if only one of two values is a number."""
    relative: float = 0.0
    """Largest difference relative to the larger of the two values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadNeed:
    """What a rank would read of a checkpoint."""

    rank: int
    bytes: int
    files: int
    """Number of rank files that these bytes are in."""
    tensors: int
