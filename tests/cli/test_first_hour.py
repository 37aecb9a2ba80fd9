"""What a newcomer meets in the first minutes: verdicts, refusals, output for programs, interrupts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import typer.main
from commands import InProcess, Workshop

import phalanx as px
from phalanx.calibration.bench_process import plan_of, small_run
from phalanx.cli.main import app
from phalanx.dashboard.numbers import visible
from phalanx.dashboard.pictures import schedule_text
from phalanx.host.probe import lacks_instructions
from phalanx.launch.run_checks import format_notices
from phalanx.schedules.makers import make
from phalanx.schedules.timing import simulate

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


def test_control_characters_are_shown_not_obeyed() -> None:
    assert visible("a\x1b[2Jb\x07\n\tü\x00") == "a\\x1b[2Jb\\x07\n\tü\\x00"


def test_a_wide_schedule_continues_below() -> None:
    timeline = simulate(make("1f1b", 4, 8, None))
    whole, folded = schedule_text(timeline), schedule_text(timeline, width=60)
    assert len(whole) == 4 and max(map(len, whole)) > 60
    assert max(map(len, folded)) <= 60
    rows = [[line for line in folded if line.startswith(f"rank {rank}")] for rank in range(4)]
    joined = [" ".join(cell for line in lines for cell in line[8:].split()) for lines in rows]
    assert joined == [" ".join(line[8:].split()) for line in whole]


def test_a_format_that_the_processor_lacks_is_reported() -> None:
    plan = plan_of(small_run((64, 1, 16, 1), "cpu", "bf16"))
    (notice,) = format_notices(plan, lambda compute: True)
    assert 'precision.compute = "bf16": this CPU has no instructions for it' in notice
    assert format_notices(plan, lambda compute: False) == format_notices(replace(plan, compute="fp32")) == []
    cpus = {
        "old": "fma avx2 avx512f",
        "new": "avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16",
        "arm": "asimd asimdhp",
        "unknown": "",
    }
    lacking = {
        name: [form for form in ("bf16", "fp16", "fp8") if lacks_instructions(form, {"flags": flags})]
        for name, flags in cpus.items()
    }
    assert lacking == {"old": ["bf16", "fp16", "fp8"], "new": ["fp8"], "arm": ["bf16", "fp8"], "unknown": ["fp8"]}
    assert not lacks_instructions("fp32", {"flags": cpus["old"]})


def test_public_names_are_listed_and_found() -> None:
    assert {"load", "plan", "train", "trainer", "verify", "rehearse", "RunError"} <= set(dir(px)) == set(px.__all__)
    with pytest.raises(px.RunError):
        px.load("none.toml")
    assert issubclass(px.RunFailed, px.PhalanxError)
