"""What lies in a folder of checkpoints and in each of them, told from markers and headers alone. Called by `phalanx checkpoint`.

Knows no tensors: of the files of boxes only the beginnings are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.format import BLOCK, Box, Checked
from phalanx.checkpointing.location import Location
from phalanx.spec.safetensors_index import SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A folder that is a checkpoint, or was to become one."""

    path: str
    step: int | None
    bytes: int
    """Of all its files."""
    time: float | None
    """Seconds since 1970 when it was complete."""
    ranks: int | None
    """That wrote it."""
    layout: Mapping[str, Any] | None
    version: str | None
    problem: str | None
    """Why it must not be loaded; None: its marker is good and every file has its size."""
    leftover: bool = False
    """An interrupted save, or one that was replaced: never looked at, removed by the next save."""


def listing(checkpoints: Location) -> list[CheckpointInfo]:
    """Everything that saves have made there, newest first."""
    found = [describe(path) for path in directory.list_checkpoints(checkpoints)]
    found += [
        CheckpointInfo(
            path=str(checkpoints / name), step=_step(name), bytes=sum((checkpoints / name).sizes().values()), time=None, ranks=None,
            layout=None, version=None, problem="what an interrupted save left, or a checkpoint that was replaced", leftover=True,
        )
        for name in checkpoints.entries()
        if name.startswith("step-") and name.endswith(directory.PARTIAL)
    ]  # fmt: skip
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, not one.leftover), reverse=True)


def leftovers(checkpoints: Location) -> list[str]:
    """Names of what interrupted saves left. Where folders cannot be renamed, these bear a checkpoint's name but have no marker."""
    names = checkpoints.entries()
    found = [name for name in names if name.startswith("step-") and name.endswith(directory.PARTIAL)]
    # One that was set aside for another that never came is no leftover: the next launch puts it back.
    aside = {f"{name}.replaced{directory.PARTIAL}" for name in names}
    found = [name for name in found if ".replaced" not in name or name in aside]
    if not checkpoints.renames:
        found += [path.name for path in directory.list_checkpoints(checkpoints) if (path / directory.MARKER).size() is None]
    return found


def _step(name: str) -> int | None:
    digits = name.removeprefix("step-").split(".")[0]
    return int(digits) if digits.isdigit() else None


def describe(path: Location) -> CheckpointInfo:
    marker: dict[str, Any] = {}
    problem = None
    try:
        marker = directory.read_marker(path)
    except DamagedCheckpoint as bad:
        problem = bad.reason
    return CheckpointInfo(
        path=str(path),
        step=directory.step_of(path) if "step" not in marker else marker["step"],
        bytes=sum(path.sizes().values()),
        time=marker.get("time"),
        ranks=sum(name.endswith(format.SUFFIX) for name in marker["files"]) if marker else None,
        layout=marker.get("layout"),
        version=marker.get("version"),
        problem=problem,
    )


def layout_text(layout: Mapping[str, Any] | None) -> str:
    """A layout in a few words: what is not as in one process."""
    plain = {"zero": 3, "sequence": False, "context_method": "ring", "schedule": "1f1b", "cut": "counted"}
    said = [
        key if value is True else f"{key} {value}"
        for key, value in (layout or {}).items()
        if value not in (None, plain.get(key, 1))
    ]
    return ", ".join(said) or "one rank"


@dataclass(slots=True)
class SavedTensor:
    """A tensor of a checkpoint, and where it lies."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    boxes: list[tuple[str, Box]] = field(default_factory=list)
    """The files that it lies in, and which part of it each has."""

    @property
    def bytes(self) -> int:
        """Of all its boxes."""
        return sum(box.bytes for _, box in self.boxes)


def tensors(path: Location, marker: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """What a checkpoint holds, by name; DamagedCheckpoint where a header is not what was saved."""
    found: dict[str, SavedTensor] = {}
    for file in marker["files"]:
        if file.endswith(format.SUFFIX):
            for box in _boxes(path, file, marker["files"]):
                found.setdefault(box.name, SavedTensor(box.name, box.dtype, box.whole)).boxes.append((file, box))
    return dict(sorted(found.items()))


def _boxes(path: Location, file: str, files: Mapping[str, Any]) -> list[Box]:
    try:
        checked = Checked(path / file, files[file]["bytes"], sums(path, file, files))
        try:
            return format.boxes(checked, files[file]["bytes"])
        finally:
            checked.close()
    except format.Damaged as error:
        raise DamagedCheckpoint(path, str(error)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(path, f"its file {file} has a header that cannot be read ({error})") from None


def sums(path: Location, file: str, files: Mapping[str, Any]) -> list[int]:
    """The checksums of a file's blocks, from what lies beside it."""
    beside = format.beside(file)
    text = (path / beside).read()
    if format.whole_of(text) != files[beside]["checksum"]:
        raise format.Damaged(f"its file {beside} does not have the contents that were saved")
    found: list[int] = json.loads(text)["crc32"]
    return found


def values(held: SavedTensor) -> int:
    """Numbers in a tensor."""
    return held.bytes // SIZES[held.dtype]


def bytes_by_kind(found: Mapping[str, SavedTensor]) -> dict[str, int]:
    """Bytes of parameters, of optimizer states, and of whatever else there is."""
    sizes: dict[str, int] = {}
    for name, one in found.items():
        kind = name.partition("/")[0]
        sizes[kind] = sizes.get(kind, 0) + one.bytes
    return sizes


def matching(found: Mapping[str, SavedTensor], pattern: str | None) -> Iterator[SavedTensor]:
    """Those whose names contain a text, or match it where it has * or ?."""
    from fnmatch import fnmatchcase

    for name, one in found.items():
        wild = pattern is not None and any(sign in pattern for sign in "*?[")
        if pattern is None or (fnmatchcase(name, pattern) if wild else pattern in name):
            yield one


_OTHER = "it does not have the contents that were saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDamage:
    """What is wrong with a file of a checkpoint."""

    file: str
    reason: str
    ranges: tuple[tuple[int, int], ...] = ()
    """Bytes [begin, end) that are not what was saved, as far as that can be told; to a block, which is what has a checksum."""


def find_damage(path: Location, progress: Callable[[int], None] = lambda count: None) -> list[FileDamage]:
    """Everything that is wrong with a checkpoint; `progress` is told of bytes that have been read."""
    try:
        marker = directory.sealed(path)
    except directory.DamagedCheckpoint as bad:
        return [FileDamage(file=directory.MARKER, reason=bad.reason)]
    sizes, found = path.sizes(), []
    for name, expected in marker["files"].items():
        wrong = None
        if name not in sizes:
            wrong = FileDamage(file=name, reason="it is missing")
        elif sizes[name] != expected["bytes"]:
            wrong = FileDamage(file=name, reason=f"it has {sizes[name]} bytes instead of {expected['bytes']}")
        else:
            try:
                wrong = _damage(path, name, marker["files"], progress)
            except OSError as error:
                wrong = FileDamage(file=name, reason=f"it cannot be read ({error})")
        if wrong is not None:
            found.append(wrong)
    return found


def _damage(path: Location, name: str, files: Mapping[str, Any], progress: Callable[[int], None]) -> FileDamage | None:
    known = _known(path, name, files)
    if known is None:
        right = format.digest(path / name) == files[name]["checksum"]
        progress(files[name]["bytes"])
        return None if right else FileDamage(file=name, reason=_OTHER)
    size, buffer = files[name]["bytes"], bytearray(BLOCK)
    checked = Checked(path / name, size, known)
    wrong: list[tuple[int, int]] = []
    try:
        for begin in range(0, size, BLOCK):
            end = min(begin + BLOCK, size)
            try:
                checked.read(begin, memoryview(buffer)[: end - begin])
            except format.Damaged:
                wrong.append((begin, end))
            progress(end - begin)
    finally:
        checked.close()
    return FileDamage(file=name, reason=_OTHER, ranges=tuple(wrong)) if wrong else None


def _known(path: Location, name: str, files: Mapping[str, Any]) -> list[int] | None:
    """The checksums of a file's blocks; None where it has none, or where they are damaged themselves, which is told by itself."""
    if not name.endswith(format.SUFFIX):
        return None
    try:
        found = sums(path, name, files)
    except (format.Damaged, OSError, ValueError, KeyError):
        return None
    return found if format.whole(found) == files[name]["checksum"] else None
