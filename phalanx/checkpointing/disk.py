"""Checkpoints as directories: a name per step, a commit marker written last, the newest valid one found. Knows no tensors.

A checkpoint is written into `step-N.partial` and renamed when its marker, with the size and checksum of every file and
of itself, is on disk. So a directory without the suffix is complete, or was damaged afterwards, and then the marker tells.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.spec.errors import PhalanxError

MARKER = "commit.json"
PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)")


class DamagedCheckpoint(PhalanxError):
    """A checkpoint that must not be loaded."""

    def __init__(self, path: Path, reason: str):
        self.path, self.reason = path, reason
        super().__init__(f"{path} is damaged: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)  # one rank tells the others; by itself, only the message would travel


def folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def commit(partial: Path, contents: dict[str, Any]) -> Path:
    """Make a written directory a checkpoint: sync its files, write the marker, give it its name. Returns the new path."""
    files = {}
    for file in sorted(p for p in partial.iterdir() if p.is_file()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
        _sync(file)
    marker = partial / MARKER
    whole = contents | {"files": files}
    marker.write_text(json.dumps(whole | {"sha256": _seal(whole)}, indent=2) + "\n")
    _sync(marker)
    _sync(partial)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    if final.exists():  # damaged, or a step that was taken again: the new one replaces it
        replaced = final.with_name(f"{final.name}.replaced{PARTIAL}")
        shutil.rmtree(replaced, ignore_errors=True)  # from a replacement that was killed before it was tidied up
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)
    return final


def read_marker(path: Path) -> dict[str, Any]:
    """What was saved besides tensors; raises DamagedCheckpoint if the directory is not a whole checkpoint."""
    try:
        marker: dict[str, Any] = json.loads((path / MARKER).read_text())
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"it has no {MARKER}, so its writing was never finished") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(path, f"its {MARKER} cannot be read ({error})") from None
    seal = marker.pop("sha256", None) if isinstance(marker, dict) else None
    if seal != _seal(marker):
        raise DamagedCheckpoint(path, f"its {MARKER} does not have the contents that were saved")
    for name, expected in marker["files"].items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpoint(path, f"its file {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise DamagedCheckpoint(path, f"its file {name} has {file.stat().st_size} bytes instead of {expected['bytes']}")
    return marker


def verify(path: Path) -> None:
    """Compare every file with the checksum in the marker."""
    for name, expected in read_marker(path)["files"].items():
        if _digest(path / name) != expected["sha256"]:
            raise DamagedCheckpoint(path, f"its file {name} does not have the contents that were saved")


def listed(checkpoints: Path) -> list[Path]:
    """Every directory named like a checkpoint, newest first, valid or not."""
    if not checkpoints.is_dir():
        return []
    steps = {path: _NAME.fullmatch(path.name) for path in checkpoints.iterdir()}
    named = [(int(match[1]), path) for path, match in steps.items() if match]
    return [path for _, path in sorted(named, reverse=True)]


def newest_valid(checkpoints: Path) -> tuple[Path | None, list[DamagedCheckpoint]]:
    """The newest whole checkpoint, its contents verified, and the newer ones that had to be passed over."""
    damaged = []
    for path in listed(checkpoints):
        try:
            verify(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        return path, damaged
    return None, damaged


def prune(checkpoints: Path, keep: int, newest: Path) -> None:
    """Remove all but the newest `keep` whole checkpoints, and what interrupted saves left behind.

    They are counted from `newest` on, which has just been saved: where there are later ones, the run has gone back behind
    them because their contents are damaged, which only reading them through would show.
    """
    whole = list(_whole(checkpoints))
    for path in whole[whole.index(newest) :][keep:]:
        path.rename(path.with_name(f"{path.name}.removed{PARTIAL}"))  # so that a removal cut short is finished by the next
    for path in checkpoints.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _whole(checkpoints: Path) -> Iterator[Path]:
    for path in listed(checkpoints):
        try:
            read_marker(path)
        except DamagedCheckpoint:
            continue  # left for a person to look at
        yield path


def _seal(marker: Any) -> str:
    """Checksum of what a marker says, however it is written."""
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
