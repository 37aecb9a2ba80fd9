"""The process in which the sinks of a run live. It follows events.jsonl as everybody may: the ranks know nothing of it, and a sink that is slow or
fails costs them nothing. `watch/sink_process` starts it.

Each sink has a thread and a position in the file, which is its queue: a sink whose server is away reads on where it was when the server is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from phalanx.events.log import EventLog, decode_line
from phalanx.events.records import Event, Warned
from phalanx.events.rundir import RunDir, replace_file
from phalanx.host.env import limit_retries
from phalanx.host.process_tree import unblock_stop_signals
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Run, Watch
from phalanx.watch.follow_lines import LineFollower
from phalanx.watch.followed_run import RunFolder
from phalanx.watch.metrics_server import MetricsServer
from phalanx.watch.page_access import Access
from phalanx.watch.sink_process import DRAIN_SECONDS
from phalanx.watch.sinks.sink import SINKS, Sink, SinkKind, SinkSettings, sinks_of

_IDLE_SECONDS = 1.0
_SAVE_SECONDS = 2.0
"""Between two writes of the positions. A sink process that is killed gives so many seconds of records again."""
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds until the next attempt of a sink that failed."""
_PRIORITY = 10
"""Added to the niceness of the launcher: the ranks come first."""
_RUN_STARTED = b'{"event": "run_started"'


class Positions:
    """Up to where each sink has got the events, in a file: a later launch goes on there."""

    def __init__(self, file: Path):
        self._file, self._lock = file, threading.Lock()
        self._known: dict[str, int] = {}
        self._saved = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(file.read_text())
            self._known = {name: offset for name, offset in known.items() if isinstance(offset, int) and offset >= 0}

    def begin(self, name: str, events: Path, *, from_launch: bool) -> int:
        """Where a sink begins: where it was, or at the first record of this launch."""
        launch, size = launch_offset(events), events.stat().st_size if events.exists() else 0
        offset = self._known.get(name, launch)
        return launch if offset > size else max(offset, launch) if from_launch else offset

    def put(self, name: str, offset: int) -> None:
        with self._lock:
            self._known[name] = offset
            if time.monotonic() - self._saved < _SAVE_SECONDS:
                return
        self.save()

    def save(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._saved = time.monotonic()
            replace_file(self._file, json.dumps(self._known))


def launch_offset(events: Path) -> int:
    """Offset of the record with which the newest launch begins."""
    try:
        with events.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            at = whole.rfind(_RUN_STARTED)  # nothing inside of a record looks like it: its quotes would be escaped
            return max(0, at)
    except (OSError, ValueError):
        return 0


class SinkThread(threading.Thread):
    """Gives a sink the records of a run, until the run is over. Nothing that the sink does ends anything else."""

    def __init__(self, name: str, kind: SinkKind, settings: SinkSettings, positions: Positions, over: threading.Event):
        super().__init__(name=name, daemon=True)
        self.kind, self._settings, self._positions, self._over = kind, settings, positions, over
        self._lines = LineFollower(settings.rundir.events_file)
        self._lines.offset = positions.begin(name, settings.rundir.events_file, from_launch=kind.from_launch)
        positions.put(name, self._lines.offset)  # of a sink that never works, so that a later launch begins here
        self._sink: Sink | None = None
        self._wait = _FIRST_WAIT

    def run(self) -> None:
        idle_since = time.monotonic()
        while True:
            over = self._over.is_set()  # before the file is read: what was written until then is read below
            events, done = self._read()
            if events or not done or time.monotonic() - idle_since >= _IDLE_SECONDS:
                if not self._give(events):
                    return  # it failed to the end
                idle_since = time.monotonic()
                self._positions.put(self.name, self._lines.offset)
            if done and over:
                break
            if done:
                self._over.wait(self.kind.seconds)
        try:
            self._open().close()
        except Exception as error:
            self._report(error)

    def _read(self) -> tuple[list[Event], bool]:
        """The next records, and whether there are no others now."""
        block = self._lines.read()
        if block is None:
            return [], True
        return [event for event in map(decode_line, block.lines) if event is not None], False

    def _give(self, events: list[Event]) -> bool:
        """Give the records until the sink takes them, with longer and longer pauses; False if it has not until the end of the run."""
        while True:
            last = self._over.is_set()
            try:
                self._open().receive(events)
            except Exception as error:
                self._report(error)
                if last:
                    return False
                self._over.wait(self._wait)
                self._wait = min(2 * self._wait, _LONGEST_WAIT)
            else:
                self._wait = _FIRST_WAIT
                return True

    def _open(self) -> Sink:
        if self._sink is None:
            self._sink = self.kind.open(self._settings)
        return self._sink

    def _report(self, error: Exception) -> None:
        traceback.print_exception(error)
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._settings.warn(
            f"{self.kind.key} does not take records ({words}): the run goes on, and they are given again later. See logs/sinks.log."
        )


class _Warner:
    """Warns once for each sink, in the records of the run, and never with a secret."""

    def __init__(self, rundir: RunDir, secrets: list[str]):
        self._file, self._secrets = rundir.events_file, secrets
        self._lock, self._warned = threading.Lock(), set[str]()

    def of(self, name: str) -> Callable[[str], None]:
        def warn(sentence: str) -> None:
            for hidden in self._secrets:
                sentence = sentence.replace(hidden, "…")
            print(f"{name}: {sentence}", file=sys.stderr, flush=True)
            with self._lock, contextlib.suppress(OSError):
                if name not in self._warned:
                    self._warned.add(name)
                    log = EventLog(self._file)
                    log.emit(Warned(message=sentence))
                    log.close()

        return warn


class _Hiding(io.TextIOBase):
    """Standard output and error without secrets: libraries print addresses that they could not reach."""

    def __init__(self, secrets: list[str]):
        super().__init__()
        self._secrets = secrets

    def write(self, text: str) -> int:
        for hidden in self._secrets:
            text = text.replace(hidden, "…")
        with contextlib.suppress(OSError):  # the disk is full
            os.write(2, text.encode(errors="replace"))
        return len(text)


async def _main(settings: dict[str, str | None]) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), ended.set)  # the launcher holds it open
    rundir = RunDir(Path(str(settings["run_dir"])))
    run = loads(str(settings["run"]), name=rundir.run_file.name)
    url, token = settings["alert_url"], settings["metrics_token"]
    secrets = [value for value in (url, token) if value]
    warner, over = _Warner(rundir, secrets), threading.Event()
    positions = Positions(rundir.path / "sinks.json")
    if url is None and run.watch.alerts.url is not None:
        warner.of("alerts")(f"watch.alerts.url = {run.watch.alerts.url} is not set on this host: it sends no alerts.")
    threads = []
    for name, kind in wanted(run, url).items():
        given = SinkSettings(run=run, rundir=rundir, warn=warner.of(name), alert_url=url)
        threads.append(SinkThread(name, kind, given, positions, over))
    for thread in threads:
        thread.start()
    if run.watch.metrics_port is not None:
        await _serve_metrics(run.watch, rundir, token, warner.of("metrics"))
    await ended.wait()
    over.set()
    deadline = time.monotonic() + DRAIN_SECONDS
    for thread in threads:
        await asyncio.to_thread(thread.join, max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            warner.of(thread.name)(
                f"{thread.kind.key} has not taken the last records within {DRAIN_SECONDS:.0f} s of the end of the run. See logs/sinks.log."
            )
    positions.save()


def wanted(run: Run, alert_url: str | None) -> dict[str, SinkKind]:
    """The sinks of a run. The run file of the directory does not have the secrets, and so does not say whether there are alerts."""
    kinds = sinks_of(run.watch)
    kinds.pop("alerts", None)
    return kinds if alert_url is None else kinds | {"alerts": SINKS["alerts"]}


async def _serve_metrics(watch: Watch, rundir: RunDir, token: str | None, warn: Callable[[str], None]) -> None:
    assert watch.metrics_port is not None
    server = MetricsServer(RunFolder(rundir.path), Access(watch.metrics_host, token))
    try:
        await server.start_at(watch.metrics_port)
    except (OSError, RunError) as error:
        warn(f"watch.metrics_port = {watch.metrics_port}: no metrics are served ({error}). The run goes on.")


def _first_line() -> bytes:
    """Without a buffer that would hide the end of the input from the event loop."""
    line = b""
    while not line.endswith(b"\n") and (more := os.read(0, 1 << 16)):
        line += more
    return line


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they ask the run to stop; its last records are still to be given
    unblock_stop_signals()
    limit_retries()  # of libraries: a sink that fails is tried again here
    os.nice(_PRIORITY)
    received = json.loads(_first_line())
    sys.stdout = sys.stderr = _Hiding([received[key] for key in ("alert_url", "metrics_token") if received[key]])
    os.dup2(2, 1)  # nobody reads standard output: a library that prints would wait for ever
    asyncio.run(_main(received))
    os._exit(0)  # a sink that waits for its server is not waited for
