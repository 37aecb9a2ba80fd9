"""Folders of checkpoints: a name per step, commit by a marker that is written last, the newest valid one, retention. Does not import torch.

In a file system a checkpoint is written into `step-N.partial` and renamed when its marker is on disk. An object store has no atomic
rename: there the marker alone makes a folder a checkpoint. In both, a folder without a marker is not a checkpoint, and damage that happens
later is detected by the sizes and checksums in the marker.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from phalanx.checkpointing.format import (
    CheckedFile,
    DamagedFile,
    FileRecord,
    Marker,
    RunMetadata,
    SavedBox,
    Sidecar,
    checksum_of,
    decode_header,
    file_checksum,
    rank_file_name,
    read_block_sums,
    read_header,
    sidecar_name,
    write_file,
)
from phalanx.checkpointing.location import Location, Unreachable, open_location
from phalanx.spec.errors import PhalanxError

MARKER = "commit.json"
PARTIAL = ".partial"
_REPLACED = ".replaced" + PARTIAL
_NAME = re.compile(r"step-(\d+)")
_READERS = 16  # sidecars read at a time: in a store, a small file has a long latency
_OPEN_FILES = 8  # rank files open for reading, each with a few blocks in memory


class DamagedCheckpoint(PhalanxError):
    """A checkpoint that must not be loaded."""

    def __init__(self, path: object, reason: str):
        self.path, self.reason = str(path), reason
        super().__init__(f"{path} is damaged: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)  # ranks send it to each other; by default only the message would be sent


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_dir(checkpoints: Location | Path, step: int) -> Location:
    """The folder of the checkpoint of a step."""
    return open_location(checkpoints) / step_name(step)


def partial_dir(checkpoints: Location | Path, step: int) -> Location:
    """The folder that the checkpoint of a step is written into."""
    final = step_dir(checkpoints, step)
    return final.parent / f"{final.name}{PARTIAL}" if final.can_rename else final


def step_of(path: Location) -> int | None:
    """The step in a folder's name; None if it is not named like a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


# Writing.


def begin(checkpoints: Location | Path, step: int) -> Location:
    """An empty folder to write a checkpoint into. Removes what an interrupted save left there."""
    partial = partial_dir(checkpoints, step)
    if not partial.can_rename and MARKER in partial.entries():
        (partial / MARKER).remove()  # first, so that the folder is no longer a checkpoint
    partial.remove()
    if partial.can_rename:
        partial.make()
    return partial


def commit(partial: Location | Path, step: int, metadata: RunMetadata, ranks: int = 1) -> Location:
    """Make a checkpoint of a folder in which all ranks have written; returns where it is."""
    partial = open_location(partial)
    names = [rank_file_name(rank, ranks) for rank in range(ranks)]
    with ThreadPoolExecutor(_READERS) as pool:
        sidecars = list(pool.map(lambda name: (partial / sidecar_name(name)).read(), names))
    marker = make_marker(partial, step, metadata, dict(zip(names, sidecars, strict=True)), time.time())
    return publish(partial, marker.to_json())


def publish(partial: Location, marker: bytes) -> Location:
    """Write the marker into a folder that has everything else, and rename it; returns where it is."""
    write_file(partial / MARKER, [marker])
    partial.sync()
    if not partial.can_rename:
        return partial
    final = partial.parent / partial.name.removesuffix(PARTIAL)
    if final.is_folder() or final.size() is not None:  # a damaged checkpoint, or a step that was trained again
        replaced = final.parent / f"{final.name}{_REPLACED}"
        replaced.remove()
        final.rename(replaced)
    partial.rename(final)
    final.parent.sync()
    return final


def make_marker(path: object, step: int, metadata: RunMetadata, sidecars: Mapping[str, bytes], when: float | None) -> Marker:
    """The marker of a checkpoint of these rank files, given by name with the contents of their sidecars."""
    parsed = {name: Sidecar.from_json(text) for name, text in sidecars.items()}
    files = {}
    for name, sidecar in parsed.items():
        files[name] = FileRecord(sidecar.size, file_checksum(sidecar.crc32), sidecar.stage)
        files[sidecar_name(name)] = FileRecord(len(sidecars[name]), checksum_of(sidecars[name]))
    return Marker(step=step, time=when, names=_stage_names(path, list(parsed.values())), files=files, run=metadata)


def _stage_names(path: object, sidecars: list[Sidecar]) -> list[list[str]]:
    """The tensors of each stage. Checks that the files contain exactly as many bytes as these tensors have."""
    stages = {sidecar.stage: sidecar.names for sidecar in sidecars if sidecar.names is not None}
    missing = {sidecar.stage for sidecar in sidecars} - stages.keys()
    assert not missing, f"no rank wrote the tensor names of stages {missing}"
    sizes = {name: size for names in stages.values() for name, size in names.items()}
    written = sum(sidecar.tensors for sidecar in sidecars)
    if written != sum(sizes.values()):
        raise PhalanxError(
            f"{path} has {written} bytes of tensors that have {sum(sizes.values())} bytes: ranks disagree about who writes what, "
            "and the checkpoint is discarded."
        )
    return [sorted(stages[stage]) for stage in sorted(stages)]


# Reading.


def read_marker(path: Location | Path) -> Marker:
    """The marker of a checkpoint. Raises DamagedCheckpoint if a file is missing or has another size."""
    path = open_location(path)
    marker = parse_marker(path)
    for name, problem in size_problems(path, marker).items():
        raise DamagedCheckpoint(path, f"its file {name} {problem}")
    return marker


def size_problems(path: Location, marker: Marker) -> dict[str, str]:
    """Files that are missing or have another size, each with a verb."""
    sizes = path.sizes()
    return {
        name: f"has {sizes[name]} bytes instead of {record.bytes}" if name in sizes else "is missing"
        for name, record in marker.files.items()
        if sizes.get(name) != record.bytes
    }


def parse_marker(path: Location) -> Marker:
    """The marker alone, whatever the state of the other files."""
    try:
        marker = Marker.from_json((path / MARKER).read())
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"it has no {MARKER}, so its save was never completed") from None
    except Unreachable:
        raise  # which says nothing about the contents
    except DamagedFile as error:
        raise DamagedCheckpoint(path, f"its {MARKER} {error}") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(path, f"its {MARKER} cannot be read ({error})") from None
    if step_of(path) not in (None, marker.step):  # else an old state under a later name would be the newest at every launch
        raise DamagedCheckpoint(path, f"its {MARKER} is that of step {marker.step}: it was copied or renamed")
    return marker


def verify(path: Location | Path) -> None:
    """Compare every file with its checksum in the marker. Raises DamagedCheckpoint."""
    path = open_location(path)
    for name, record in read_marker(path).files.items():
        try:
            checksum = file_checksum(read_block_sums(path / name))
        except Unreachable:
            raise
        except OSError as error:
            raise DamagedCheckpoint(path, f"its file {name} cannot be read ({error})") from error
        if checksum != record.checksum:
            raise DamagedCheckpoint(path, f"its file {name} does not have the contents that were saved")


class CheckpointFiles:
    """The rank files of a checkpoint, opened as they are needed; everything read is checked. Raises DamagedCheckpoint."""

    def __init__(self, path: Location, marker: Marker):
        self.path, self.marker = path, marker
        self._sidecars: dict[str, Sidecar] = {}
        """Of the files whose boxes were read: of thousands of files a rank needs a few."""
        self._open: OrderedDict[str, CheckedFile] = OrderedDict()

    def sidecar(self, file: str) -> Sidecar:
        name = sidecar_name(file)
        with self._damage():
            text = (self.path / name).read()
            if checksum_of(text) != self.marker.files[name].checksum:
                raise DamagedFile(f"its file {name} does not have the contents that were saved")
            return Sidecar.from_json(text)

    def sidecars(self, files: Sequence[str]) -> Iterator[tuple[str, Sidecar]]:
        with ThreadPoolExecutor(_READERS) as pool:
            yield from zip(files, pool.map(self.sidecar, files), strict=True)

    def boxes(self, file: str, sidecar: Sidecar) -> list[SavedBox]:
        """The boxes of a rank file, from its header."""
        self._sidecars[file], size = sidecar, self.marker.files[file].bytes
        with self._damage():
            try:
                if sidecar.header is None:
                    return read_header(self._opened(file), size)
                header = (self.path / file).read(0, size - sidecar.tensors)
                if crc32(header) != sidecar.header:
                    raise DamagedFile(f"its file {file} does not have the contents that were saved (its header)")
                return decode_header(header)
            except (ValueError, KeyError, TypeError) as error:
                raise DamagedFile(f"its file {file} has a header that cannot be read ({error})") from None

    def read(self, file: str, begin: int, into: memoryview) -> None:
        with self._damage():
            self._opened(file).read(begin, into)

    def _opened(self, file: str) -> CheckedFile:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        self._open[file] = CheckedFile(self.path / file, self.marker.files[file].bytes, self._sidecars[file].crc32)
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return self._open[file]

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except DamagedFile as error:
            raise DamagedCheckpoint(self.path, str(error)) from None
        except Unreachable:
            raise  # which says nothing about the contents
        except OSError as error:
            raise DamagedCheckpoint(self.path, f"it cannot be read ({error})") from error

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


# The folder of checkpoints.


def list_checkpoints(*places: Location | Path) -> list[Location]:
    """Every folder named like a checkpoint, newest first, valid or not; of the same step, in the order of the places."""
    paths = [place / name for place in map(open_location, places) for name in place.entries() if _NAME.fullmatch(name)]
    return sorted(paths, key=lambda path: -(step_of(path) or 0))


def partial_names(checkpoints: Location) -> list[str]:
    """Folders that are being written, or were set aside to be replaced or removed."""
    return [name for name in checkpoints.entries() if name.startswith("step-") and name.endswith(PARTIAL)]


def leftovers(checkpoints: Location) -> list[str]:
    """Names of what interrupted saves left. In a store these are named like checkpoints but have no marker."""
    # A checkpoint that was set aside for a replacement that never came is no leftover: the next launch restores it.
    replaced = {f"{name}{_REPLACED}" for name in checkpoints.entries()}
    found = [name for name in partial_names(checkpoints) if ".replaced" not in name or name in replaced]
    if not checkpoints.can_rename:
        found += [path.name for path in list_checkpoints(checkpoints) if (path / MARKER).size() is None]
    return found


def restore_replaced(checkpoints: Location | Path) -> None:
    """Rename back a checkpoint that was set aside for a replacement, if the save was killed before the replacement was in place."""
    place = open_location(checkpoints)
    names = set(place.entries())
    for name in names:
        final = name.removesuffix(_REPLACED)
        if name != final and _NAME.fullmatch(final) and final not in names:
            (place / name).rename(place / final)


def newest(
    checkpoints: Location | Path | Sequence[Location],
    skip: Collection[str] = (),
    check: Callable[[Location], object] = read_marker,
) -> tuple[Location | None, list[DamagedCheckpoint]]:
    """The newest checkpoint that passes a check, and the damaged ones that are newer. Of several locations, the first that has the newest
    step wins.

    Without `verify` as the check, contents are checked when they are read; `skip` has the paths of checkpoints whose contents turned out
    to be damaged.
    """
    damaged = []
    for path in list_checkpoints(*(checkpoints if isinstance(checkpoints, Sequence) else [checkpoints])):
        if str(path) in skip:
            continue
        try:
            check(path)
        except DamagedCheckpoint as error:
            if path.can_rename or (path / MARKER).size() is not None:
                damaged.append(error)
            continue  # in a store, a folder without a marker is only the rest of an interrupted save
        return path, damaged
    return None, damaged


def prune(
    checkpoints: Location | Path, keep_last: int, saved: Location, keep_every: int | None = None, in_use: Collection[str] = ()
) -> list[str]:
    """Remove all but the newest `keep_last` valid checkpoints and those of every `keep_every`-th step, and what interrupted saves left;
    returns the names of the removed checkpoints.

    Counts from `saved`, the newest one, on: the run has gone back behind later ones because their contents are damaged. `in_use`: names
    of checkpoints that are still being read; they are left for the next time.
    """
    place = open_location(checkpoints)
    removed = [name for name in prunable(place, keep_last, saved, keep_every) if name not in in_use]
    _remove(place, removed)
    if not place.can_rename:
        _remove_unmarked(place, saved)
    return removed


def remove_after(checkpoints: Location | Path, step: int) -> list[str]:
    """Remove the checkpoints of later steps, which the run has gone back behind; returns their names."""
    place = open_location(checkpoints)
    removed = [path.name for path in list_checkpoints(place) if (step_of(path) or 0) > step]
    _remove(place, removed)
    return removed


def _remove(place: Location, names: Sequence[str]) -> None:
    """Remove checkpoints, and what interrupted saves and removals left."""
    for path in (place / name for name in names):
        if path.can_rename:  # so that the next removal completes this one if it is interrupted
            path.rename(path.parent / f"{path.name}.removed{PARTIAL}")
        else:
            (path / MARKER).remove()
            path.remove()
    for name in partial_names(place):
        (place / name).remove()


def _remove_unmarked(place: Location, saved: Location) -> None:
    """In a store: remove folders of earlier steps that never got a marker, and uploads that were never completed."""
    begun = {*(path.name for path in list_checkpoints(place)), *filter(_NAME.fullmatch, place.unfinished())}
    for path in (place / name for name in begun):
        if (step_of(path) or 0) < (step_of(saved) or 0) and MARKER not in path.entries():
            path.remove()


def prunable(checkpoints: Location, keep_last: int, saved: Location, keep_every: int | None = None) -> list[str]:
    """Names of the valid checkpoints that `prune` would remove."""
    names = [path.name for path in list_checkpoints(checkpoints) if _is_valid(path)]
    counted = [checkpoints / name for name in names[names.index(saved.name) :]]
    return [path.name for path in counted[keep_last:] if keep_every is None or (step_of(path) or 0) % keep_every]


def _is_valid(path: Location) -> bool:
    try:
        read_marker(path)
    except DamagedCheckpoint:
        return False  # left for a person to examine
    return True
