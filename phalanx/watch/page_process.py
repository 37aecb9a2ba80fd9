"""The page of a run or a sweep that has `watch.page`: a process of its own beside the launcher, which does not load the server."""

from __future__ import annotations

import contextlib
import select
import subprocess
from pathlib import Path

from phalanx.host.process_tree import ModuleProcess

_START_SECONDS = 20.0
"""A page that is not there by then is not waited for: the run matters more."""


class PageProcess:
    """The page of a run or of a folder of runs, in a process of its own, which ends with this one."""

    def __init__(self, path: Path, log: Path):
        self._process = ModuleProcess("phalanx.watch.serve_page", {"path": str(path.absolute())}, log)
        self._log = log
        self._answer: str | None = None

    def wait(self) -> str:
        """The address, or why there is none."""
        if self._answer is None:
            ready, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
            line = self._process.stdout.readline() if ready else b""
            self._answer = line.decode().strip() or f"the page could not be started; see {self._log}"
        return self._answer

    def close(self) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._process.close(1.0)
