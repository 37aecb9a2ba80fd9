"""Runs that are stopped, killed or damaged, and go on: no step is lost, repeated differently, or taken on other text."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from commands import Ended, FinishedRuns, StepLosses, Workshop, cmdline, has_mapped, signal_to

from phalanx.events.records import CheckpointDamaged, Restored, RunStarted, Saved, Stopped, WorkerStarted

STEPS, EVERY = 120, 15
LONG = ("tiny.toml", f"train.steps={STEPS}", "train.eval_every=40", f"checkpoint.every={EVERY}", "watch.log_every=40")


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def straight(finished: FinishedRuns, losses: StepLosses) -> dict[int, tuple[int, float, str]]:
    """Every step of a run that nothing ever stopped."""
    workshop = finished(2).workshop
    workshop.train(*LONG[1:], "layout.data=2", "--run-dir", "straight")
    records = losses(workshop.events("straight"))
    assert [step for step, _, _ in records] == list(range(1, STEPS + 1))
    return {record[0]: record for record in records}


@pytest.fixture(scope="module")
def stopped(finished: FinishedRuns) -> tuple[Workshop, Ended]:
    """The same run on two ranks, told to stop after its second checkpoint; and what the command said."""
    workshop = finished(2).workshop
    command = workshop.start("train", *LONG, "layout.data=2", "--run-dir", "stopped", "--json")
    command.until(workshop.reached("stopped", 2 * EVERY + 5), "the second checkpoint")
    command.process.send_signal(signal.SIGTERM)
    return workshop, command.wait()


def agrees(straight: dict[int, Any], records: list[tuple[int, float, str]]) -> None:
    """Every record, also of steps taken twice, is the one of the run that was never stopped; and all steps are there."""
    assert {step for step, _, _ in records} == set(straight)
    for step, loss, digest in records:
        assert digest == straight[step][2], f"step {step} saw other tokens"
        assert loss == pytest.approx(straight[step][1], rel=1e-5, abs=0), f"the loss of step {step} is not within 1e-5"
    assert [straight[step] for step, _, _ in records] == records, "within 1e-5, but not the same bits"


def test_sigterm_saves_and_prints_how_to_resume(stopped: tuple[Workshop, Ended]) -> None:
    workshop, ended = stopped
    assert ended.code == 75, ended
    assert not ended.complaints
    assert "run the same command again" in ended.err
    events = workshop.events("stopped")
    (stop,) = of(Stopped, events)
    assert 2 * EVERY < stop.step < STEPS and "SIGTERM" in stop.reason
    assert events[-1] == stop
    assert of(Saved, events)[-1].step == stop.step
    assert (workshop.path / "stopped" / "checkpoints" / f"step-{stop.step:08d}" / "commit.json").is_file()
    assert (ended.json["steps"], ended.json["finished"], ended.json["failure"]) == (stop.step, False, None)


@pytest.mark.parametrize("ranks", [4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2))])
def test_resumed_run_equals_one_that_never_stopped(
    stopped: tuple[Workshop, Ended], straight: dict[int, tuple[int, float, str]], losses: StepLosses, ranks: int
) -> None:
    workshop, _ = stopped
    run_dir = workshop.copy("stopped", f"resumed-on-{ranks}")
    ended = workshop.train(*LONG[1:], f"layout.data={ranks}", "--run-dir", run_dir)
    assert "(resumed)" in ended.shown
    events = workshop.events(run_dir)
    assert [event.ranks for event in of(RunStarted, events)] == [2, ranks]
    (restored,) = of(Restored, events)
    assert restored.step == of(Stopped, events)[0].step
    records = losses(events)
    assert [step for step, _, _ in records] == list(range(1, STEPS + 1)), "a step was lost or taken twice"
    agrees(straight, records)
    assert ended.json["steps"] == STEPS and ended.json["loss"] == straight[STEPS][1]


def test_resume_skips_a_damaged_checkpoint(
    stopped: tuple[Workshop, Ended], straight: dict[int, tuple[int, float, str]], losses: StepLosses
) -> None:
    workshop, _ = stopped
    run_dir = workshop.copy("stopped", "damaged")
    newest = max((workshop.path / run_dir / "checkpoints").iterdir())
    data = max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    ended = workshop.train(*LONG[1:], "layout.data=2", "--run-dir", run_dir)
    events = workshop.events(run_dir)
    (damaged,) = of(CheckpointDamaged, events)
    assert damaged.path.endswith(newest.name) and data.name in damaged.reason
    older = (of(Stopped, events)[0].step - 1) // EVERY * EVERY
    assert [event.step for event in of(Restored, events)] == [older]
    assert re.search(rf"{newest.name} is damaged", ended.shown)
    agrees(straight, losses(events))


# --- other ways to stop ---------------------------------------------------------------------------------------------


def test_control_c_on_a_terminal_saves(workshop: Workshop) -> None:
    """The terminal sends SIGINT to all its foreground processes; the run stops as on SIGTERM and the cursor comes back."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        workshop.command("train", *LONG, "layout.data=2"),
        cwd=workshop.path, env=workshop.env({"TERM": "xterm"}), stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)
    text, typed, deadline = b"", False, time.monotonic() + 240
    training = workshop.reached("runs/tiny", 10)
    while process.poll() is None and time.monotonic() < deadline:
        try:
            text += os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            break  # the other end has been closed
        if not typed and training():
            os.write(master, b"\x03")
            typed = True
    assert process.wait(timeout=60) == 75, text.decode()
    try:
        while block := os.read(master, 65536):
            text += block
    except OSError:
        pass  # all has been read
    os.close(master)
    events = workshop.events()
    (stop,) = of(Stopped, events)
    assert 10 <= stop.step < STEPS and of(Saved, events)[-1].step == stop.step
    shown = text.decode()
    assert "Traceback" not in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0
    assert "run the same command again" in shown


def test_signal_to_one_rank_stops_all(workshop: Workshop) -> None:
    command = workshop.start("train", *LONG, "layout.data=2")
    command.until(workshop.reached("runs/tiny", 5), "step 5")
    (worker,) = (event for event in of(WorkerStarted, workshop.events()) if event.rank == 1)
    os.kill(worker.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 75, ended
    events = workshop.events()
    (stop,) = of(Stopped, events)
    assert "another rank" in stop.reason and of(Saved, events)[-1].step == stop.step
    assert not list((workshop.path / "runs/tiny/logs").glob("*.error.json"))


@pytest.mark.parametrize("moment", ["while torch is loaded", "while it trains"])
def test_signal_to_every_process_saves_once(workshop: Workshop, moment: str) -> None:
    """As service managers and batch systems do: SIGTERM to all, also to those that only look after others."""
    command = workshop.start("train", *LONG, "layout.data=2")
    if moment == "while it trains":
        command.until(workshop.reached("runs/tiny", 5), "step 5")
    else:
        command.until(lambda: seen(workshop) >= LOADING, "the workers' parent to load torch")
    for process in workshop.processes():
        signal_to(process, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 75, ended
    assert "Traceback" not in ended.shown + ended.err
    (stop,) = of(Stopped, workshop.events())
    assert (stop.step == 0) == (moment == "while torch is loaded")
    assert (workshop.path / "runs/tiny/logs/launch.log").read_text() == ""


LOADING = {"phalanx.worker.fork_server", "MAPPED torch"}


def seen(workshop: Workshop) -> set[str]:
    """What the processes of a job are at, read off from outside."""
    found = set()
    for process in workshop.processes():
        words = cmdline(process)
        found |= set(words)
        if "phalanx.worker.fork_server" in words and has_mapped(process, "libtorch"):
            found.add("MAPPED torch")
    return found


# Python forgets a signal that arrives while it forks, so it has to be kept from arriving. Whether it would be lost is a
# matter of microseconds; whether it is kept is not.
WATCH_FORKS = """
import os, signal
real = os.fork
def fork():
    with open("forks", "a") as file:
        print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), file=file)
    return real()
os.fork = fork
"""


def test_stop_before_the_first_step(workshop: Workshop, finished: FinishedRuns, losses: StepLosses) -> None:
    command = workshop.start("train", "tiny.toml", "--run-dir", "run", env=workshop.sabotage(WATCH_FORKS))
    command.until(lambda: seen(workshop) >= LOADING, "the workers' parent to load torch")
    command.process.send_signal(signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 75, ended
    assert ended.err == ""
    assert [event.step for event in of(Stopped, workshop.events("run"))] == [0]
    assert (workshop.path / "forks").read_text() == "True\n" * 2  # a rank is no child of what forks it
    workshop.train("--run-dir", "run")
    assert losses(workshop.events("run")) == losses(finished(1).workshop.events(finished(1).path))


@pytest.mark.parametrize("delay", [0.3, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.05, 0.6))])
def test_stop_right_after_the_start(workshop: Workshop, delay: float) -> None:
    """Before there is anything to save, the command just ends; a directory it has made can be used by the next."""
    command = workshop.start("train", "tiny.toml", "--run-dir", "run")
    time.sleep(delay)
    command.process.send_signal(signal.SIGTERM)
    ended = command.wait()
    assert ended.code in (75, -signal.SIGTERM), ended
    assert "Traceback" not in ended.shown + ended.err
    assert workshop.gone()


def test_second_signal_kills_the_run(workshop: Workshop) -> None:
    slow = workshop.sabotage("import time, phalanx.checkpointing.directory as d\nd.commit = lambda *a: time.sleep(600)")
    command = workshop.start("train", "tiny.toml", "train.steps=5000", "checkpoint.every=5000", "layout.data=2", env=slow)
    command.until(workshop.reached("runs/tiny", 5), "step 5")
    command.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert command.process.poll() is None, "it did not wait for the checkpoint"
    command.process.send_signal(signal.SIGTERM)
    ended = command.wait()  # long before the 600 s of the save
    assert ended.code == 130, ended
    assert "Traceback" not in ended.shown + ended.err
    assert "Stopped and saved" not in ended.shown
    assert workshop.gone()


@pytest.mark.slow
def test_resume_after_a_killed_launcher(
    workshop: Workshop, straight: dict[int, tuple[int, float, str]], losses: StepLosses
) -> None:
    command = workshop.start("train", *LONG, "layout.data=2")
    command.until(workshop.reached("runs/tiny", 2 * EVERY), "the second checkpoint")
    command.process.kill()
    command.wait()
    assert workshop.gone(), "workers outlived the launcher"
    reached = max(step for step, _, _ in losses(workshop.events()))
    ended = workshop.train(*LONG[1:], "layout.data=2")
    assert ended.json["run_dir"] == "runs/tiny"
    events = workshop.events()
    (restored,) = of(Restored, events)
    assert restored.step in (reached // EVERY * EVERY, (reached // EVERY - 1) * EVERY), "not the last checkpoint"
    assert len(of(RunStarted, events)) == 2
    agrees(straight, losses(events))
    assert ended.json["tokens"] == sum(event["tokens"] for event in last_of_each_step(workshop.path / "runs/tiny"))


def last_of_each_step(run_dir: Path) -> Iterator[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    yield from {line["step"]: line for line in lines if line["event"] == "step"}.values()


@pytest.mark.slow
def test_resume_after_repeated_stops(
    workshop: Workshop, straight: dict[int, tuple[int, float, str]], losses: StepLosses
) -> None:
    """A run that never gets far: stopped or killed after every few steps, on another number of ranks each time."""
    launch = 0
    while not (workshop.path / "runs/tiny").exists() or max([0, *(s for s, _, _ in losses(workshop.events()))]) < STEPS - 40:
        before = max([0, *(step for step, _, _ in losses(workshop.events()))])
        command = workshop.start("train", *LONG, "checkpoint.every=3", f"layout.data={(1, 2, 4)[launch % 3]}")
        command.until(workshop.reached("runs/tiny", before + 10), f"step {before + 10}")
        command.process.send_signal((signal.SIGTERM, signal.SIGKILL, signal.SIGINT)[launch % 3])
        assert command.wait().code in (75, -signal.SIGKILL)
        assert workshop.gone()
        launch += 1
    workshop.train(*LONG[1:], "checkpoint.every=3")
    agrees(straight, losses(workshop.events()))
    assert launch >= 5
    shutil.rmtree(workshop.path / "runs")
