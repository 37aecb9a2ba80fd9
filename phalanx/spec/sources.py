"""Which kind of text a source is, told by the names of its files where the run file does not say.
Called by `spec/check_data`, `spec/identity` and by the data room when it opens a source."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from itertools import islice

from phalanx.spec.run import Source

_PACKED = (".gz", ".zst", ".zstd")
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_TOKENS = "tokens.json"
_SAVED_DATASET = ("dataset_dict.json", "state.json")
"""Files that `datasets` leaves in a folder it saved to: of several splits, of one."""
_MOST = 10_000
"""Matches of a pattern without a suffix that are looked at."""


def kind(source: Source) -> str:
    """What a source is, given or told by its names; "text" where they tell nothing. `kinds` finds those that disagree."""
    return next(iter(kinds(source)), "text")


def kinds(source: Source) -> list[str]:
    """Every kind that a source's names speak for, in their order; more than one is for the person to settle.

    Empty where nothing can be told: a path without a suffix at which there is nothing now.
    """
    if source.source is not None:
        return [source.source]
    if not source.paths:
        return ["memory" if source.documents else "stdlib"]
    return list(dict.fromkeys(found for path in source.paths if (found := _kind_of_path(path)) is not None))


def _kind_of_path(path: str) -> str | None:
    if "://" in path:
        return _kind_of_name(path.partition("?")[0].rstrip("/"))
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _kind_of_folder(path)
    suffix = os.path.splitext(path)[1]
    if os.path.lexists(path) or (suffix and not glob.has_magic(suffix)):
        return _kind_of_name(path)
    matches = sorted(islice(glob.iglob(path, recursive=True), _MOST)) if glob.has_magic(path) else []
    if not matches and suffix.strip(".*?"):  # such as "*.jsonl*", of which there is none now
        return _kind_of_name(path.rstrip("*?"))
    return next((found for match in matches if (found := _kind_of_path(match)) is not None), None)


def _kind_of_name(path: str) -> str:
    name = os.path.basename(path).lower()
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return "tokens" if name == _TOKENS else _KINDS.get(os.path.splitext(name)[1], "text")


def _kind_of_folder(path: str) -> str | None:
    """By its own mark, else by the first file in the order of names that is not there to be read by people or tools."""
    if os.path.isfile(os.path.join(path, _TOKENS)):
        return "tokens"
    if any(os.path.isfile(os.path.join(path, name)) for name in _SAVED_DATASET):
        return "hf"
    return next(map(_kind_of_name, _files(path)), None)


def _files(path: str) -> Iterator[str]:
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith((".", "_")) and os.path.splitext(name)[0].upper() not in ("README", "LICENSE"):
                yield os.path.join(folder, name)
