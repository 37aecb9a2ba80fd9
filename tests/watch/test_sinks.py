"""Sinks of records: each gets every record once and in order, whatever its server does, and costs nobody else anything."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from alert_receiver import receiving, until
from happened import a_step, evaluated, failed, finished, recovered, run_started

from phalanx.events.log import read_events
from phalanx.events.records import Event, Step, Warned, encode
from phalanx.events.rundir import RunDir
from phalanx.spec.load import loads
from phalanx.spec.run import Run
from phalanx.watch.run_sinks import Positions, SinkThread, launch_offset
from phalanx.watch.sink_process import SinkProcess
from phalanx.watch.sinks.alert_rules import Alert
from phalanx.watch.sinks.alert_sink import AlertSink, message, post
from phalanx.watch.sinks.outbox import Outbox
from phalanx.watch.sinks.sink import SINKS, SinkKind, SinkSettings

RUN = "[train]\nbatch = 8\nsteps = 10\n"


def write(rundir: RunDir, *events: Event) -> None:
    with rundir.events_file.open("a") as file:
        file.writelines(f"{encode(event)}\n" for event in events)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "tiny")
    made.create()
    return made


class Recording:
    """A sink that notes what it gets, and fails as often as it is told."""

    def __init__(self, failures: int = 0):
        self.seen: list[Event] = []
        self.failures, self.closed = failures, False

    def receive(self, events: Sequence[Event]) -> None:
        if events and self.failures:
            self.failures -= 1
            raise ConnectionError("the server is away")
        self.seen += events

    def close(self) -> None:
        self.closed = True


class Kind(SinkKind):
    """A kind whose sink the test has."""

    sink: Recording

    def open(self, settings: SinkSettings) -> Recording:
        return self.sink


def kind_of(sink: Recording, *, from_launch: bool = False) -> SinkKind:
    made = Kind("none", lambda watch: True, "watch.none", seconds=0.01, from_launch=from_launch)
    object.__setattr__(made, "sink", sink)
    return made


def settings_of(
    rundir: RunDir, warn: Callable[[str], None] = print, run: Run | None = None, url: str | None = None
) -> SinkSettings:
    return SinkSettings(run=run or loads(RUN), rundir=rundir, warn=warn, alert_url=url)


def follow(
    rundir: RunDir, kind: SinkKind, warn: Callable[[str], None] = print
) -> tuple[SinkThread, threading.Event, Positions]:
    over, positions = threading.Event(), Positions(rundir.path / "sinks.json")
    thread = SinkThread("none", kind, settings_of(rundir, warn), positions, over)
    thread.start()
    return thread, over, positions


def test_records_come_in_order_while_the_run_goes_on(rundir: RunDir) -> None:
    sink = Recording()
    write(rundir, run_started(), a_step(1))
    thread, over, _ = follow(rundir, kind_of(sink))
    until(lambda: len(sink.seen) == 2, "the first records")
    with rundir.events_file.open("a") as file:
        file.write('{"event": "step", "broken\n{"event": "unknown"}\n')
    write(rundir, a_step(2), finished(2))
    over.set()
    thread.join(30)
    assert sink.seen == read_events(rundir.events_file) and len(sink.seen) == 4 and sink.closed


def test_a_sink_that_fails_gets_the_same_records_again_and_warns(rundir: RunDir) -> None:
    sink, warnings = Recording(failures=2), list[str]()
    write(rundir, run_started(), a_step(1))
    thread, over, _ = follow(rundir, kind_of(sink), warnings.append)
    until(lambda: len(sink.seen) == 2, "the records after two failures")
    over.set()
    thread.join(30)
    assert sink.seen == read_events(rundir.events_file)
    assert len(warnings) == 2 and "watch.none does not take records (ConnectionError: the server is away)" in warnings[0]


def test_a_sink_that_never_works_ends_with_the_run_and_a_later_launch_catches_up(rundir: RunDir) -> None:
    broken, works = Recording(failures=1 << 30), Recording()
    write(rundir, run_started(), a_step(1), a_step(2))
    thread, over, positions = follow(rundir, kind_of(broken))
    over.set()
    thread.join(30)
    assert not thread.is_alive() and not broken.seen and not broken.closed
    positions.save()
    write(rundir, run_started(2000.0), a_step(3))
    thread, over, _ = follow(rundir, kind_of(works))
    over.set()
    thread.join(30)
    assert [event.step for event in works.seen if isinstance(event, Step)] == [1, 2, 3]


@pytest.mark.parametrize("from_launch, first", [(False, 1000.0), (True, 2000.0)])
def test_a_new_launch_begins_where_the_sink_was_or_at_its_first_record(rundir: RunDir, from_launch: bool, first: float) -> None:
    write(rundir, run_started(1000.0), Warned(time=1.0, message='a "{"event": "run_started"" in a text'))
    before = rundir.events_file.stat().st_size
    write(rundir, run_started(2000.0), a_step(1))
    assert launch_offset(rundir.events_file) == before
    positions = Positions(rundir.path / "sinks.json")
    assert positions.begin("new", rundir.events_file, from_launch=from_launch) == before, "without a position: this launch"
    positions.put("known", 0)
    positions.save()
    known = Positions(rundir.path / "sinks.json").begin("known", rundir.events_file, from_launch=from_launch)
    (line, *_) = rundir.events_file.read_bytes()[known:].splitlines()
    assert json.loads(line)["time"] == first
    (rundir.path / "sinks.json").write_text('{"known": 99999999, "new": "x"}')
    assert Positions(rundir.path / "sinks.json").begin("known", rundir.events_file, from_launch=False) == before


def test_the_outbox_keeps_the_newest_and_waits_longer_and_longer() -> None:
    now, attempts, sent = [0.0], list[float](), list[int]()
    away = True

    def send(batch: list[int]) -> None:
        attempts.append(now[0])
        if away:
            raise OSError("away")
        sent.extend(batch)

    outbox = Outbox[int](send, limit=5, batch=2, clock=lambda: now[0])
    outbox.add(range(8))
    for second in range(200):
        now[0] = float(second)
        outbox.deliver()
    assert attempts == [0, 1, 3, 7, 15, 31, 63, 123, 183] and len(outbox) == 5 and outbox.dropped == 3
    away = False
    now[0] = 243.0
    assert outbox.deliver() is None and sent == [3, 4, 5, 6, 7] and outbox.dropped == 0


def test_a_process_that_dies_again_and_again_is_given_up_with_a_warning(rundir: RunDir) -> None:
    write(rundir, run_started())
    process = SinkProcess.of(loads(f"{RUN}[watch]\ntensorboard = true\n"), rundir)
    assert process is not None
    pids = set()
    for _ in range(10):
        if process.pid is not None:
            pids.add(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: process.pid is None, "its death")
        process.keep_running()
    process.close()
    assert len(pids) == 4
    (warned,) = (event.message for event in read_events(rundir.events_file) if isinstance(event, Warned))
    assert "has ended 4 times" in warned and "logs/sinks.log" in warned
    assert SinkProcess.of(loads(RUN), rundir) is None, "a run that asks for none has no such process"


# --- alerts ---------------------------------------------------------------------------------------------------------


def alert_sink(rundir: RunDir, url: str, warn: Callable[[str], None] = print) -> AlertSink:
    return AlertSink(settings_of(rundir, warn, loads(f"{RUN}[watch.alerts]\nurl = 'http://x/y'\ndisk_gib = 0.0\n"), url))


def test_alerts_reach_the_webhook_with_text_and_fields(rundir: RunDir) -> None:
    with receiving() as receiver:
        sink = alert_sink(rundir, f"{receiver.url}/hook/secret")
        sink.receive([run_started(), a_step(1), failed(1, 1002.0), recovered(1, 1004.0), finished(10)])
        sink.close()
        assert receiver.kinds == ["failure", "recovered", "finished"] and set(receiver.paths) == {"/hook/secret"}
        body = json.loads(receiver.bodies[0])
        assert body["text"].startswith(
            "Phalanx run tiny, step 3: failure. died: rank 1 was killed. The run recovers by itself."
        )
        assert body["phalanx"]["run"] == "tiny" and body["phalanx"]["step"] == 3 and body["phalanx"]["remedy"] in body["text"]


def test_a_webhook_that_is_down_gets_alerts_later_and_its_address_is_not_told(rundir: RunDir) -> None:
    warnings: list[str] = []
    with receiving() as receiver:
        receiver.answers = [500, 403]
        sink = alert_sink(rundir, f"{receiver.url}/hook/secret", warnings.append)
        sink.receive([run_started(), failed(1, 1002.0)])
        assert receiver.kinds == [] and "127.0.0.1 answers 500 Internal Server Error" in warnings[0]

        def taken() -> bool:
            sink.receive([])
            return bool(receiver.bodies)

        until(taken, "the alert")
        assert receiver.kinds == ["failure"] and not any("secret" in warning for warning in warnings)


@pytest.mark.parametrize("status", [301, 302, 307])
def test_an_alert_follows_no_redirect(rundir: RunDir, status: int) -> None:
    with receiving() as elsewhere, receiving() as receiver:
        receiver.answers, receiver.location = [status], f"{elsewhere.url}/stolen"
        with pytest.raises(OSError, match=f"127.0.0.1 answers {status}"):
            post(f"{receiver.url}/secret", message("a", Alert(kind="failed", sentence="s", remedy="r", time=0.0)))
        assert elsewhere.paths == []


def test_nobody_listening_is_an_error_without_the_address() -> None:
    with receiving() as receiver:
        url = f"{receiver.url}/secret"
    with pytest.raises(OSError, match=r"^127\.0\.0\.1: Connection refused$"):
        post(url, {})


# --- TensorBoard ----------------------------------------------------------------------------------------------------


def test_tensorboard_reads_the_curves_of_the_events(rundir: RunDir) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra watch")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = SINKS["tensorboard"].open(settings_of(rundir))
    events = [run_started(), *(a_step(number, loss=3.0 / number) for number in range(1, 6)), evaluated(5)]
    sink.receive(events[:4])
    sink.receive(events[4:])
    sink.close()
    (file,) = (rundir.path / "tensorboard").glob("events.out.tfevents.*")
    written = {
        (value.tag, event.step): (value.tensor.float_val[0], event.wall_time)
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    losses = {event.step: (event.loss, event.time) for event in events if isinstance(event, Step)}
    assert {step: value for (tag, step), value in written.items() if tag == "train/loss"} == {
        step: (pytest.approx(loss), time) for step, (loss, time) in losses.items()
    }
    assert written["eval/loss", 5][0] == 2.5 and written["speed/mfu", 1][0] == 0.5
