"""Checks the storage of a run's checkpoints before anything starts: whether checkpoint.url can be written, and which run it holds. Called by
`launch/prepare`."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import Marker
from phalanx.checkpointing.location import Location, Remote, error_text, open_location
from phalanx.events.log import read_events
from phalanx.events.records import Saved
from phalanx.events.rundir import RunDir
from phalanx.spec.dump import changed
from phalanx.spec.errors import RunError, toml
from phalanx.spec.load import loads
from phalanx.spec.run import Run

_EXTRAS = {"s3": "s3", "s3a": "s3"}
_COMMON = "s3://, gs:// or az://"


def locations(run: Run, rundir: RunDir) -> list[Location]:
    """All locations where the run's checkpoints may be; of two checkpoints of the same step, the first location counts."""
    url, local = run.checkpoint.url, open_location(rundir.checkpoints)
    if url is None:
        return [local]
    return [local, open_location(url)] if run.checkpoint.local_first else [open_location(url)]


def storage_problems(run: Run) -> list[str]:
    """Why checkpoint.url cannot take checkpoints. The location is tried."""
    url = run.checkpoint.url
    if url is None:
        return []
    key = f"checkpoint.url = {toml(url)}"
    protocol = url.partition("://")[0] if "://" in url else "file"
    if problem := _unusable(protocol):
        return [f"{key} {problem}"]
    try:
        place = open_location(url)
        if isinstance(place, Remote):
            place.check_access()
        else:
            _try_writing(Path(str(place)))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and protocol != "file":
            return [f"{key} does not exist ({error_text(error)}): make the bucket first, or name another."]
        return [
            f"{key} cannot be used ({error_text(error)}): see that it can be reached and written from here, or name another."
        ]
    return []


def _unusable(protocol: str) -> str | None:
    """Why a kind of storage cannot be used at all."""
    import fsspec
    from fsspec.registry import known_implementations, registry

    if protocol == "memory":
        return "lies in the memory of one process and is gone with it: name a folder, or a store such as " + _COMMON + "."
    if protocol not in registry and protocol not in known_implementations:
        return f"begins with {protocol}://, which is no storage that fsspec knows: begin with {_COMMON}, or name a folder."
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        how = f"pip install 'phalanx[{extra}]'" if extra else error_text(error)
        return f"needs a package that is not installed: {how}."
    return None


def _try_writing(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.listdir(folder)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


def check_owner(path: Location, saved: Marker, run: Run, *, new: bool, fresh: bool) -> None:
    """Raise RunError unless the checkpoint at checkpoint.url belongs to this run. `new`: the run directory is new."""
    key, other = f"checkpoint.url = {toml(run.checkpoint.url or '')}", "name another URL"
    if fresh:
        raise RunError(f"{key} already holds a run ({path.name}) and --fresh was given: {other}.")
    if differences := changed(loads(saved.run.run or "", name=str(path)), run):
        raise RunError(
            f"{key} holds a run with other settings ({'; '.join(differences)}): {other}, or undo the change to go on with that run."
        )
    if new and saved.step >= run.steps:
        raise RunError(f"{key} holds a run that has taken all its {run.steps} steps: {other}, or raise train.steps to go on.")


def newest_first(locations: list[Location]) -> list[tuple[Location, Marker]]:
    """The newest checkpoint with a valid marker, as a list of (location, marker) with at most one item."""
    paths = [path for place in locations for path in directory.list_checkpoints(place)]
    for path in sorted(paths, key=lambda path: -(directory.step_of(path) or 0)):
        try:
            return [(path, directory.read_marker(path))]
        except directory.DamagedCheckpoint:
            continue
    return []


def check_lost(locations: list[Location], rundir: RunDir) -> None:
    """Raise RunError if the run has saved but its checkpoints are gone: it must not silently begin again."""
    saved = [event for event in read_events(rundir.events_file) if isinstance(event, Saved)]
    if not saved:
        return
    for place in locations:
        directory.restore_replaced(place)  # a save may have been killed between its two renames
    if directory.newest(locations) == (None, []):  # if all are damaged, the workers report what is wrong with each
        where = " or ".join(map(str, locations))
        raise RunError(
            f"The run in {rundir.path} has saved step {saved[-1].step} as {saved[-1].path}, but there is no checkpoint in {where}: "
            "move it there, let checkpoint.url name where it is (a relative path begins at the working directory), or begin again "
            "from step 0 with another --run-dir."
        )
