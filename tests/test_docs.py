"""The documents are true: what they quote is what the code says, and their commands and programs run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import app
from phalanx.dashboard.summary import Summary
from phalanx.events.records import KINDS
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import parse
from phalanx.spec.errors import RunError
from phalanx.spec.load import load, loads

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRACT = (ROOT / "docs" / "run-directory.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMAND = re.compile(r"^(?:    )?(?:\$ )?phalanx (?:train|verify|plan|rehearse|simulate) (examples/\S+\.toml)(.*)$", re.M)


def module(script: str) -> Any:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "docs" / f"{script}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("script", "page"), [("make_run_file", "run-file"), ("make_protocol", "protocol"), ("make_cli", "cli")]
)
def test_references_are_up_to_date(script: str, page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == module(script).text(), "run `make docs`"


def test_the_run_files_in_the_readme_and_the_examples_are_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        loads(block, name="README.md")
    for example in (ROOT / "examples").glob("*.toml"):
        load(example)


def test_every_command_of_the_readme_exists() -> None:
    verbs = {command.name for command in app.registered_commands}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        verbs |= {f"{group.name} {command.name}" for command in group.typer_instance.registered_commands}
        if group.typer_instance.info.invoke_without_command is True:
            verbs.add(group.name)
    groups = {group.name for group in app.registered_groups}
    rows = re.findall(r"^\| `phalanx ([\w-]+)(?: ([a-z]+))?", README, re.M)
    assert {f"{verb} {inner}".strip() if verb in groups else verb for verb, inner in rows} == verbs
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README + (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_contract_names_every_record_and_key(tmp_path: Path) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|$", CONTRACT, re.M))
    rows.pop("event")  # the table's head
    assert set(rows) == set(KINDS)
    for kind, record in KINDS.items():
        for name in (field.name for field in fields(record)):
            assert name == "time" or f"`{name}`" in rows[kind], f"{kind}.{name}"
    rundir = RunDir(tmp_path)
    for path in (rundir.run_file, rundir.plan_file, rundir.events_file, rundir.curve):
        assert f"`{path.name}`" in CONTRACT


def test_the_contract_names_every_key_of_the_summary(tmp_path: Path) -> None:
    section = CONTRACT.partition("## What `phalanx train --json` prints")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|([^|]*)\|", section, re.M))))
    assert named == Summary([]).to_json(tmp_path).keys() | {"error"}


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert link.startswith("https://") or (ROOT / link).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_the_settings_of_every_command_are_legal_unless_the_page_says_otherwise(page: Path) -> None:
    text = page.read_text()
    for found in COMMAND.finditer(text):
        words = found[2].partition("#")[0]
        for planted in re.findall(r'--chaos "([^"]+)"', words):
            assert parse(planted), planted
        settings = re.findall(r"(?<=\s)[a-z][a-z_.]*=\S+", re.sub(r'"[^"]*"', "", words))
        settings = [setting for setting in settings if "schedule_file" not in setting]  # the reader has written that file
        if text[found.end() :].lstrip().startswith("error: "):
            with pytest.raises(RunError):
                load(ROOT / found[1], settings)
        else:
            load(ROOT / found[1], settings)


def test_the_example_program_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), "train.steps=4", "train.batch=4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step 4: loss" in done.stdout and "held-out loss" in done.stdout and "saved" in done.stdout


OUTPUTS = module("make_readme")
BLOCKS = OUTPUTS.blocks()


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=[pytest.mark.slow] * OUTPUTS.is_measured(command)) for command in BLOCKS]
)
def test_a_command_of_the_readme_prints_what_is_shown(command: str) -> None:
    """To the digit what it computes; of what it measures only the words."""
    assert OUTPUTS.renewed(command, BLOCKS[command]) == BLOCKS[command], "run `make readme`"


def test_the_mistakes_of_the_readme_are_reported_as_shown(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "tiny-dense"\n[train]\nlearning_rate = 1e-3\nsequence_length = 256\nsteps = 2000\neval_every = 200\n'
        "eval_sequences = 8\nbatch = 3\n[layout]\ndata = 2\n"
    )
    command = [sys.executable, "-m", "phalanx", "train", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    shown = "".join(re.findall(r"^error: run\.toml.*\n", README, re.M))
    assert (done.returncode, done.stderr) == (2, shown) and shown.count("\n") == 2


def test_outputs_are_compared_line_by_line() -> None:
    """Of an excerpt, what stands after lines that are left out is found by its first line."""
    printed = ["a 1", "b 2.50 s", "c", "b 3 min 4 s", "d end"]
    for shown, found in (
        (["a 1", "…"], ["a 1", "…"]),
        (["a 9", "…", "c", "b 1 s", "…"], ["a 1", "…", "c", "b 3 min 4 s", "…"]),
        (["…", "d end"], ["…", "d end"]),
        (["a 1", "b …", "c", "…"], ["a 1", "b …", "c", "…"]),
        (["a 1"], printed),
        (["…", "e"], None),
    ):
        assert OUTPUTS.excerpt(shown, printed) == found, shown
    assert OUTPUTS.compared("phalanx plan x", "step 1") != OUTPUTS.compared("phalanx plan x", "step 2")
    assert OUTPUTS.compared("phalanx train x", "step 1") == OUTPUTS.compared("phalanx train x", "step  22")
    assert OUTPUTS.compared("phalanx train x", "eta 1 min 10 s") == OUTPUTS.compared("phalanx train x", "eta 44 ms")
