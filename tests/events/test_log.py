"""The event log: what is written is read, whole lines only, from however many processes; and who holds a directory."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phalanx.events import records as records_module
from phalanx.events.log import EventLog, EventReader, RecordWriter, read_events
from phalanx.events.records import KINDS, Event, Finished, Step, Warned, decode, encode
from phalanx.events.rundir import RunDir
from phalanx.spec.plan import Promise

VALUES: dict[str, Any] = {
    "list[int]": [3, 4],
    "list[str]": ["python", "a b.py"],
    "bool": True,
    "int": 7,
    "float": 0.1 + 0.2,  # needs all its digits
    "str": 'Ünïcode, "quotes", a\ttab\nand\u2028a line separator',
    "float | None": 0.25,
    "int | None": 3,
    "dict[str, dict[str, float]]": {"wiki": {"loss": 0.1 + 0.2, "perplexity": math.inf}},
    "SavedLayout": {"data": 4, "schedule": "1f1b", "sequence": False},
    "Promise | None": Promise(
        seconds=0.1 + 0.2, low=0.1, high=0.7, tokens_per_second=9.0, memory={"parameters": 7.0}, total_memory=8.0
    ),
    "dict[str, str]": {"tensor": "32 of 64 rows"},
    "dict[str, int]": {"parameters": 1 << 40},
    "dict[str, list[int]]": {"blocks.3": [0, 1 << 40]},
    "dict[str, list[Json]]": {
        "optimizer.learning_rate": [0.1 + 0.2, 1e-4],
        "train.clip": [1.0, "inf"],
        "data.paths": [["a"], None],
    },
    "dict[str, float]": {"compute": 0.1 + 0.2},
    "dict[str, dict[str, int]]": {"tensor": {"all-reduce": 7}},
}


def example(kind: type[Event]) -> Event:
    return kind(**{field.name: VALUES[str(field.type)] for field in fields(kind)})


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_record_survives_encoding(kind: type[Event], tmp_path: Path) -> None:
    event = example(kind)
    line = encode(event)
    assert "\n" not in line and line.isascii()
    assert decode(line) == event
    written = EventLog(tmp_path / "log").emit(event)
    assert time.time() - 60 < written.time <= time.time(), "the time of writing"
    assert read_events(tmp_path / "log") == [written] == [replace(event, time=written.time)]


def test_all_kinds_are_known() -> None:
    records = {item for item in vars(records_module).values() if isinstance(item, type) and issubclass(item, Event)}
    assert set(KINDS.values()) == records - {Event}
    assert all(name == kind.kind for name, kind in KINDS.items())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks(value: float) -> None:
    event = replace(example(Step), loss=value, grad_norm=value, mfu=value)
    read = decode(encode(event))
    assert isinstance(read, Step)
    assert str(read.loss) == str(read.grad_norm) == str(read.mfu) == str(value)
    assert "NaN" not in encode(event) and "Infinity" not in encode(event), "not JSON"


def test_optional_fields_may_be_none() -> None:
    event = replace(example(Step), mfu=None)
    assert decode(encode(event)) == event
    assert decode(encode(replace(example(KINDS["worker_failed"]), rank=None))).rank is None  # type: ignore[union-attr]


def test_words_that_look_like_numbers_stay_words() -> None:
    assert decode(encode(Warned(message="inf"))) == Warned(message="inf")


# --- lines ----------------------------------------------------------------------------------------------------------


def test_unknown_kinds_and_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"event": "from_the_future", "time": 1.0}\n{"event": "finished", "time": 1.0, "step": 3, "new": [1]}\n')
    assert read_events(path) == [Finished(step=3, time=1.0)]


def test_invalid_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    good = encode(Finished(step=1))
    rubbish = [b"", b"{", b"5", b"null", b"[]", b'"text"', b"\xff\xfe", b"\0\0\0", b'{"event": []}', b'{"event": "finished"}']
    path.write_bytes(b"\n".join([*rubbish, good.encode(), b'{"event": "step", "loss": "many"}', good.encode(), b""]))
    assert read_events(path) == [Finished(step=1)] * 2


def test_torn_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = (encode(Finished(step=step)).encode() + b"\n" for step in (1, 2))
    reader = EventReader(path)
    assert list(reader.new()) == [], "no file yet"
    path.write_bytes(first + second[:20])
    assert [event.step for event in reader.new()] == [1]  # type: ignore[attr-defined]
    assert list(reader.new()) == []
    with path.open("ab") as file:
        file.write(second[20:])
    assert [event.step for event in reader.new()] == [2]  # type: ignore[attr-defined]
    assert list(reader.new()) == []


def test_reader_can_begin_at_the_end(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    log.emit(Finished(step=1))
    reader = EventReader(tmp_path / "log", offset=(tmp_path / "log").stat().st_size)
    log.emit(Finished(step=2))
    assert [event.step for event in reader.new()] == [2]  # type: ignore[attr-defined]


def test_line_torn_by_a_crash_does_not_take_the_next_along(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = encode(Finished(step=1))
    path.write_text(f"{whole}\n{whole[:20]}")
    EventLog(path).emit(Finished(step=2))
    assert [event.step for event in read_events(path)] == [1, 2]  # type: ignore[attr-defined]


def test_existing_log_is_appended_to(tmp_path: Path) -> None:
    for step in (1, 2):
        log = EventLog(tmp_path / "log")
        log.emit(Finished(step=step))
        log.close()
    assert [event.step for event in read_events(tmp_path / "log")] == [1, 2]  # type: ignore[attr-defined]
    assert b"\n\n" not in (tmp_path / "log").read_bytes()


def test_records_wait_while_the_disk_is_full(tmp_path: Path, mount_disk: Any) -> None:
    disk = mount_disk(tmp_path / "disk", "64k")
    log, other = EventLog(disk / "log"), EventLog(disk / "log")
    log.emit(Warned(message="before"))
    with (disk / "filling").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(1000)):
            pass
    said = ["x" * 3000 + str(number) for number in range(5)]  # of the second, a part still finds room in the log's last page
    for message in said:
        log.emit(Warned(message=message))
    (disk / "filling").unlink()
    other.emit(Warned(message="other"))  # another process, which does not know of the part
    other.close()
    log.emit(Warned(message="after"))
    log.close()
    events = read_events(disk / "log")
    assert [event.message for event in events if isinstance(event, Warned)] == ["before", said[0], "other", *said[1:], "after"]


APPEND = """
import sys, time
from pathlib import Path
from phalanx.events.log import EventLog
from phalanx.events.records import Warned
writer, lines = int(sys.argv[2]), int(sys.argv[3])
log = EventLog(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
for number in range(lines):
    log.emit(Warned(message=f"{writer}:{number}:" + chr(97 + writer) * (writer * 977)))
"""


def test_appends_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path, lines = tmp_path / "log", 300
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, path, str(n), str(lines)], **pipes) for n in range(4)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.close()  # now
    reader, seen = EventReader(path), []
    while any(writer.poll() is None for writer in writers):
        seen += [event.message for event in reader.new() if isinstance(event, Warned)]
    assert [writer.returncode for writer in writers] == [0] * 4
    for writer in writers:
        writer.stdout.close()
    seen += [event.message for event in reader.new() if isinstance(event, Warned)]
    assert len(path.read_bytes().splitlines()) == len(seen) == 4 * lines
    for number in range(4):
        mine = [message for message in seen if message.startswith(f"{number}:")]
        assert mine == [f"{number}:{line}:" + chr(97 + number) * (number * 977) for line in range(lines)]
    order = [message[0] for message in seen]
    assert sum(a != b for a, b in pairwise(order)) > 3, "they wrote one after the other, so nothing was shown"


# --- who holds a directory ------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from phalanx.events.rundir import RunDir
from phalanx.spec.plan import Promise
rundir = RunDir(Path(sys.argv[1]))
print(rundir.acquire(), flush=True)
time.sleep(600)
"""


def test_run_directory_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(rundir.path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        answer = holder.stdout.readline()
        taken = [rundir.acquire(), rundir.acquire()]  # asking does not free it
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert (answer, taken) == ("True\n", [False, False])
    assert rundir.acquire(), "the dead hold it"


def test_released_run_directory_can_be_locked_again(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    first.create()
    assert first.acquire() and not second.acquire()
    first.release()
    first.release()
    assert second.acquire()
    second.release()


def test_child_processes_do_not_inherit_the_run_directory_lock(tmp_path: Path) -> None:
    """Workers are started while the launcher holds the directory: it must be free as soon as the launcher is gone."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    assert rundir.acquire()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False) as child:
        rundir.release()
        deadline = time.monotonic() + 60  # the kernel closes what a new program does not get a moment after it has begun
        while not (free := rundir.acquire()) and time.monotonic() < deadline:
            time.sleep(0.01)
        child.kill()
    assert free


def test_paths_of_the_run_directory(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "a" / "run")
    assert not rundir.exists
    rundir.create()
    rundir.create()
    assert {path.name for path in rundir.path.iterdir()} == {"checkpoints", "logs"}
    assert not rundir.exists, "a directory without a run file holds no run"
    rundir.run_file.touch()
    assert rundir.exists
    assert rundir.rank_log(3) == rundir.path / "logs" / "rank-3.log"
    assert rundir.rank_error_file(3) == rundir.path / "logs" / "rank-3.error.json"


def test_a_record_that_arrives_twice_is_written_once(tmp_path: Path) -> None:
    first, again = (encode(replace(example(Step), step=7, time=time)) for time in (1.0, 2.0))
    next_step, other = encode(replace(example(Step), step=8, time=3.0)), encode(replace(example(Warned), time=4.0))
    writer = RecordWriter(tmp_path / "log")
    for line in (first, first, other, other):
        writer.write(line)
    writer.write(again, if_new=True)
    writer.close()
    writer = RecordWriter(tmp_path / "log")  # the next controller
    writer.write(first)
    writer.write(again, if_new=True)
    writer.write(next_step, if_new=True)
    writer.write(other, if_new=True)
    assert (tmp_path / "log").read_text().splitlines() == [first, other, next_step]
    writer.write(again)
    writer.close()
    assert (tmp_path / "log").read_text().splitlines()[-1] == again, "after a rollback a step is taken again"
