"""Finds the checkpoint, and the run it belongs to, that a person names: a run directory, a folder of checkpoints or a checkpoint, as a path
or URL. Does not import torch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from phalanx.checkpointing import directory
from phalanx.checkpointing.location import Local, Location, open_location
from phalanx.spec.errors import RunError
from phalanx.spec.hub import MODEL, HubError, pin, remote_name

_EXAMPLE = "runs/quickstart/checkpoints/step-00000300"
_RUN_FILE = "run.toml"
_CHECKPOINT = f"name a checkpoint such as {_EXAMPLE}, or a run directory"
HF_FOLDER = "name a folder with config.json and weights in safetensors"
"""What `pin_model` says is expected, for commands that take no checkpoint."""


class LocatedCheckpoint(NamedTuple):
    """A checkpoint that a path names, and the newer ones of the same run that were skipped."""

    checkpoint: Location
    damaged: tuple[directory.DamagedCheckpoint, ...] = ()
    """Newer checkpoints that are damaged, newest first: the person who asked for the newest one must be told."""

    @property
    def step(self) -> int:
        return directory.parse_marker(self.checkpoint).step


class FoundCheckpoint(NamedTuple):
    """A checkpoint and the run it belongs to."""

    checkpoint: Location
    run: str
    """Text of the run file: that of the run directory around the checkpoint, or else the one in the checkpoint's marker."""
    source: str
    """Where the run file is, for messages."""
    tokenizer: Path | None
    """The run directory's folder of tokenizer files."""
    damaged: tuple[directory.DamagedCheckpoint, ...] = ()
    """Newer checkpoints of the same run that were skipped because they are damaged, newest first."""

    @property
    def step(self) -> int:
        return LocatedCheckpoint(self.checkpoint).step


def is_url(path: Path | str) -> bool:
    return isinstance(path, str) and "://" in path


def path_or_url(place: Location) -> Path | str:
    """A location as a person writes it."""
    return place.path if isinstance(place, Local) else str(place)


def find(path: Path | str, *, verify: bool = True) -> FoundCheckpoint:
    """The checkpoint that a path names; of a run directory, the newest that is valid. `verify`: check all contents; otherwise only sizes,
    for callers that check what they read."""
    place = existing_location(path)
    check = directory.verify if verify else directory.read_marker
    if is_checkpoint(place):
        check(place)
        return _with_run(place)
    located = _newest(path, check)
    return _with_run(located.checkpoint, place)._replace(damaged=located.damaged)


def locate(path: Path | str) -> LocatedCheckpoint:
    """The checkpoint that a path names, or the newest; checks only sizes."""
    place = existing_location(path)
    return LocatedCheckpoint(place) if is_checkpoint(place) else _newest(path, directory.read_marker)


def no_checkpoint_message(path: Path | str, places: list[Location], damaged: list[directory.DamagedCheckpoint]) -> str:
    """Why there is no checkpoint to load."""
    if saves_none(open_location(path)):
        return (
            f"{path} is of a run with checkpoint.save = false, which has saved no checkpoint: train it again without that key, or name another "
            "directory."
        )
    why = "; ".join(str(bad) for bad in damaged) or f"there is none in {' or '.join(map(str, places))}"
    return f"{path} has no checkpoint to load ({why}): train first, or name another directory."


def _newest(path: Path | str, check: Callable[[Location], object]) -> LocatedCheckpoint:
    places = checkpoint_locations(open_location(path))
    checkpoint, damaged = directory.newest(places, check=check)
    if checkpoint is None:
        raise RunError([no_checkpoint_message(path, places, damaged)])
    return LocatedCheckpoint(checkpoint, tuple(damaged))


def existing_location(path: Path | str) -> Location:
    """The folder that a person named. RunError if it does not exist."""
    try:
        place = open_location(path)
        exists = place.is_folder()
    except (OSError, ValueError, ImportError) as error:  # fsspec does not know the store, or cannot reach it
        raise RunError(f"{path} cannot be looked at ({error}): see that it is right and can be reached from here.") from None
    if not exists:
        what = "is a URL that there is nothing at" if is_url(path) else "is not a directory"
        raise RunError(f"{path} {what}: {_CHECKPOINT}.")
    return place


def pin_model(path: Path | str, expected: str = _CHECKPOINT) -> Path | str:
    """A name of the Hugging Face hub with its commit, if there is no such path; anything else as it is. RunError, with what was `expected`,
    if the hub does not have it either."""
    if is_url(path) or remote_name(str(path)) is None:
        return path
    try:
        return pin(str(path), MODEL)
    except HubError as error:
        raise RunError(f"{path}: {error}" if error.exists else f"{path} is not a directory: {expected}. {error}") from None


def is_checkpoint(place: Location) -> bool:
    """Whether a folder is a checkpoint, complete or not."""
    return directory.step_of(place) is not None or (place / directory.MARKER).size() is not None


def checkpoint_locations(place: Location) -> list[Location]:
    """Where the checkpoints of a run directory are: inside it, at the URL in its run file, or both. Also takes a folder of checkpoints,
    or a checkpoint inside one."""
    if is_checkpoint(place):
        return [place.parent]
    settings, inside = checkpoint_settings(place), place / "checkpoints"
    url = settings.get("url")
    # A run that saves none has nothing at its URL; there may be another run.
    if isinstance(url, str) and settings.get("save") is not False:
        return [inside, open_location(url)] if settings.get("local_first") is True else [open_location(url)]
    if inside.is_folder() or not any(name.startswith("step-") for name in place.entries()):
        return [inside]
    return [place]


def checkpoint_settings(place: Location) -> Mapping[str, object]:
    """The table [checkpoint] of a run directory's run file; empty if it cannot be read."""
    try:
        table = tomllib.loads((place / _RUN_FILE).read().decode()).get("checkpoint", {})
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def saves_none(place: Location) -> bool:
    """Whether a run directory, or its folder of checkpoints, is of a run that saves no checkpoints."""
    return checkpoint_settings(place.parent if place.name == "checkpoints" else place).get("save") is False


def _with_run(checkpoint: Location, run_dir: Location | None = None) -> FoundCheckpoint:
    """The run file of the directory takes precedence over the one in the marker: a person may have moved data and edited it."""
    folders = [*([run_dir] if run_dir is not None else []), checkpoint.parent.parent]
    for folder in folders:
        file = folder / _RUN_FILE
        if file.size() is None:
            continue
        try:
            text = file.read().decode()
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error}).") from None
        tokenizer = Path(str(folder)) / "tokenizer"
        return FoundCheckpoint(checkpoint, text, str(file), tokenizer if tokenizer.is_dir() else None)
    run = directory.read_marker(checkpoint).run.run
    if run is not None:
        return FoundCheckpoint(checkpoint, run, str(checkpoint / directory.MARKER), None)
    raise RunError(
        f"{checkpoint} has no run file at {folders[-1] / _RUN_FILE}, and its {directory.MARKER} has none: use it where it is in its "
        "run directory."
    )
