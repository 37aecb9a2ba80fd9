"""Finds the files of a source, here or behind a URL. `pieces` calls it, and nothing is opened."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.data.open_file import bare_name, filesystem, is_url, reachable
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

_SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "chat": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
}
"""Names by which a folder's files of a kind are known; every file is text."""


@dataclass(frozen=True, slots=True)
class Found:
    """One file of a source."""

    path: str
    """Absolute, or a URL."""
    size: int | None
    """Bytes as stored; None where a server does not say."""
    stamp: str
    """Changes when the file is written again: time of change, or what the storage has instead."""


def key_of(source: Source) -> str:
    """How the run file calls the paths of this source."""
    name = getattr(source, "name", "")
    return f"data.mix.{name}.paths" if name else "data.paths"


def files_of(source: Source, kind: str) -> list[Found]:
    """Every file that `source.paths` names and that is not empty, in one order for all machines; else RunError."""
    key = key_of(source)
    found: dict[str, Found] = {}
    problems: list[str] = []
    if not source.paths:
        raise RunError([f'{key} names nothing, but source = "{kind}" reads files; give it at least one file, folder or glob.'])
    for path in source.paths:
        try:
            own = {file.path: file for file in (_remote(path, kind, key) if is_url(path) else _local(path, kind, key))}
        except RunError as error:
            problems += error.problems
            continue
        found |= own
    files = [found[path] for path in sorted(found) if found[path].size != 0]
    if found and not files and not problems:
        which = f"{min(found)} is empty" if len(found) == 1 else f"all {len(found)} files are empty (first {min(found)})"
        problems.append(f"{key}: {which}; name files that hold text.")
    if problems:
        raise RunError(problems)
    return files


def _local(path: str, kind: str, key: str) -> Iterator[Found]:
    if not path.strip():
        raise RunError([f'{key} holds an empty path; write "." for the working directory.'])
    tried = os.path.abspath(os.path.expanduser(path))
    # A name that exists is never a pattern, whatever brackets it holds.
    matches = [tried] if os.path.lexists(tried) else sorted(glob.glob(tried, recursive=True))
    if not matches:
        raise RunError(
            [
                f'{key}: "{path}" matches no file or folder (tried {tried}); '
                "correct it, or start in the folder it is relative to."
            ]
        )
    inside = [file for match in matches for file in (_walk(match, kind, key) if os.path.isdir(match) else [match])]
    if not inside:
        wanted = f"none named {', '.join(_SUFFIXES[kind])}" if kind in _SUFFIXES else "none"
        raise RunError([f'{key}: "{path}" holds no files to read, {wanted} (looked through {tried}); put some there.'])
    for file in inside:
        try:
            if not os.path.isfile(file):
                raise OSError(0, "neither a file nor a folder" if os.path.exists(file) else "there is no such file")
            if not os.access(file, os.R_OK):
                raise OSError(0, "permission denied")
            status = os.stat(file)
        except OSError as error:
            raise RunError([f"{key}: {file} cannot be read ({error.strerror}); make it readable or leave it out."]) from None
        yield Found(file, status.st_size, str(status.st_mtime_ns))


def _walk(top: str, kind: str, key: str) -> list[str]:
    """Hidden names are left out, as globs do; links to folders too: they may form a loop."""

    def refuse(error: OSError) -> None:
        raise RunError([f"{key}: {error.filename} cannot be read ({error.strerror}); make it readable or leave it out."])

    files = []
    for folder, folders, names in os.walk(top, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(folder, name) for name in names if not name.startswith(".") and _wanted(name, kind)]
    return files


def _remote(path: str, kind: str, key: str) -> Iterator[Found]:
    system, inner = filesystem(path)
    with reachable(path, key):
        if glob.has_magic(inner):
            listed: dict[str, dict[str, Any]] = system.glob(inner, detail=True)
            infos = [info for _, info in sorted(listed.items()) if info["type"] == "file"]
        elif system.isdir(inner):
            listed = system.find(inner, detail=True)
            infos = [i for name, i in sorted(listed.items()) if _wanted(name.rsplit("/", 1)[-1], kind)]
        else:
            infos = [system.info(inner)]
    if not infos:
        raise RunError([f'{key}: "{path}" matches no file to read; correct it, or put files there.'])
    for info in infos:
        stamp = next(
            (str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "updated", "created") if name in info), ""
        )
        yield Found(system.unstrip_protocol(info["name"]), info.get("size"), stamp)


def _wanted(name: str, kind: str) -> bool:
    return kind not in _SUFFIXES or bare_name(name).endswith(_SUFFIXES[kind])
