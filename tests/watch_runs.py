"""Run directories with made-up events, and a server of the page that a test asks over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from phalanx.watch.followed_run import RunFolder
from phalanx.watch.page_access import Access
from phalanx.watch.page_server import PageServer

Record = dict[str, Any]


def started(time: float = 0.0, **more: Any) -> Record:
    layout = {
        "pipeline": 1,
        "data": 2,
        "shard": 1,
        "context": 1,
        "tensor": 2,
        "schedule": "1f1b",
        "schedule_file": None,
        "stages": None,
    }
    promise = {
        "seconds": 2.0, "low": 1.5, "high": 3.0, "tokens_per_second": 512.0, "memory": {"parameters": 100.0, "activations": 50.0, "logits": 10.0},
        "total_memory": 160.0, "mfu": 0.4, "days": 10 * 2.0 / 86400, "price": 20.0, "split": {"compute": 1.5, "launch": 0.1, "data": 0.4},
    }  # fmt: skip
    return {
        "event": "run_started", "time": time, "version": "0.1.0", "ranks": 4, "device": "cpu", "steps": 10, "parameters": 1000, "micro_batch": 1,
        "accumulation": 2, "layout": layout, "compute": "fp32", "promise": promise,
    } | more  # fmt: skip


def step(number: int, time: float | None = None, **more: Any) -> Record:
    return {
        "event": "step", "time": 2.0 * number if time is None else time, "step": number, "loss": 5.0 - 0.1 * number, "tokens": 1024, "samples": 8 * number,
        "batch_digest": "0", "learning_rate": 1e-3, "grad_norm": 1.0, "seconds": 2.0, "tokens_per_second": 512.0, "flops_per_second": 1e9, "mfu": 0.4,
        "memory": 150, "expert_load": None, "preferred": None, "reward": None,
    } | more  # fmt: skip


def lines(records: Iterable[Record]) -> bytes:
    """The records as a run writes them."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_run(path: Path, records: Iterable[Record], run_file: str = "[train]\nbatch = 8\n") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.toml").write_text(run_file)
    (path / "events.jsonl").write_bytes(lines(records))
    return path


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server."""

    def __init__(self, port: int):
        self.port = port

    def get(self, target: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, target, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        finally:
            connection.close()

    def view(self, run: str, view: str, **fields: Any) -> Any:
        answer = self.get(f"/api/view?{urlencode({'run': run, 'view': view} | fields)}")
        assert answer.status == 200, answer
        return answer.json


@contextmanager
def serving(folder: Path, access: Access | None = None) -> Iterator[Client]:
    """A server of this process, at a free port."""
    ready = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        stop = asyncio.Event()
        server, port = await PageServer(RunFolder(folder), access or Access("127.0.0.1")).start(0)
        found.extend((port, asyncio.get_running_loop(), stop))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    port, loop, stop = found
    try:
        yield Client(port)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
