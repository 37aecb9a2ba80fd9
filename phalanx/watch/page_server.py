"""The server of the page: answers requests for the files of the front end and for views of runs, which it reads as far as somebody looks.

One thread of asyncio holds all connections, so that slow readers cost a buffer each and no thread. Without a request nothing is read: a page that
nobody looks at costs a run nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import secrets
import socket
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import urlencode

from phalanx.events.records import plain
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject
from phalanx.watch import plan_views, run_views
from phalanx.watch.compare_view import MAX_RUNS, compare
from phalanx.watch.expert_digest import MAX_LAYERS
from phalanx.watch.followed_run import FollowedRun, RunFolder
from phalanx.watch.http_messages import MAX_HEAD, BadRequest, Request, Response, parse_request
from phalanx.watch.open_metrics import CONTENT_TYPE, exposition
from phalanx.watch.page_access import Access
from phalanx.watch.rank_digest import MAX_RANKS
from phalanx.watch.run_views import View, Window

PORT = 8686
"""The first port that is tried."""
_PORTS = 100
"""Ports that are tried."""
_MAX_CONNECTIONS = 600
_IDLE_SECONDS, _HEAD_SECONDS, _SEND_SECONDS, _CLOSE_SECONDS = 30.0, 10.0, 20.0, 2.0
_BUFFER = 64 << 10
"""Bytes of a response that wait for a slow reader before it is waited for."""
_FIRST_SECONDS, _READ_SECONDS, _PAUSE_SECONDS = 0.12, 0.1, 0.02
"""Time that a request reads events before it is answered from what is known; then they are read in such portions, with pauses in which others are
answered: Python's threads take turns."""
_CACHE_BYTES = 32 << 20
_VIEWS: dict[str, View] = {
    "overview": run_views.overview, "promise": plan_views.promise, "ranks": plan_views.ranks, "failures": run_views.failures,
    "checkpoints": run_views.checkpoints, "data": run_views.data, "samples": run_views.samples, "experts": run_views.experts,
}  # fmt: skip
_TYPES = {
    "txt": "text/plain; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_NOT_BUILT = (
    "<!doctype html><html lang=en><title>phalanx watch</title><p>The page is not built: run <code>make page</code> in the "
    "repository, which needs npm, or install a released wheel."
)


class PageServer:
    """Serves the runs of a folder."""

    def __init__(self, folder: RunFolder, access: Access):
        self.folder, self.access = folder, access
        self._static = static_files()
        self._nonce = secrets.token_hex(4)
        """Part of every ETag: a restarted server counts its versions anew."""
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="watch")
        self._cache: OrderedDict[str, Response] = OrderedDict()
        self._pending: dict[str, asyncio.Task[Response]] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._connections = 0

    async def start(self, port: int) -> tuple[asyncio.Server, int]:
        """Listen at this port, or at the next one that is free. Raises RunError if none is."""
        for candidate in range(port, min(port + _PORTS, 65536)) if port else (0,):
            try:
                server = await asyncio.start_server(self._serve, self.access.host, candidate, limit=MAX_HEAD, backlog=256)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise RunError(
                    f"--host {self.access.host}: cannot listen there: {error.strerror or error}. Name an address of this machine."
                ) from None
            return server, server.sockets[0].getsockname()[1]
        raise RunError(f"--port {port}: this port and the next {_PORTS - 1} are taken: name another.")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        transport = writer.transport
        transport.set_write_buffer_limits(high=_BUFFER)
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self._connections > _MAX_CONNECTIONS:
                await self._send(writer, None, Response(b"Too many connections.\n", status=HTTPStatus.SERVICE_UNAVAILABLE))
                return
            while await self._answer_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the reader has gone away, says nothing, or does not read
        except asyncio.CancelledError:
            pass  # the server ends
        finally:
            self._connections -= 1
            writer.close()
            try:
                await asyncio.wait_for(writer.wait_closed(), _CLOSE_SECONDS)
            except (OSError, TimeoutError):
                transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the next request; returns whether another may follow."""
        request = None
        try:
            first = await asyncio.wait_for(reader.readexactly(1), _IDLE_SECONDS)
            rest = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
            request = parse_request(first + rest[:-4])
            response = await self._respond(request)
        except (OSError, EOFError, TimeoutError):
            raise  # the reader has gone away, or says nothing
        except asyncio.LimitOverrunError:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            response, request = Response(f"A request has at most {MAX_HEAD} bytes.\n".encode(), status=status), None
        except BadRequest as refused:
            more = (("Allow", "GET, HEAD"),) if refused.status == HTTPStatus.METHOD_NOT_ALLOWED else ()
            response, request = Response(f"{refused}\n".encode(), status=refused.status, more=more), None
        except Exception:
            traceback.print_exc()  # a mistake of ours: for the terminal, not for the reader
            response, request = (
                Response(b"This cannot be shown: the server has failed.\n", status=HTTPStatus.INTERNAL_SERVER_ERROR),
                None,
            )
        await self._send(writer, request, response)
        return request is not None and request.keep_alive

    async def _send(self, writer: asyncio.StreamWriter, request: Request | None, response: Response) -> None:
        writer.write(response.encode(request))
        await asyncio.wait_for(writer.drain(), _SEND_SECONDS)

    async def _respond(self, request: Request) -> Response:
        if not self.access.knows_host(request.headers.get("host")):
            raise BadRequest(
                HTTPStatus.FORBIDDEN,
                "This address does not name the machine of the page: open it by the address that `phalanx watch` printed.",
            )
        given = request.value("token")
        if self.access.token is not None and given is not None and self.access.admits(given):
            query = urlencode({name: values for name, values in request.query.items() if name != "token"}, doseq=True)
            cookie = f"{self.access.cookie}={given}; Path=/; HttpOnly; SameSite=Strict"
            where = f"/{f'?{query}' if query else ''}"
            return Response(b"", status=HTTPStatus.SEE_OTHER, more=(("Location", where), ("Set-Cookie", cookie)))
        if not self.access.admits(self.access.token_of(request.headers)):
            refusal = b"This page needs its token: open the address that `phalanx watch` printed.\n"
            return Response(refusal, status=HTTPStatus.UNAUTHORIZED, more=(("WWW-Authenticate", "Bearer"),))
        return await self._route(request)

    async def _route(self, request: Request) -> Response:
        """The response to a reader who may read."""
        if request.path == "/metrics":
            return await self.metrics(request)
        static = self._static.get(request.path)
        if static is not None:
            return static
        if request.path == "/api/runs":
            return await self._in_thread(self._list)
        if request.path == "/api/view":
            return await self._view(request)
        if request.path == "/api/compare":
            return await self._compare(request)
        return Response(b"There is no such page.\n", status=HTTPStatus.NOT_FOUND)

    async def _in_thread(self, compute: Callable[[], Response]) -> Response:
        return await asyncio.get_running_loop().run_in_executor(self._pool, compute)

    def _list(self) -> Response:
        runs = [run for name in self.folder.names if (run := self.folder.get(name, glance=True)) is not None]
        rows = sorted((run.glance() for run in runs), key=lambda row: -(row["time"] or 0.0))  # type: ignore[operator]
        return _json({"folder": self.folder.title, "runs": rows}, "")

    async def _run(self, name: str | None) -> FollowedRun:
        """A run, read as far as there was time; the rest is read in the background."""
        found = None if name is None else await asyncio.get_running_loop().run_in_executor(self._pool, self._look, name)
        if found is None:
            raise BadRequest(HTTPStatus.NOT_FOUND, "There is no such run.")
        run, is_read = found
        if not is_read and run.name not in self._reading:
            self._reading[run.name] = asyncio.create_task(self._read_on(run))
        return run

    def _look(self, name: str) -> tuple[FollowedRun, bool] | None:
        """A run, and whether all of it is read, or being read."""
        run = self.folder.get(name)
        return None if run is None else (run, run.name in self._reading or run.catch_up(_FIRST_SECONDS))

    async def _read_on(self, run: FollowedRun) -> None:
        try:
            await asyncio.sleep(_PAUSE_SECONDS)
            while not await asyncio.get_running_loop().run_in_executor(self._pool, run.catch_up, _READ_SECONDS):
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            del self._reading[run.name]

    async def metrics(self, request: Request) -> Response:
        """The figures of a run, or of all runs that have changed lately, for Prometheus."""
        asked = request.value("run")
        names = await asyncio.get_running_loop().run_in_executor(self._pool, self.folder.recent) if asked is None else [asked]
        runs = []
        for name in names:
            with contextlib.suppress(*([] if asked is not None else [BadRequest])):  # a run that was just removed is no error
                runs.append(await self._run(name))
        return await self._in_thread(lambda: Response(exposition(runs).encode(), CONTENT_TYPE))

    async def _view(self, request: Request) -> Response:
        name, window = request.value("view"), _window(request)
        run = await self._run(request.value("run"))
        more = ""
        if name == "rank":
            view = partial(plan_views.rank_story, run, _whole(request.value("rank"), MAX_RANKS))
        elif name == "expert_layer":
            view = partial(run_views.expert_layer, run, _whole(request.value("layer"), MAX_LAYERS), window)
        elif name == "pipeline":
            step, copy = (_whole(request.value(key) or missing, 10**9) for key, missing in (("step", "0"), ("copy", "0")))
            view = partial(plan_views.executed_pipeline, run, window, step or None, copy)
            more = await asyncio.get_running_loop().run_in_executor(self._pool, run.timeline.version)
        elif name in _VIEWS:
            view = partial(_VIEWS[name], run, window)
        else:
            raise BadRequest(HTTPStatus.NOT_FOUND, "There is no such view.")
        return await self._shared(request, run.version + more, partial(self._compute, run, view, more))

    async def _compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query.get("run", [])))[:MAX_RUNS]
        runs = [await self._run(name) for name in names]
        figure, axis = request.value("figure") or "", request.value("axis") or ""
        version = "|".join(run.version for run in runs)
        window = _window(request)
        return await self._shared(request, version, lambda: _json(compare(runs, figure, axis, window), self._etag(version)))

    def _compute(self, run: FollowedRun, view: partial[JsonObject], more: str) -> Response:
        """`more`: the version of what the view shows besides the events."""
        with run.lock:
            version = run.version + more
            answer = view() | {"header": run_views.header(run)}
        return _json(answer, self._etag(version))

    def _etag(self, version: str) -> str:
        return f'"{self._nonce}.{version}"'

    async def _shared(self, request: Request, version: str, compute: Callable[[], Response]) -> Response:
        """The response, computed once for all who ask for the same at the same time."""
        key = f"{request.path}?{urlencode(request.query, doseq=True)}"
        known = self._cache.get(key)
        if known is not None and known.etag == self._etag(version):
            self._cache.move_to_end(key)
            return known
        task = self._pending.get(key)
        if task is None:
            task = self._pending[key] = asyncio.create_task(self._in_thread(compute))
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        response = await asyncio.shield(task)
        self._cache[key] = response
        while len(self._cache) > 1 and sum(each.size for each in self._cache.values()) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return response


def static_files() -> dict[str, Response]:
    """The built front end, by path. It is in memory: no path of a request becomes one of a file."""
    folder = files("phalanx.watch").joinpath("static")
    found: dict[str, Response] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        extension = entry.name.rpartition(".")[2]
        if extension in _TYPES:
            body = entry.read_bytes()
            found[f"/{entry.name}"] = Response.of(body, _TYPES[extension], f'"{hash(body):x}"')
    found["/"] = found.pop("/index.html", Response(_NOT_BUILT.encode(), _TYPES["html"]))
    return found


def _json(answer: JsonObject, etag: str) -> Response:
    try:
        text = json.dumps(answer, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number of a record that JSON lacks
        text = json.dumps(plain(answer), allow_nan=False, separators=(",", ":"))
    return Response.of(text.encode(), "application/json", etag) if etag else Response(text.encode(), "application/json")


def _window(request: Request) -> Window:
    low, high = _real(request.value("from")), _real(request.value("to"))
    width = min(2000, max(50, _whole(request.value("width") or "600", 1 << 16)))
    return Window(low=low, high=high, width=width, pack=request.value("pack") == "1")


def _real(value: str | None) -> float | None:
    if not value:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadRequest(HTTPStatus.BAD_REQUEST, "from and to are numbers.")
    return number


def _whole(value: str | None, limit: int) -> int:
    if value is None or not value.isascii() or not value.isdecimal() or len(value) > 9 or int(value) >= limit:
        raise BadRequest(HTTPStatus.BAD_REQUEST, f"This is a number from 0 to {limit - 1}.")
    return int(value)
