"""A pool of ranks in a process of its own, for callers whose process must not be forked: torch, a notebook or a program may have started
threads, and a fork inherits their locks but not the threads. The pool's process loads torch, uses it for nothing else, and forks the ranks.

    python -m phalanx.verification.pool_process CONNECTION_FD PARENT_PID
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Self

from phalanx.host.env import python_env
from phalanx.host.process_tree import die_with, python_command
from phalanx.spec.layout import Layout
from phalanx.verification.rank_pool import RankFailed, RankPool, last_lines

_CLOSE_SECONDS = 10.0  # in which the process ends its ranks


class PoolProcess:
    """A `RankPool` in another process, started on first use. Functions, arguments and results are pickled: a function must be importable."""

    def __init__(self, ranks: int, timeout: float | None = None, device: str = "cpu"):
        self.ranks, self.device = ranks, device
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._working = False
        """A case is under way, or was interrupted."""
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-verify-")

    @property
    def folder(self) -> Path:
        """Folder for files that ranks exchange; removed with the pool."""
        return Path(self._folder.name)

    def run(self, function: Callable[..., Any], layout: Layout, *args: Any) -> list[Any]:
        """Calls `function(mesh, *args)` on the ranks of a layout; returns the result of each. Raises RankFailed."""
        results: list[Any] = self._call(function, layout, args)
        return results

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(mesh, *args)` in a single-process mesh. Raises RankFailed with rank None."""
        return self._call(function, None, args)

    def close(self) -> None:
        if self._process is not None and self._pipe is not None:
            if self._working:
                self._process.kill()  # its ranks die with it
            self._pipe.close()  # which ends the process
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._pipe = None
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, function: Callable[..., Any], layout: Layout | None, args: tuple[Any, ...]) -> Any:
        task = pickle.dumps((function, layout, args))
        process, pipe = self._start()
        self._working = True
        try:
            pipe.send_bytes(task)
            result = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            code = process.wait()
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise RankFailed(None, f"the process that starts the ranks {end}", last_lines(self._log)) from None
        self._working = False
        if isinstance(result, RankFailed):
            raise result
        return result

    @property
    def _log(self) -> Path:
        return self.folder / "pool.log"

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is None or self._pipe is None:
            self._pipe, theirs = Pipe()
            command = python_command("phalanx.verification.pool_process", str(theirs.fileno()), str(os.getpid()))
            with theirs, self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    # Modules of the caller's own, such as model.module, are found where the caller finds them.
                    env=python_env() | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                    start_new_session=True,  # an interrupt of the caller is no interrupt of the ranks: the caller kills them
                )
            self._pipe.send_bytes(pickle.dumps((self.ranks, self._timeout, self.device, self.folder)))
        return self._process, self._pipe


def main() -> None:
    pipe, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with(parent)
    ranks, timeout, device, folder = pickle.loads(pipe.recv_bytes())
    with RankPool(ranks, timeout, device, folder) as pool:
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                return
            function, layout, args = pickle.loads(task)
            try:
                result = pool.alone(function, *args) if layout is None else pool.run(function, layout, *args)
            except RankFailed as failed:
                result = failed
            pipe.send_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
