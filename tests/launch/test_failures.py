"""Things that go wrong while a job runs: it ends soon, says why once, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import cmdline, has_mapped

from phalanx.control.watchdog import describe_exit
from phalanx.events.records import FailureNoticed, Saved, Step, StepSkipped, WorkerFailed, WorkerStarted
from phalanx.events.rundir import RunDir
from phalanx.recovery.state import is_secondary_error

LONG = ("tiny.toml", "train.steps=5000", "checkpoint.every=5000", "train.eval_every=5000", "watch.log_every=1000")
TRACEBACK = "Traceback (most recent call last)"


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def failed(workshop: Any, result: Any, rank: int | None, *parts: str) -> Any:
    """The one record of the failure; what holds for all of them is checked."""
    assert result.code == 1, result
    assert workshop.gone()
    (record,) = of(WorkerFailed, workshop.events())
    assert record.rank == rank
    for part in parts:
        assert part in record.reason and part in result.err, result
    assert result.err.count("error: ") == 1 and "runs/tiny/logs" in result.err
    assert "Connection" not in result.shown, "what the other ranks say about the lost one is shown"
    return record


PATIENT = ("resilience.timeout=36000", "resilience.hang=36000")
"""A command that waits for one of these does not end within the patience of a test."""

# --- a rank that raises ---------------------------------------------------------------------------------------------

IN_A_STEP = """
from phalanx.training import trainer
real = trainer.Trainer.step
def step(self):
    if self.mesh.rank == 1 and self.progress.step == 2:
        raise ValueError("sabotage")
    return real(self)
trainer.Trainer.step = step
"""
BEFORE_THEY_MEET = """
from phalanx.worker import rank
real = rank.connect
def connect(place, *rest):
    if place.rank == 1:
        raise ValueError("sabotage")
    return real(place, *rest)
rank.connect = connect
"""


@pytest.mark.parametrize(
    ("code", "restarts"), [(IN_A_STEP, 0), (BEFORE_THEY_MEET, 100)], ids=["in a step", "before the ranks have met"]
)
def test_rank_that_raises(workshop: Any, code: str, restarts: int) -> None:
    """Where nothing is to be tried again, or where that would only repeat it."""
    settings = (f"resilience.restarts={restarts}", "layout.data=4", *PATIENT)
    result = workshop.run("train", *LONG, *settings, "--json", env=workshop.sabotage(code))
    record = failed(workshop, result, 1, "ValueError: sabotage")
    assert result.shown.count(TRACEBACK) == 1, result
    assert TRACEBACK in record.traceback and "raise ValueError" in record.traceback
    assert (result.json["finished"], result.json["failure"], result.json["error"]) == (
        False,
        record.reason,
        [record.reason],
    )
    assert len(of(WorkerFailed, workshop.events())) == 1
    (noticed,) = of(FailureNoticed, workshop.events())
    assert (noticed.number, noticed.cause, noticed.rank) == (1, "failed", 1) and noticed.traceback == record.traceback


def test_rank_that_raises_in_the_same_step_again_and_again(workshop: Any) -> None:
    """It is tried twice more, by other processes; then the story is told."""
    result = workshop.run("train", *LONG, "layout.data=4", "--json", env=workshop.sabotage(IN_A_STEP))
    record = failed(workshop, result, None, "The same failure came 3 times after step 2", "rank 1 (node 0), failed: ")
    noticed = of(FailureNoticed, workshop.events())
    assert [(event.number, event.cause, event.rank, event.step) for event in noticed] == [
        (n, "failed", 1, 2) for n in (1, 2, 3)
    ]
    assert all("raise ValueError" in event.traceback for event in noticed)
    pids: dict[int, set[int]] = {}
    for worker in of(WorkerStarted, workshop.events()):
        pids.setdefault(worker.rank, set()).add(worker.pid)
    assert [len(pids[rank]) for rank in range(4)] == [1, 3, 1, 1], "the others stay in their processes"
    assert result.shown.count(TRACEBACK) == 1, "of the last"
    assert (result.json["finished"], result.json["failure"], result.json["recoveries"]) == (
        False,
        record.reason,
        0,
    )
    assert result.json["steps"] == 2


def test_text_that_shrinks(workshop: Any) -> None:
    """An error that a person can mend has no traceback; the run goes on when it is mended."""
    command = workshop.start("train", *LONG, "layout.data=2", "--json")
    command.until(workshop.reached("runs/tiny", 3), "step 3")
    text = workshop.path / "text" / "1.txt"
    os.truncate(text, 100)
    result = command.wait()
    (record,) = of(WorkerFailed, workshop.events())
    failed(workshop, result, record.rank, "text/1.txt", "has shrunk")
    assert TRACEBACK not in result.shown


# --- processes that are killed --------------------------------------------------------------------------------------


def test_killed_rank_ends_the_run_without_restarts_and_ports_are_private(workshop: Any) -> None:
    command = workshop.start("train", *LONG, "layout.data=2", "resilience.restarts=0", *PATIENT, "--json")
    command.until(workshop.reached("runs/tiny", 3), "step 3")
    processes = workshop.processes()
    assert len(processes) == 6, "the launcher, the supervisor, what keeps copies in memory, what forks ranks, two ranks"
    connections = [connection for process in processes for connection in process.net_connections(kind="inet")]
    assert any(connection.status == psutil.CONN_LISTEN for connection in connections)
    addresses = {connection.laddr.ip.removeprefix("::ffff:") for connection in connections}  # IPv4 on an IPv6 socket
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), f"open to other machines: {addresses}"
    with_torch = [process for process in processes if any("libtorch" in file.path for file in process.memory_maps())]
    assert len(with_torch) == 3 and all("phalanx.worker.fork_server" in process.cmdline() for process in with_torch)
    (victim,) = (event for event in of(WorkerStarted, workshop.events()) if event.rank == 1)
    os.kill(victim.pid, signal.SIGKILL)
    result = command.wait()
    failed(workshop, result, 1, "SIGKILL", "out of memory")
    assert "Rank 1" in result.err
    assert TRACEBACK not in result.shown


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["start-up", "training"])
def test_killed_supervisor(workshop: Any, moment: str) -> None:
    """Of the only node: nobody is left to decide, and nothing outlives it."""
    command = workshop.start("train", *LONG, "layout.data=2", "--json")
    command.until(lambda: MOMENTS[moment](workshop), moment)
    if moment == "start-up":  # it dies with a message that it has not read
        command.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    (supervisor,) = psutil.Process(command.pid).children()
    supervisor.kill()
    result = command.wait()
    failed(workshop, result, None, "supervisor of node 0", "-9")
    assert TRACEBACK not in result.shown


def nursery(workshop: Any) -> psutil.Process | None:
    """The process that forks ranks; they have its command line."""
    ranks = {event.pid for event in of(WorkerStarted, workshop.events())}
    found = [
        process
        for process in workshop.processes()
        if "phalanx.worker.fork_server" in cmdline(process) and process.pid not in ranks
    ]
    return found[0] if found else None


def test_killed_fork_server_is_restarted(workshop: Any) -> None:
    """While it loads torch and while they train: another takes its place, and the workers notice nothing."""
    command = workshop.start("train", *LONG, "layout.data=2", "--json")
    lost: list[psutil.Process | None] = [None]
    for moment in ("start-up", "training"):
        command.until(partial(MOMENTS[moment], workshop), moment)
        lost.append(nursery(workshop))
        lost[-1].kill()
        command.until(lambda: nursery(workshop) not in lost, "another one")
    reached = of(Step, workshop.events())[-1].step
    command.until(workshop.reached("runs/tiny", reached + 5), "more steps")
    command.process.terminate()
    result = command.wait()
    assert result.code == 75, result
    assert of(FailureNoticed, workshop.events()) == [] and len(of(WorkerStarted, workshop.events())) == 2
    assert [(workshop.path / "runs/tiny/logs" / name).read_text() for name in ("launch.log", "node-0.log")] == ["", ""]


SLOW_SAVING = """
import pathlib, time
from phalanx.checkpointing import directory
def commit(*_):
    pathlib.Path("saving").touch()
    time.sleep(600)
directory.commit = commit
"""


def loading(workshop: Any) -> bool:
    return any(
        "phalanx.worker.fork_server" in cmdline(process) and has_mapped(process, "libtorch") for process in workshop.processes()
    )


MOMENTS: dict[str, Callable[[Any], bool]] = {
    "start-up": loading,
    "training": lambda workshop: workshop.reached("runs/tiny", 5)(),
    "saving": lambda workshop: (workshop.path / "saving").exists(),
}


def nothing_left(workshop: Any) -> None:
    """No process of the job stays alive: by the pids it wrote down, by command line, by environment."""
    assert workshop.gone()
    for worker in of(WorkerStarted, workshop.events()):
        with contextlib.suppress(psutil.NoSuchProcess):  # the pid may be another's by now
            assert "phalanx.worker.fork_server" not in psutil.Process(worker.pid).cmdline()
    for process in psutil.process_iter(["cmdline", "cwd"]):
        mine = process.info["cwd"] == str(workshop.path)
        assert not (mine and any("phalanx" in word for word in process.info["cmdline"] or [])), process


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_launcher(workshop: Any, moment: str) -> None:
    env = workshop.sabotage(SLOW_SAVING) if moment == "saving" else None
    command = workshop.start("train", *LONG, "layout.data=2", *(["checkpoint.every=5"] if env else []), env=env)
    command.until(lambda: MOMENTS[moment](workshop), moment)
    assert len(workshop.processes()) > 1, "there is nothing to leave behind"
    command.process.kill()
    command.wait()
    nothing_left(workshop)


@pytest.mark.slow
def test_killed_launcher_at_any_moment(workshop: Any) -> None:
    """Ten random moments from the first instant to well into training and saving; each launch goes on from the last."""
    dice = random.Random(time.time_ns())
    for _ in range(10):
        command = workshop.start("train", *LONG, "layout.data=2", "checkpoint.every=2")
        time.sleep(dice.uniform(0, 8))
        command.process.kill()
        assert command.wait().code == -signal.SIGKILL
        nothing_left(workshop)
    command = workshop.start("train", *LONG, "layout.data=2", "checkpoint.every=2")
    saved = len(of(Saved, workshop.events())) if (workshop.path / "runs/tiny/events.jsonl").exists() else 0
    command.until(lambda: len(of(Saved, workshop.events())) > saved, "a checkpoint")
    command.process.terminate()
    assert command.wait().code == 75


# --- runs that cannot go on -----------------------------------------------------------------------------------------


def test_too_many_skipped_steps(workshop: Any) -> None:
    overrides = ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "resilience.max_skipped=3", "layout.data=2")
    result = workshop.run("train", *LONG, *overrides, "--json")
    (record,) = of(WorkerFailed, workshop.events())  # all ranks find the same at the same time; any may be the first
    failed(workshop, result, record.rank, "resilience.max_skipped = 3", "optimizer.learning_rate", "step_skipped")
    assert TRACEBACK not in result.shown
    skipped = of(StepSkipped, workshop.events())
    assert [event.in_a_row for event in skipped[-4:]] == [1, 2, 3, 4]
    assert result.json["steps_skipped"] == len(skipped) >= 4
    assert result.json["error"] == [record.reason]
    assert len(re.findall(r"^step \d+ skipped: ", result.shown, re.MULTILINE)) == len(skipped)


@pytest.fixture
def small_disk(workshop: Any, mount_disk: Callable[[Path, str], Path]) -> Iterator[Path]:
    yield mount_disk(workshop.path / "disk", "24m")
    assert workshop.gone()


def test_disk_that_fills_up(workshop: Any, small_disk: Path) -> None:
    command = workshop.start("train", *LONG, "layout.data=2", "--run-dir", small_disk / "run", "--json")
    command.until(workshop.reached(small_disk / "run", 3), "step 3")
    with (small_disk / "filling").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(1 << 16)):
            pass
    seen = len(of(Step, workshop.events(small_disk / "run")))
    time.sleep(2.5)
    assert command.process.poll() is None, "training goes on"
    (small_disk / "filling").unlink()
    command.until(workshop.reached(small_disk / "run", seen + 20), "steps after there is room again")
    command.process.terminate()
    result = command.wait()
    assert result.code == 75, result
    assert f"The disk of {small_disk / 'run'} is full" in result.shown.replace("\n", " ")
    steps = [event.step for event in of(Step, workshop.events(small_disk / "run"))]
    assert steps == [*range(1, result.json["steps"] + 1)], "what was said while it was full is written later"


@pytest.mark.slow
def test_disk_that_is_full_at_the_end(workshop: Any, small_disk: Path) -> None:
    command = workshop.start("train", *LONG, "layout.data=2", "--run-dir", small_disk / "run", "--json")
    command.until(workshop.reached(small_disk / "run", 3), "step 3")
    with (small_disk / "filling").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(1 << 16)):
            pass
    command.process.terminate()
    result = command.wait()
    assert result.code == 1, result
    assert "Traceback" not in result.shown
    assert re.search("No space left|disk of .* is full", result.err), result
    assert result.json["finished"] is False and result.json["error"]
    (small_disk / "filling").unlink()
    again = workshop.start("train", *LONG, "layout.data=2", "--run-dir", small_disk / "run")
    again.until(lambda: len(of(WorkerStarted, workshop.events(small_disk / "run"))) == 4, "the next launch")
    again.process.terminate()
    assert again.wait().code == 75, "a log with a torn line could not be gone on with"


# --- the launcher itself --------------------------------------------------------------------------------------------


def test_launcher_does_not_import_torch() -> None:
    names = "phalanx.cli.main, phalanx.cli.train_cmd, phalanx.launch.job, phalanx.launch.prepare, phalanx.api"
    code = f"import json, sys, {names}; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(json.loads(done.stdout))
    assert "phalanx" in imported
    assert not imported & {"torch", "matplotlib", "transformers", "tensorboard"}


# --- how a rank ended -------------------------------------------------------------------------------------------------


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_secondary_errors_are_recognized() -> None:
    assert is_secondary_error("RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer")
    assert is_secondary_error("ConnectionError: generation 4 is over") and is_secondary_error(
        "ConnectionError: generation 3 is not, or no longer, met here"
    )
    assert not is_secondary_error("ValueError: the generation config has no such key"), "a program's own error is its own"


def test_exit_of_a_rank_without_a_report_is_described(rundir: RunDir) -> None:
    rundir.rank_log(0).write_text("last words\n")
    reason, words = describe_exit(rundir, 0, 3)
    assert "exit code 3" in reason and "last words" in words
    assert "SIGSEGV" in describe_exit(rundir, 3, -signal.SIGSEGV)[0]
