"""Checkpoints as folders: a name per step, a commit marker written last, the newest valid one found. Knows no tensors.

In a file system a checkpoint is written into `step-N.partial` and renamed when its marker, with the size and checksum of every
file and of itself, is on disk. An object store has no such instant: there the marker alone makes a folder a checkpoint. Either
way a folder that has none is not one, and one that was damaged afterwards is told by its marker.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phalanx.checkpointing import format
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.storage import Unreachable, open_location
from phalanx.spec.errors import PhalanxError

MARKER = "commit.json"
PARTIAL = ".partial"
_REPLACED = ".replaced" + PARTIAL
FORMAT = 2
_NAME = re.compile(r"step-(\d+)")
_READERS = 16  # small files read at once when a checkpoint is completed


class DamagedCheckpoint(PhalanxError):
    """A checkpoint that must not be loaded."""

    def __init__(self, path: Any, reason: str):
        self.path, self.reason = str(path), reason
        super().__init__(f"{path} is damaged: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)  # one rank tells the others; by itself, only the message would travel


def step_dir(checkpoints: Location | Path, step: int) -> Location:
    return open_location(checkpoints) / f"step-{step:08d}"


def step_of(path: Location) -> int | None:
    """The step that a folder is named after."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def begin(checkpoints: Location | Path, step: int) -> Location:
    """An empty folder to write a checkpoint into; what an interrupted save left there is gone."""
    final = step_dir(checkpoints, step)
    if not final.renames:
        if MARKER in final.entries():
            (final / MARKER).remove()  # first, so that it is no checkpoint from here on
        final.remove()
        return final
    partial = final.parent / f"{final.name}{PARTIAL}"
    partial.remove()
    partial.make()
    return partial


def commit(partial: Location | Path, contents: dict[str, Any], ranks: int = 1) -> Location:
    """Make a written folder a checkpoint: see that all is there, write the marker, give it its name. Returns where it is."""
    partial = open_location(partial)
    names = [format.file_name(rank, ranks) for rank in range(ranks)]
    with ThreadPoolExecutor(_READERS) as pool:
        read = list(pool.map(lambda name: (partial / format.beside(name)).read(), names))
    return complete(partial, marker(partial, contents | {"time": time.time()}, dict(zip(names, read, strict=True))))


def complete(partial: Location, text: bytes) -> Location:
    """Give a folder in which all else lies its marker, and its name."""
    format.write(partial / MARKER, [text])
    partial.sync()
    if not partial.renames:
        return partial
    final = partial.parent / partial.name.removesuffix(PARTIAL)
    if final.is_folder() or final.size() is not None:  # damaged, no folder, or a step taken again: the new one replaces it
        replaced = final.parent / f"{final.name}{_REPLACED}"
        replaced.remove()  # from a replacement that was killed before it was tidied up
        final.rename(replaced)
    partial.rename(final)
    final.parent.sync()
    return final


def marker(path: Location, contents: dict[str, Any], beside: dict[str, bytes]) -> bytes:
    """What makes a checkpoint of files of boxes, given by name with what is told about each: the text of its marker."""
    told = [json.loads(text) for text in beside.values()]
    files = {}
    for (name, text), about in zip(beside.items(), told, strict=True):
        files[name] = {"bytes": about["bytes"], "checksum": format.whole(about["crc32"]), "stage": about["stage"]}
        files[format.beside(name)] = {"bytes": len(text), "checksum": format.whole_of(text)}
    whole = contents | {"format": FORMAT, "names": _names(path, told), "files": files}
    return _text(whole | {"sha256": _seal(whole)})


def _names(partial: Location, told: list[dict[str, Any]]) -> list[list[str]]:
    """The tensors of each stage. What the files hold of them adds up to them, or the checkpoint would lack something."""
    stages = {about["stage"]: about["names"] for about in told if "names" in about}
    missing = {about["stage"] for about in told} - stages.keys()
    assert not missing, f"no rank told what stages {missing} hold"
    sizes: dict[str, int] = {name: size for names in stages.values() for name, size in names.items()}
    written = sum(about["tensors"] for about in told)
    if written != sum(sizes.values()):
        raise PhalanxError(
            f"{partial} holds {written} bytes of tensors that have {sum(sizes.values())}: ranks disagree about who writes what, "
            "and the checkpoint is not kept."
        )
    return [sorted(stages[stage]) for stage in sorted(stages)]


def read_marker(path: Location | Path) -> dict[str, Any]:
    """What was saved besides tensors; raises DamagedCheckpoint if the folder is not a whole checkpoint."""
    path = open_location(path)
    marker, sizes = sealed(path), path.sizes()
    for name, expected in marker["files"].items():
        if name not in sizes:
            raise DamagedCheckpoint(path, f"its file {name} is missing")
        if sizes[name] != expected["bytes"]:
            raise DamagedCheckpoint(path, f"its file {name} has {sizes[name]} bytes instead of {expected['bytes']}")
    return marker


def sealed(path: Location) -> dict[str, Any]:
    """What the marker says, whatever has become of the other files."""
    try:
        text = (path / MARKER).read()
        marker: dict[str, Any] = json.loads(text)
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"it has no {MARKER}, so its writing was never finished") from None
    except Unreachable:
        raise  # which says nothing of what lies there
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(path, f"its {MARKER} cannot be read ({error})") from None
    same = text == _text(marker)  # to the letter: 1e-5 and 1E-5 are the same number
    seal = marker.pop("sha256", None) if isinstance(marker, dict) else None
    if not same or seal != _seal(marker):
        raise DamagedCheckpoint(path, f"its {MARKER} does not have the contents that were saved")
    if marker.get("format") != FORMAT:
        raise DamagedCheckpoint(path, f"it was written in format {marker.get('format', 1)}, this version reads format {FORMAT}")
    if step_of(path) not in (None, marker.get("step")):  # else an old state under a later name is the newest at every launch
        raise DamagedCheckpoint(path, f"its {MARKER} is that of step {marker.get('step')}: it was copied or renamed")
    return marker


def verify(path: Location | Path) -> None:
    """Compare every file with the checksum in the marker."""
    path = open_location(path)
    for name, expected in read_marker(path)["files"].items():
        try:
            found = format.digest(path / name)
        except Unreachable:
            raise
        except OSError as error:
            raise DamagedCheckpoint(path, f"its file {name} cannot be read ({error})") from error
        if found != expected["checksum"]:
            raise DamagedCheckpoint(path, f"its file {name} does not have the contents that were saved")


def list_checkpoints(checkpoints: Location | Path) -> list[Location]:
    """Every folder named like a checkpoint, newest first, valid or not."""
    place = open_location(checkpoints)
    named = [(int(match[1]), name) for name in place.entries() if (match := _NAME.fullmatch(name))]
    return [place / name for _, name in sorted(named, reverse=True)]


def restore_replaced(checkpoints: Location | Path) -> None:
    """Put back what was set aside for a checkpoint of the same step that, as its save was killed, never came."""
    place = open_location(checkpoints)
    names = set(place.entries())
    for name in names:
        final = name.removesuffix(_REPLACED)
        if name != final and _NAME.fullmatch(final) and final not in names:
            (place / name).rename(place / final)


def newest(
    checkpoints: Location | Path | Sequence[Location], passed: set[str] | None = None
) -> tuple[Location | None, list[DamagedCheckpoint]]:
    """The newest checkpoint with a good marker and files of the right sizes, and the newer ones that had to be passed over.

    Contents are compared when they are read. `passed`: those that turned out to be damaged then. Of several places, the first that
    has one of the newest step.
    """
    damaged = []
    places = checkpoints if isinstance(checkpoints, Sequence) else [checkpoints]
    found = [path for place in places for path in list_checkpoints(place)]
    for path in sorted(found, key=lambda path: -(step_of(path) or 0)):
        if str(path) in (passed or ()):
            continue
        try:
            read_marker(path)
        except DamagedCheckpoint as error:
            if path.renames or (path / MARKER).size() is not None:
                damaged.append(error)
            continue  # in a store, a folder without a marker is only what a killed save left
        return path, damaged
    return None, damaged


def newest_verified(checkpoints: Location | Path) -> tuple[Location | None, list[DamagedCheckpoint]]:
    """The newest whole checkpoint, all its contents compared, and the newer ones that had to be passed over."""
    damaged: list[DamagedCheckpoint] = []
    while True:
        path, more = newest(checkpoints, {bad.path for bad in damaged})
        damaged += more
        if path is None:
            return None, damaged
        try:
            verify(path)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        return path, damaged


def prune(
    checkpoints: Location | Path,
    keep_last: int,
    saved: Location,
    keep_every: int | None = None,
    held: Collection[str] = (),
) -> list[str]:
    """Remove all but the newest `keep_last` whole checkpoints and those of every `keep_every`-th step, and what interrupted saves
    left behind; returns the names of what was removed.

    They are counted from `saved` on, which is new: where there are later ones, the run has gone back behind them because their
    contents are damaged, which only reading them through would show. `held`: names of those that somebody still reads; they are
    left for the next time.
    """
    place = open_location(checkpoints)
    removed = [name for name in prunable(place, keep_last, saved, keep_every) if name not in held]
    _remove(place, removed)
    if not place.renames:
        _sweep(place, saved)
    return removed


def remove_after(checkpoints: Location | Path, step: int) -> list[str]:
    """Remove all of later steps, which the run has gone back behind; returns their names."""
    place = open_location(checkpoints)
    removed = [path.name for path in list_checkpoints(place) if (step_of(path) or 0) > step]
    _remove(place, removed)
    return removed


def _remove(place: Location, names: Sequence[str]) -> None:
    """And what interrupted saves and removals left behind."""
    for path in (place / name for name in names):
        if path.renames:  # so that a removal cut short is finished by the next
            path.rename(path.parent / f"{path.name}.removed{PARTIAL}")
        else:
            (path / MARKER).remove()
            path.remove()
    for name in place.entries():
        if name.startswith("step-") and name.endswith(PARTIAL):
            (place / name).remove()


def _sweep(place: Location, saved: Location) -> None:
    """Of interrupted saves, where folders have their names from the beginning: those of earlier steps that never got a marker."""
    begun = {*(path.name for path in list_checkpoints(place)), *filter(_NAME.fullmatch, place.unfinished())}
    for path in (place / name for name in begun):
        if (step_of(path) or 0) < (step_of(saved) or 0) and MARKER not in path.entries():
            path.remove()


def prunable(checkpoints: Location, keep_last: int, saved: Location, keep_every: int | None = None) -> list[str]:
    """Names of the whole checkpoints that `prune` would remove."""
    whole = list(_whole(checkpoints))
    counted = whole[[path.name for path in whole].index(saved.name) :]
    return [path.name for path in counted[keep_last:] if keep_every is None or (step_of(path) or 0) % keep_every]


def _whole(checkpoints: Location) -> Iterator[Location]:
    for path in list_checkpoints(checkpoints):
        try:
            read_marker(path)
        except DamagedCheckpoint:
            continue  # left for a person to look at
        yield path


def _text(marker: Any) -> bytes:
    return json.dumps(marker, indent=2).encode() + b"\n"


def _seal(marker: Any) -> str:
    """Checksum of what a marker says."""
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()
