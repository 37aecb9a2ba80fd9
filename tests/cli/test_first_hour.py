"""What a newcomer meets in the first minutes: verdicts, refusals, output for programs, interrupts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from commands import PATIENCE, InProcess, Workshop

import phalanx as px
from phalanx.cli.main import app

PHALANX = [sys.executable, "-m", "phalanx"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("first") / "workshop")


def test_a_rehearsal_begins_with_its_verdict_in_units_that_suit_it(folder: Workshop) -> None:
    fits = folder.run("rehearse", folder.run_file.name, program=PHALANX)
    assert fits.code == 0 and fits.out.splitlines()[0].startswith("fits: rank 0 of "), fits
    assert re.search(r"memory at the peak +[KM]iB", fits.out), fits
    small = folder.run("rehearse", folder.run_file.name, "--memory", "200KiB", program=PHALANX)
    assert small.code == 1 and small.out.startswith("does not fit in 200.0 KiB: rank 0 of "), small


def test_with_json_standard_output_holds_json_alone(folder: Workshop) -> None:
    for words in (["plan", folder.run_file.name], ["models"], ["schedule", "gpipe"], ["rehearse", folder.run_file.name]):
        ended = folder.run(*words, "--json", program=PHALANX)
        assert ended.code == 0 and len(ended.out.splitlines()) == 1 and ended.err, ended
        json.loads(ended.out)
    wrong = folder.run("plan", "--bogus", "--json", program=PHALANX)
    assert wrong.code == 2 and json.loads(wrong.out) == {"error": ["No such option: --bogus"]}, wrong


def test_a_setting_with_dashes_is_told_how_to_write_it(folder: Workshop) -> None:
    for words in (["--train.steps", "5"], ["--train.steps=5"]):
        ended = folder.run("train", folder.run_file.name, *words, program=PHALANX)
        assert ended.code == 2 and "settings have no dashes; write train.steps=5" in ended.err, ended
    assert not (folder.path / "runs").exists()


def _commands(command: Any, *words: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The command and all below it, each with the words that call it."""
    yield command, words
    for name, verb in getattr(command, "commands", {}).items():
        yield from _commands(verb, *words, name)


def test_help_of_every_command_shows_flags_by_their_names(here: InProcess) -> None:
    commands = list(_commands(typer.main.get_command(app)))
    assert len(commands) > 30
    for command, words in commands:
        ended = here(*words, "--help")
        assert ended.code == 0 and "--help" in ended.out, ended
        assert not re.search(r"<bool>|\bBOOLEAN\b", ended.out, re.IGNORECASE), ended
        for flag in [option for option in command.params if getattr(option, "is_flag", False)]:
            (line,) = [line for line in ended.out.splitlines() if re.search(rf"^│[ *]+{flag.opts[0]}\b", line)]
            assert not re.search(r"<|BOOL", line), line


INTERRUPTED = """
import os, signal, sys

wanted, run_file = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from phalanx.__main__ import main
sys.argv = ["phalanx", "rehearse", run_file]
main()
"""


@pytest.mark.parametrize("module", ["typer", "phalanx.cli.verify_cmd", "phalanx.spec.layout", "phalanx.rehearsal.rehearse"])
def test_an_interrupt_while_the_command_loads_has_no_traceback(folder: Workshop, module: str) -> None:
    ended = folder.run("-c", INTERRUPTED, module, folder.run_file.name, program=[sys.executable])
    assert ended.code == 130 and "Traceback" not in ended.err, ended


def on_a_terminal(folder: Workshop, columns: int, *words: str) -> str:
    """What a command shows on a terminal of this width."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = folder.env({"TERM": "xterm", "NO_COLOR": "1"})
    process = subprocess.Popen(
        [*PHALANX, *words], cwd=folder.path, env=env, stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while piece := os.read(screen, 65536):
            shown += piece
    os.close(screen)
    assert process.wait(PATIENCE) == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [60, 100])
def test_a_schedule_fits_in_its_terminal(folder: Workshop, columns: int) -> None:
    shown = on_a_terminal(folder, columns, "schedule", "1f1b", "--ranks", "4", "--microbatches", "16")
    rows = [line for line in shown.splitlines() if line.startswith("rank ")]
    assert len(rows) > 4 and max(map(len, rows)) <= columns, shown
    for rank in range(4):
        cells = " ".join(row for row in rows if row.startswith(f"rank {rank}")).split()
        assert [cell for cell in cells if cell.startswith("F")] == [f"F{number}" for number in range(16)]


def test_a_slow_format_is_reported_before_it_trains(folder: Workshop) -> None:
    """No CPU multiplies fp8."""
    ended = folder.run("train", "tiny.toml", "train.steps=1", "precision.compute=fp8", "--run-dir", "slow", program=PHALANX)
    assert ended.code == 0, ended
    (warning,) = [line for line in ended.shown.splitlines() if "fp8" in line and line.startswith("warning: ")]
    assert 'precision.compute = "fp8": this CPU has no instructions for it' in warning
    assert ended.shown.index(warning) < ended.shown.index("step 1/1"), ended


def test_public_names_are_listed_and_found() -> None:
    assert {"load", "plan", "train", "trainer", "verify", "rehearse", "RunError"} <= set(dir(px)) == set(px.__all__)
    with pytest.raises(px.RunError):
        px.load("none.toml")
    assert issubclass(px.RunFailed, px.PhalanxError)
