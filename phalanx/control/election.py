"""Who decides: terms, and where each node can be reached, as small files in the run's directory that all nodes see. Used by
`control/agent` and `control/controller`.

A term is a symbolic link `term-00003` whose text is its author. Creating one is exclusive and atomic on every file system, network
ones included, and needs no room for data, so a full disk stops no election. A node's address is `node-00001.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

_NUMBER = r"([0-9]{5}|[1-9][0-9]{5,8})"  # one spelling for each number
_TERM, _NODE = re.compile(f"term-{_NUMBER}"), re.compile(rf"node-{_NUMBER}\.json")
_AUTHOR = re.compile(r"[A-Za-z0-9-]{1,50}")  # short enough to lie inside the link's own entry
_MOST = 64 << 10  # bytes of a node's file


class Claims:
    """The control folder of a run."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> tuple[int, str] | None:
        """The newest term and its author; None before the first. Where something else has taken the name of a term, its author is
        nobody, "": no one is obeyed in that term, and the next number is still free."""
        terms = [int(match[1]) for name in os.listdir(self.folder) if (match := _TERM.fullmatch(name))]
        return (max(terms), self._author(max(terms))) if terms else None

    def claim(self, term: int, author: str) -> bool:
        """Become the author of a term; False where somebody else is. OSError where the folder cannot be written at all."""
        assert _AUTHOR.fullmatch(author), f"{author!r} is no author's name"
        try:
            os.symlink(author, self._term(term))
        except FileExistsError:
            return self._author(term) == author  # on a network file system an answer can be lost after the link was made
        return True

    def announce(self, node: int, text: dict[str, Any]) -> None:
        """Leave word of a node, in place of what it said before. For this user's eyes only, and no secret all the same."""
        assert "token" not in text, "a token is given to those who need it, and never written down for all"
        path, part = self._node(node), self.folder / f".node-{node:05d}.{os.getpid()}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump(text, file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def announced(self) -> dict[int, dict[str, Any]]:
        """What every node has left, by number. What is no node's word is passed over."""
        found = {}
        for name in sorted(os.listdir(self.folder)):
            match = _NODE.fullmatch(name)
            text = _read(self.folder / name) if match else None
            if match and text is not None:
                found[int(match[1])] = text
        return found

    def touch(self, node: int) -> None:
        """A sign of life of a node, where links may fail."""
        with contextlib.suppress(OSError):
            os.utime(self._node(node))

    def touched(self, node: int) -> float:
        """When it gave its last one, by the clock of the file system: for comparing with what was seen before."""
        try:
            return self._node(node).stat().st_mtime
        except OSError:
            return 0.0

    def _term(self, term: int) -> Path:
        return self.folder / f"term-{term:05d}"

    def _node(self, node: int) -> Path:
        return self.folder / f"node-{node:05d}.json"

    def _author(self, term: int) -> str:
        try:
            author = os.readlink(self._term(term))
        except OSError:  # no link
            return ""
        return author if _AUTHOR.fullmatch(author) else ""


def _read(path: Path) -> dict[str, Any] | None:
    """A table in a plain file of reasonable size, or None."""
    try:
        # Neither through a link to somewhere else, nor waiting for a pipe's other end.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            found = file.read(_MOST + 1)
            text = json.loads(found) if len(found) <= _MOST else None
    except (OSError, ValueError, RecursionError):
        return None
    return text if isinstance(text, dict) else None
