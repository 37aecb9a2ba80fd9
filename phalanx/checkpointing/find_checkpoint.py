"""From what a person names to a checkpoint and the run it belongs to: a run directory, a folder of checkpoints or a checkpoint,
in a file system or at a URL. Whatever opens a trained model calls `find`; `phalanx checkpoint` the rest. Knows no tensors."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.checkpointing import directory
from phalanx.checkpointing.location import Local, Location
from phalanx.checkpointing.storage import open_location
from phalanx.spec.errors import RunError

_EXAMPLE = "runs/quickstart/checkpoints/step-00000300"
_RUN_FILE = "run.toml"


class FoundCheckpoint(NamedTuple):
    """A checkpoint and the run that it is of."""

    checkpoint: Location
    run: str
    """The text of the run file: of the run directory around the checkpoint, or the one that the checkpoint itself carries."""
    source: str
    """Where that stands, for messages."""
    tokenizer: Path | None
    """The folder of tokenizer files that a run directory keeps."""


def is_url(path: Path | str) -> bool:
    return isinstance(path, str) and "://" in path


def path_or_url(place: Location) -> Path | str:
    """A location as others write it: a path, or a URL."""
    return place.path if isinstance(place, Local) else str(place)


def find(path: Path | str) -> FoundCheckpoint:
    """The checkpoint that a path names, its contents compared; a run directory stands for its newest valid one."""
    place = existing_location(path)
    if is_checkpoint(place):
        directory.verify(place)
        return _with_run(place)
    return _with_run(_newest(path, directory.verify), place)


def no_checkpoint_message(path: Path | str, places: list[Location], damaged: list[directory.DamagedCheckpoint]) -> str:
    """Why there is no checkpoint to load."""
    why = "; ".join(str(bad) for bad in damaged) or f"there is none in {' or '.join(map(str, places))}"
    return f"{path} has no checkpoint to load ({why}): train first, or name another directory."


def locate(path: Path | str) -> Location:
    """The checkpoint that a path names, or the newest; of contents only the sizes are looked at, for those who check what they read."""
    place = existing_location(path)
    return place if is_checkpoint(place) else _newest(path, directory.read_marker)


def _newest(path: Path | str, check: Callable[[Location], object]) -> Location:
    """The newest that passes, wherever it lies."""
    places, damaged = checkpoint_locations(open_location(path)), []
    for found in all_checkpoints(places):
        try:
            check(found)
        except directory.DamagedCheckpoint as bad:
            damaged.append(bad)
            continue
        return found
    raise RunError([no_checkpoint_message(path, places, damaged)])


def all_checkpoints(places: list[Location]) -> list[Location]:
    """All that is named like a checkpoint, newest first; of two of one step that in the first place."""
    found = [path for place in places for path in directory.list_checkpoints(place)]
    return sorted(found, key=lambda path: directory.step_of(path) or 0, reverse=True)


def find_unverified(path: Path | str) -> FoundCheckpoint:
    """The same, with the run that it is of."""
    place = existing_location(path)
    return _with_run(locate(path), None if is_checkpoint(place) else place)


def existing_location(path: Path | str) -> Location:
    """The folder that a person named, or RunError where there is none."""
    try:
        place = open_location(path)
        found = place.is_folder()
    except (OSError, ValueError, ImportError) as error:  # as fsspec says that it does not know a store, or cannot reach it
        raise RunError([f"{path} cannot be looked at ({error}): see that it is right and can be reached from here."]) from None
    if not found:
        what = "is a URL that there is nothing at" if is_url(path) else "is not a directory"
        raise RunError([f"{path} {what}: name a checkpoint such as {_EXAMPLE}, or a run directory."])
    return place


def is_checkpoint(place: Location) -> bool:
    """Whether a folder is a checkpoint, or was to become one."""
    return directory.step_of(place) is not None or (place / directory.MARKER).size() is not None


def checkpoint_locations(place: Location) -> list[Location]:
    """Where the checkpoints of a run directory lie: inside it, where its run file says, or both. A folder of checkpoints is its own,
    and so is the folder around a checkpoint."""
    if is_checkpoint(place):
        return [place.parent]
    keys, inside = checkpoint_settings(place), place / "checkpoints"
    url = keys.get("url")
    if isinstance(url, str):
        return [inside, open_location(url)] if keys.get("local_first") is True else [open_location(url)]
    if inside.is_folder() or not any(name.startswith("step-") for name in place.entries()):
        return [inside]
    return [place]


def checkpoint_settings(place: Location) -> dict[str, Any]:
    """The table [checkpoint] of a run directory's file, as far as it can be read; nothing where there is none."""
    try:
        found = tomllib.loads((place / _RUN_FILE).read().decode()).get("checkpoint", {})
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _with_run(checkpoint: Location, run_dir: Location | None = None) -> FoundCheckpoint:
    """The run file around a checkpoint goes before the one in it: somebody may have moved what it names, and said so there."""
    around = [*([run_dir] if run_dir is not None else []), checkpoint.parent.parent]
    for folder in around:
        file = folder / _RUN_FILE
        if file.size() is None:
            continue
        try:
            text = file.read().decode()
        except (OSError, ValueError) as error:
            raise RunError([f"{file} cannot be read ({getattr(error, 'strerror', None) or error})."]) from None
        kept = Path(str(folder)) / "tokenizer"
        return FoundCheckpoint(checkpoint, text, str(file), kept if kept.is_dir() else None)
    marker = checkpoint / directory.MARKER
    said = directory.read_marker(checkpoint).get("run")
    if isinstance(said, str):
        return FoundCheckpoint(checkpoint, said, str(marker), None)
    raise RunError(
        [
            f"{checkpoint} has no run file at {around[-1] / _RUN_FILE}, and its {directory.MARKER} carries none: name it where it lies in "
            "its run directory."
        ]
    )
