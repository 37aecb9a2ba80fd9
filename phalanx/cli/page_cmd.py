"""`phalanx watch`: a live page of a run, or of all runs in a folder."""

from __future__ import annotations

import asyncio
import signal
import webbrowser
from collections.abc import Callable
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, print_json
from phalanx.spec.check_watch import is_loopback
from phalanx.watch.page_access import Access, new_token
from phalanx.watch.page_server import PORT
from phalanx.watch.serve_page import Served, serve


def watch(
    path: Annotated[
        str,
        Argument(
            metavar="RUN_DIR|FOLDER|URL",
            help="Directory of a run, a folder of runs such as runs, or either in an object store: s3://…",
        ),
    ],
    host: Annotated[
        str, Option(help="Address to listen at. Others than loopback demand a token, which is part of the printed address.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; the next free one if it is taken. 0: any.")] = PORT,
    token: Annotated[
        bool, Option("--token", help="Demand a token on loopback, too: every user of this machine can reach it.")
    ] = False,
    open_browser: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    json: AsJson = False,
) -> None:
    """Serve a live page of a run or of several: is it learning, is it fast, what broke, is it as promised, when is it done."""
    access = Access(host, new_token() if token or not is_loopback(host) else None)

    def announce(served: Served) -> None:
        if served.moved is not None:
            console.print(served.moved, style="yellow", markup=False, soft_wrap=True)
        console.print(
            f"{path} at {served.address}  (Ctrl-C ends the page, not the run)", markup=False, highlight=False, soft_wrap=True
        )
        if json:
            print_json({"address": served.address, "host": served.host, "port": served.port, "token": served.token})
        if open_browser:
            webbrowser.open(served.address)

    asyncio.run(_until_stopped(path, access, port, announce))


async def _until_stopped(path: str, access: Access, port: int, announce: Callable[[Served], None]) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await serve(path, access, port, announce, stopped)
