"""What all nodes of a run share: who is the controller, where the nodes listen, and the records of the run.

A `Registry` is a folder that all nodes see (`FolderRegistry`), or the launcher (`control/launcher_registry`) where there is no such folder.
The controller alone writes records.

In a folder, a term is a symbolic link `term-00003` whose target is the name of its author. Creating a link is exclusive and atomic on every
file system, network ones included, and needs no data block, so a full disk stops no election. The author of a term may offer it to the
others with a link `offer-00003`: then they need not wait until it counts as lost. A node's address is in `node-00001.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from phalanx.control.protocol import NodeInfo
from phalanx.control.run_requests import RequestFiles, RunRequest
from phalanx.events.log import RecordWriter, launch_events
from phalanx.events.records import Event, FailureNoticed, FaultInjected, Finished, HostRejected, Recovered
from phalanx.events.rundir import RunDir

_NUMBER = r"([0-9]{5}|[1-9][0-9]{5,8})"  # one spelling for each number
_TERM, _NODE = re.compile(f"term-{_NUMBER}"), re.compile(rf"node-{_NUMBER}\.json")
_AUTHOR = re.compile(r"[A-Za-z0-9-]{1,50}")  # short enough to be stored inside the link's inode
_MAX_NODE_FILE = 64 << 10  # bytes

HISTORY = (FailureNoticed, Recovered, Finished, HostRejected, FaultInjected)
"""Records that a new controller needs, and the newest step."""


class Registry(Protocol):
    """What the agents of a run share. Methods that are not async return at once."""

    def newest(self) -> tuple[int, str]:
        """The newest term and its author; (0, "") before the first."""

    def holds(self, term: int, author: str) -> bool:
        """Whether this author may lead in this term now."""

    async def claim(self, term: int, author: str) -> bool:
        """Become the author of a term; False if another node is, or the registry cannot be reached."""

    def offer(self, term: int) -> None:
        """The author lets others claim the next term at once. It may claim that itself, too."""

    def offered(self, term: int) -> bool: ...

    def announce(self, node: int, info: NodeInfo) -> None:
        """Publish the name and address of a node."""

    def info(self, node: int) -> NodeInfo | None:
        """What a node has published; None: nothing, or it is gone."""

    def announced(self) -> dict[int, NodeInfo]:
        """What each node has published, by node number."""

    def touch(self, node: int) -> None:
        """Show a sign of life that does not depend on connections between nodes."""

    def touched(self, node: int) -> float:
        """A value that changes with each sign of life of the node."""

    def record(self, line: str, *, if_new: bool = False) -> None:
        """Append a record. `if_new`: the record of a step, unless there is one of that step."""

    async def history(self) -> list[Event]:
        """The records of this launch: `HISTORY` and the newest step, at least."""

    def take_requests(self) -> list[RunRequest]:
        """What somebody asks the running job for, each once; where the launcher keeps the registry, requests come as reports instead."""

    def publish_beats(self, text: str) -> None:
        """Write control/beats.json, for somebody who watches."""


class FolderRegistry:
    """The control folder of a run directory that all nodes see, and its events.jsonl."""

    def __init__(self, rundir: RunDir):
        self.folder, self._events = rundir.control, rundir.events_file
        self._writer: RecordWriter | None = None
        self._newest: int | None = None
        """The newest term that this object has seen."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._requests = RequestFiles(rundir)

    def newest(self) -> tuple[int, str]:
        """The newest term and its author; (0, "") before the first.

        If the name of a term is taken by something that is not a valid link, its author is "": nobody is obeyed in that term, and the
        next number is still free.
        """
        if self._newest is None:
            self._newest = max(
                (int(match[1]) for name in os.listdir(self.folder) if (match := _TERM.fullmatch(name))), default=0
            )
        # Terms follow each other. All nodes look at every order: listing thousands of names each time would take longer than the order.
        while os.path.lexists(self._term(self._newest + 1)):
            self._newest += 1
        return (self._newest, self._author(self._newest)) if self._newest else (0, "")

    def holds(self, term: int, author: str) -> bool:
        return self.newest() == (term, author)

    async def claim(self, term: int, author: str) -> bool:
        """Raises OSError if the folder cannot be written."""
        assert _AUTHOR.fullmatch(author), f"{author!r} is no author's name"
        try:
            os.symlink(author, self._term(term))
        except OSError:
            # A lost race is a FileExistsError, on some network file systems a PermissionError. Others lose the answer to a link that
            # they have made. The link decides.
            if not os.path.lexists(self._term(term)):
                raise
            return self._author(term) == author
        self._newest = max(term, self._newest or 0)
        return True

    def offer(self, term: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.symlink("offer", self._offer(term))

    def offered(self, term: int) -> bool:
        return os.path.lexists(self._offer(term))

    def announce(self, node: int, info: NodeInfo) -> None:
        """In a file that only this user can read."""
        path, part = self._node(node), self.folder / f".node-{node:05d}.{os.getpid()}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump(asdict(info), file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def info(self, node: int) -> NodeInfo | None:
        """None if the file is invalid."""
        return _read(self._node(node))

    def announced(self) -> dict[int, NodeInfo]:
        """Invalid files are ignored."""
        matches = filter(None, map(_NODE.fullmatch, sorted(os.listdir(self.folder))))
        nodes = {int(match[1]): _read(self.folder / match[0]) for match in matches}
        return {node: info for node, info in nodes.items() if info is not None}

    def touch(self, node: int) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._node(node))

    def touched(self, node: int) -> float:
        """On the file system's clock."""
        try:
            return self._node(node).stat().st_mtime
        except OSError:
            return 0.0

    def record(self, line: str, *, if_new: bool = False) -> None:
        """Raises OSError if the file cannot be written, but not if the disk is full: the record waits in memory then."""
        if self._writer is None:
            self._writer = RecordWriter(self._events)
        self._writer.write(line, if_new=if_new)

    async def history(self) -> list[Event]:
        return launch_events(self._events)

    def take_requests(self) -> list[RunRequest]:
        return self._requests.take()

    def publish_beats(self, text: str) -> None:
        self._requests.publish(text)

    def _term(self, term: int) -> Path:
        return self.folder / f"term-{term:05d}"

    def _offer(self, term: int) -> Path:
        return self.folder / f"offer-{term:05d}"

    def _node(self, node: int) -> Path:
        return self.folder / f"node-{node:05d}.json"

    def _author(self, term: int) -> str:
        try:
            author = os.readlink(self._term(term))
        except OSError:  # not a link
            return ""
        return author if _AUTHOR.fullmatch(author) else ""


def _read(path: Path) -> NodeInfo | None:
    """Read what a node has published from a regular file of reasonable size, else None."""
    try:
        # Follow no link to elsewhere, and do not block on a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(_MAX_NODE_FILE + 1)
            return NodeInfo(**json.loads(content)) if len(content) <= _MAX_NODE_FILE else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
