"""Finds the files that hold a run's text, without opening one. `source` calls it, in the launcher and in every rank."""

from __future__ import annotations

import errno
import glob
import os
import sysconfig
from collections.abc import Sequence

from phalanx.spec.errors import RunError

_INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders inside the standard library's that are not part of it."""


class _Search:
    """Files found so far, and those that were found but cannot be read."""

    def __init__(self, suffix: str = "", skip: frozenset[str] = frozenset()):
        self.sizes: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self._suffix = suffix
        self._skip = skip

    def take(self, path: str) -> bool:
        """Take a file, or all files of a folder; false: there is none in it."""
        if os.path.isdir(path):
            return self._take_folder(path)
        if os.path.isfile(path):
            self._take_file(path, os.path.getsize(path))
        else:
            self.unreadable[path] = "neither a file nor a folder" if os.path.exists(path) else os.strerror(errno.ENOENT)
        return True

    def _take_file(self, path: str, size: int) -> None:
        if os.access(path, os.R_OK):
            self.sizes[path] = size
        else:
            self.unreadable[path] = os.strerror(errno.EACCES)

    def _take_folder(self, top: str) -> bool:
        """Hidden names are left out, as globs do: `.git` is no text. Links to folders are too: they may form a loop."""
        any_file = False
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as found:
                    entries = [e for e in found if not e.name.startswith(".") and e.name not in self._skip]
            except OSError as error:
                self.unreadable[folder] = error.strerror or str(error)
                any_file = True
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.name.endswith(self._suffix):
                    continue
                elif entry.is_file():
                    any_file = True
                    self._take_file(entry.path, entry.stat().st_size)
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    # A link whose target is gone is text somebody believes to be there.
                    any_file = self.take(entry.path)
        return any_file


def stdlib_files(table: str = "data") -> tuple[str, dict[str, int]]:
    """Python's own source code: the folder, and the size of each file in it that is not empty. `table`: of the run file."""
    root = sysconfig.get_paths()["stdlib"]
    search = _Search(".py", _INSTALLED)
    search.take(root)
    sizes = {path: size for path, size in search.sizes.items() if size}
    if not sizes:
        raise RunError(
            [
                f'{table}.source = "stdlib": there is no Python source below {root}; set {table}.source = "text" and {table}.paths.'
            ]
        )
    return root, sizes


def named_files(paths: Sequence[str], key: str = "data.paths") -> tuple[str, dict[str, int]]:
    """The files that `paths` name: the folder they share, and the size of each one that is not empty. `key`: where the run
    file names them."""
    search = _Search()
    problems = []
    for path in paths:
        if not path.strip():
            problems.append(f'{key} holds an empty path; write "." for the working directory.')
            continue
        tried = os.path.abspath(os.path.expanduser(path))
        # A name that exists is never a pattern, whatever brackets it holds.
        matches = [tried] if os.path.lexists(tried) else glob.glob(tried, recursive=True)
        if not matches:
            problems.append(
                f'{key}: "{path}" matches no file or folder (tried {tried}); '
                "correct it, or start the run in the folder it is relative to."
            )
        elif not any([search.take(match) for match in matches]):  # a list: every match is to be taken
            problems.append(f'{key}: "{path}" holds no files (looked through {tried}); put text there or leave it out.')
    if search.unreadable:
        path, reason = min(search.unreadable.items())
        others = f", nor can {len(search.unreadable) - 1} more" if len(search.unreadable) > 1 else ""
        problems.append(f"{key}: {path} cannot be read ({reason}){others}; make it readable or leave it out.")
    sizes = {path: size for path, size in search.sizes.items() if size}
    if search.sizes and not sizes:
        count, first = len(search.sizes), min(search.sizes)
        which = first if count == 1 else f"each of the {count} files (the first is {first})"
        problems.append(f"{key}: {which} is empty; name files that hold text.")
    if problems:
        raise RunError(problems)
    return os.path.commonpath([os.path.dirname(path) for path in sizes]), sizes
