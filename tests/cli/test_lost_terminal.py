"""Terminals and pipes that go away while a command runs: a run saves or goes on, and no work is lost."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from typing import Any

import pytest
from commands import Workshop

from phalanx.events.records import Finished, Saved, Stopped

STEPS = 120
LONG = ("tiny.toml", f"train.steps={STEPS}", "train.eval_every=40", "checkpoint.every=60", "watch.log_every=1")


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def stopped_and_saved(workshop: Workshop, reason: str) -> None:
    events = workshop.events()
    (stop,) = of(Stopped, events)
    assert stop.reason == reason and 5 <= stop.step < STEPS
    assert of(Saved, events)[-1].step == stop.step


def finished_and_saved(workshop: Workshop, steps: int) -> None:
    events = workshop.events()
    assert of(Finished, events) and not of(Stopped, events)
    assert of(Saved, events)[-1].step == steps


# --- readers that go away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["", "--json 2>&1"])
def test_a_run_goes_on_when_the_reader_of_its_output_has_gone(workshop: Workshop, read: str) -> None:
    """Of standard output, where a run shows its steps, and with --json of standard error."""
    train = " ".join(workshop.command("train", "tiny.toml", "watch.log_every=1"))
    pipeline = f"{train} {read} | head -3; echo exit codes ${{PIPESTATUS[@]}}"
    done = subprocess.run(
        ["bash", "-c", pipeline], cwd=workshop.path, env=workshop.env(), capture_output=True, text=True, timeout=240
    )
    *shown, codes = done.stdout.splitlines()
    assert len(shown) == 3 and codes == "exit codes 0 0", done
    assert done.stderr == ""
    finished_and_saved(workshop, 8)


def test_a_run_whose_output_is_closed_from_the_start_goes_on(workshop: Workshop) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        process = subprocess.Popen(
            workshop.command("train", "tiny.toml"), cwd=workshop.path, env=workshop.env(), stdout=closed, stderr=closed
        )
    assert process.wait(timeout=240) == 0
    finished_and_saved(workshop, 8)


@pytest.mark.parametrize("arguments", [("schema",), ("models",), ("train", "--help"), ("plan", "no such file.toml")])
def test_other_commands_end_quietly_when_their_reader_has_gone(workshop: Workshop, arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            workshop.command(*arguments),
            cwd=workshop.path, env=workshop.env(), stdout=closed, stderr=subprocess.PIPE, text=True, timeout=240,
        )  # fmt: skip
    expected = {"train": (0, ""), "plan": (2, "error: ")}.get(arguments[0], (141, ""))
    assert done.returncode == expected[0], done
    assert "Traceback" not in done.stderr and done.stderr.startswith(expected[1])
    assert bool(done.stderr) == bool(expected[1])


# --- hang-ups -------------------------------------------------------------------------------------------------------


def test_a_hang_up_of_the_command_saves(workshop: Workshop) -> None:
    command = workshop.start("train", *LONG)
    command.until(workshop.reached("runs/tiny", 5), "step 5")
    command.process.send_signal(signal.SIGHUP)
    time.sleep(0.05)
    command.process.send_signal(signal.SIGHUP)  # as a shell does that has got one itself
    command.process.send_signal(signal.SIGTERM)  # as a service manager does with what is left of a session
    ended = command.wait()
    assert ended.code == 75, ended
    assert ended.err == "" and "Stopped and saved" in ended.out
    stopped_and_saved(workshop, "SIGHUP")


def test_a_hang_up_of_every_process_saves(workshop: Workshop) -> None:
    command = workshop.start("train", *LONG, "layout.data=2")
    command.until(workshop.reached("runs/tiny", 5), "step 5")
    for process in workshop.processes():
        process.send_signal(signal.SIGHUP)
    assert command.wait().code == 75
    (stop,) = of(Stopped, workshop.events())
    assert of(Saved, workshop.events())[-1].step == stop.step


def on_terminal(workshop: Workshop, command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A command in the foreground of a terminal of its own, and the terminal."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, cwd=workshop.path, env=workshop.env({"TERM": "xterm"}), stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(slave)
    os.set_blocking(master, False)
    return process, master


def read_until_step(workshop: Workshop, process: subprocess.Popen[bytes], master: int, step: int) -> None:
    reached, deadline = workshop.reached("runs/tiny", step), time.monotonic() + 240
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline
        try:
            os.read(master, 65536)
        except BlockingIOError:
            time.sleep(0.01)


def test_a_terminal_that_is_closed_saves(workshop: Workshop) -> None:
    """The kernel sends SIGHUP to the foreground processes, and every later write to the terminal fails."""
    process, master = on_terminal(workshop, workshop.command("train", *LONG))
    read_until_step(workshop, process, master, 5)
    os.close(master)
    assert process.wait(timeout=240) == 75
    stopped_and_saved(workshop, "SIGHUP")


def test_a_run_that_ignores_hang_ups_outlives_its_terminal(workshop: Workshop) -> None:
    """As under nohup, whose output may still go to the terminal if it is told so."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", ignoring, *workshop.command("train", *LONG)]
    process, master = on_terminal(workshop, command)
    read_until_step(workshop, process, master, 5)
    os.close(master)
    for one in workshop.processes():
        one.send_signal(signal.SIGHUP)
    assert process.wait(timeout=240) == 0
    finished_and_saved(workshop, STEPS)


def test_a_program_is_asked_to_end_on_a_hang_up(workshop: Workshop) -> None:
    (workshop.path / "wait.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    command = workshop.start("launch", "--", sys.executable, "wait.py")
    command.until(lambda: "begun" in command.output().out, "the program to begin")
    command.process.send_signal(signal.SIGHUP)
    ended = command.wait()
    assert ended.code == 75, ended
    assert "Traceback" not in ended.err
