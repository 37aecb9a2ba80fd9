"""Every byte of a checkpoint compared with its checksum, and the damaged ones named. Called by `phalanx checkpoint verify`.

Loading compares what it reads; this is for those who want to know before. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.checkpointing import checksums, directory, rank_file
from phalanx.checkpointing.checksums import BLOCK, Checked
from phalanx.checkpointing.info import sums
from phalanx.checkpointing.location import Location

_OTHER = "it does not have the contents that were saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is wrong with a file of a checkpoint."""

    file: str
    reason: str
    ranges: tuple[tuple[int, int], ...] = ()
    """Bytes [begin, end) that are not what was saved, as far as that can be told; to a block, which is what has a checksum."""


def damages(path: Location, progress: Callable[[int], None] = lambda count: None) -> list[Damage]:
    """Everything that is wrong with a checkpoint; `progress` is told of bytes that have been read."""
    try:
        marker = directory.sealed(path)
    except directory.DamagedCheckpoint as bad:
        return [Damage(file=directory.MARKER, reason=bad.reason)]
    sizes, found = path.sizes(), []
    for name, expected in marker["files"].items():
        wrong = None
        if name not in sizes:
            wrong = Damage(file=name, reason="it is missing")
        elif sizes[name] != expected["bytes"]:
            wrong = Damage(file=name, reason=f"it has {sizes[name]} bytes instead of {expected['bytes']}")
        else:
            try:
                wrong = _damage(path, name, marker["files"], progress)
            except OSError as error:
                wrong = Damage(file=name, reason=f"it cannot be read ({error})")
        if wrong is not None:
            found.append(wrong)
    return found


def _damage(path: Location, name: str, files: Mapping[str, Any], progress: Callable[[int], None]) -> Damage | None:
    known = _known(path, name, files)
    if known is None:
        right = checksums.digest(path / name) == files[name]["checksum"]
        progress(files[name]["bytes"])
        return None if right else Damage(file=name, reason=_OTHER)
    size, buffer = files[name]["bytes"], bytearray(BLOCK)
    checked = Checked(path / name, size, known)
    wrong: list[tuple[int, int]] = []
    try:
        for begin in range(0, size, BLOCK):
            end = min(begin + BLOCK, size)
            try:
                checked.read(begin, memoryview(buffer)[: end - begin])
            except checksums.Damaged:
                wrong.append((begin, end))
            progress(end - begin)
    finally:
        checked.close()
    return Damage(file=name, reason=_OTHER, ranges=tuple(wrong)) if wrong else None


def _known(path: Location, name: str, files: Mapping[str, Any]) -> list[int] | None:
    """The checksums of a file's blocks; None where it has none, or where they are damaged themselves, which is told by itself."""
    if not name.endswith(rank_file.SUFFIX):
        return None
    try:
        found = sums(path, name, files)
    except (checksums.Damaged, OSError, ValueError, KeyError):
        return None
    return found if checksums.whole(found) == files[name]["checksum"] else None
