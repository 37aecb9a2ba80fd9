"""Serves the page until its process is told to end: by a signal, for `phalanx watch`, or with the launcher of a run or a sweep that has `watch.page`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpointing.location import Local, open_location
from phalanx.host.process_tree import unblock_stop_signals
from phalanx.spec.errors import RunError
from phalanx.watch.followed_run import RunFolder
from phalanx.watch.mirrored_runs import mirrored
from phalanx.watch.page_access import Access
from phalanx.watch.page_server import PORT, PageServer


@dataclass(frozen=True, slots=True)
class Served:
    """Where a page is."""

    host: str
    port: int
    token: str | None
    asked_port: int

    @property
    def address(self) -> str:
        """The address to open."""
        named = "127.0.0.1" if self.host in ("localhost", "127.0.0.1") else self.host
        if self.host in ("0.0.0.0", "::"):
            named = os.uname().nodename
        host = f"[{named}]" if ":" in named else named
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    @property
    def moved(self) -> str | None:
        """What to say if the port was taken."""
        return (
            f"port {self.asked_port} is taken; the page is at port {self.port}"
            if self.asked_port not in (0, self.port)
            else None
        )


async def serve(path: str, access: Access, port: int, announce: Callable[[Served], None], until: asyncio.Event) -> None:
    """Serve the run or the runs at a path or a URL, until the event is set. Raises RunError if that is not possible."""
    with run_folder(path) as folder:
        server, found = await PageServer(folder, access).start(port)
        announce(Served(access.host, found, access.token, port))
        await until.wait()
        server.close()  # without waiting for its connections: browsers keep theirs


@contextlib.contextmanager
def run_folder(path: str) -> Iterator[RunFolder]:
    """The runs at a path, or at a URL of an object store. Raises RunError if there is no such folder."""
    source = open_location(path)
    if isinstance(source, Local):
        if not source.path.is_dir():
            raise RunError(
                f"{path} is not a folder: name a run directory, such as runs/NAME, or a folder of them, such as runs."
            )
        yield RunFolder(source.path)
        return
    with mirrored(source) as folder:
        yield folder


async def _serve_path(path: Path) -> None:
    """Serve until standard input ends, which the launcher holds open."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), ended.set)

    def announce(served: Served) -> None:
        print(served.address + (f" ({served.moved})" if served.moved else ""), flush=True)

    try:
        await serve(str(path), Access("127.0.0.1"), PORT, announce, ended)
    except RunError as error:
        print(error, flush=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they ask the run to stop; its last steps are worth watching
    unblock_stop_signals()
    asyncio.run(_serve_path(Path(json.loads(os.read(0, 1 << 16))["path"])))
    sys.stdout.flush()
    os._exit(0)  # requests in progress are not waited for
