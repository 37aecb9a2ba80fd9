"""What lies in a folder of checkpoints and in each of them, told from markers and headers alone. Called by `phalanx checkpoint`.

Knows no tensors: of the files of boxes only the beginnings are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpointing import checksums, directory, rank_file
from phalanx.checkpointing.checksums import Checked
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.rank_file import Box
from phalanx.spec.safefiles import SIZES


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
    found = [told(path) for path in directory.listed(checkpoints)]
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
        found += [path.name for path in directory.listed(checkpoints) if (path / directory.MARKER).size() is None]
    return found


def _step(name: str) -> int | None:
    digits = name.removeprefix("step-").split(".")[0]
    return int(digits) if digits.isdigit() else None


def told(path: Location) -> CheckpointInfo:
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
        ranks=sum(name.endswith(rank_file.SUFFIX) for name in marker["files"]) if marker else None,
        layout=marker.get("layout"),
        version=marker.get("version"),
        problem=problem,
    )


def degrees(layout: Mapping[str, Any] | None) -> str:
    """A layout in a few words: what is not as in one process."""
    plain = {"zero": 3, "sequence": False, "context_method": "ring", "schedule": "1f1b", "cut": "counted"}
    said = [
        key if value is True else f"{key} {value}"
        for key, value in (layout or {}).items()
        if value not in (None, plain.get(key, 1))
    ]
    return ", ".join(said) or "one rank"


@dataclass(slots=True)
class Held:
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


def tensors(path: Location, marker: Mapping[str, Any]) -> dict[str, Held]:
    """What a checkpoint holds, by name; DamagedCheckpoint where a header is not what was saved."""
    found: dict[str, Held] = {}
    for file in marker["files"]:
        if file.endswith(rank_file.SUFFIX):
            for box in _boxes(path, file, marker["files"]):
                found.setdefault(box.name, Held(box.name, box.dtype, box.whole)).boxes.append((file, box))
    return dict(sorted(found.items()))


def _boxes(path: Location, file: str, files: Mapping[str, Any]) -> list[Box]:
    try:
        checked = Checked(path / file, files[file]["bytes"], sums(path, file, files))
        try:
            return rank_file.boxes(checked, files[file]["bytes"])
        finally:
            checked.close()
    except checksums.Damaged as error:
        raise DamagedCheckpoint(path, str(error)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(path, f"its file {file} has a header that cannot be read ({error})") from None


def sums(path: Location, file: str, files: Mapping[str, Any]) -> list[int]:
    """The checksums of a file's blocks, from what lies beside it."""
    beside = rank_file.beside(file)
    text = (path / beside).read()
    if checksums.whole_of(text) != files[beside]["checksum"]:
        raise checksums.Damaged(f"its file {beside} does not have the contents that were saved")
    found: list[int] = json.loads(text)["crc32"]
    return found


def values(held: Held) -> int:
    """Numbers in a tensor."""
    return held.bytes // SIZES[held.dtype]


def kinds(found: Mapping[str, Held]) -> dict[str, int]:
    """Bytes of parameters, of optimizer states, and of whatever else there is."""
    sizes: dict[str, int] = {}
    for name, one in found.items():
        kind = name.partition("/")[0]
        sizes[kind] = sizes.get(kind, 0) + one.bytes
    return sizes


def named_like(found: Mapping[str, Held], pattern: str | None) -> Iterator[Held]:
    """Those whose names contain a text, or match it where it has * or ?."""
    from fnmatch import fnmatchcase

    for name, one in found.items():
        wild = pattern is not None and any(sign in pattern for sign in "*?[")
        if pattern is None or (fnmatchcase(name, pattern) if wild else pattern in name):
            yield one
