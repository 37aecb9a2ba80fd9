"""The documents are true: what they quote is what the code says, and their commands and programs run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from doc_scripts import script

from phalanx.cli.main import app
from phalanx.dashboard.summary import Summary
from phalanx.events.records import KINDS
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import parse
from phalanx.spec.errors import RunError
from phalanx.spec.load import load, loads

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
COMMANDS = (ROOT / "docs" / "cli.md").read_text()
CONTRACT = (ROOT / "docs" / "run-directory.md").read_text()
VERBS = typer.main.get_command(app)
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(?:    )?(?:\$ )?phalanx (?:train|verify|plan|rehearse|simulate) (examples/\S+\.toml)(.*)$", re.M)


def read(page: Path) -> str:
    """A page with each command on one line."""
    return page.read_text().replace("\\\n", " ")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(("maker", "page"), [("make_run_file", "run-file"), ("make_protocol", "protocol"), ("make_cli", "cli")])
def test_references_are_up_to_date(maker: str, page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == script(maker).text(), "run `make docs`"


def test_the_picture_of_the_readme_shows_what_the_command_prints() -> None:
    def words(svg: str) -> list[str]:
        return re.findall(r">([^<]+)</text>", svg)

    pictures = script("make_pictures")
    assert f"({pictures.FILE.relative_to(ROOT)})" in README.read_text()
    assert words(pictures.FILE.read_text()) == words(pictures.text()), "run `make docs`"


def test_the_picture_of_a_layer_is_up_to_date() -> None:
    picture = script("make_cuts_picture")
    assert "(images/layer-cuts.svg)" in (ROOT / "docs" / "any-model.md").read_text()
    assert picture.FILE.read_text() == picture.text(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_run_files_of_a_page_are_valid(page: Path) -> None:
    """A part of a run file is completed; weights and tokenizers of elsewhere are taken for a preset and bytes."""
    if page.name in ("catalogue.md", "extending.md"):
        return  # their files are of clusters and devices: tests/planning
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
        given = re.sub(r"^from = .*$", 'preset = "tiny-dense"', block, flags=re.M)
        given = re.sub(r"^tokenizer = .*$", 'tokenizer = "byte"', given, flags=re.M)
        train = tomllib.loads(given).get("train", {})
        needed = ["train.batch=64"] * (not train.keys() & {"batch", "batch_tokens"})
        needed += ["train.steps=1"] * (not train.keys() & {"steps", "tokens"})
        loads(given, name=page.name, overrides=needed)


def test_the_examples_are_valid() -> None:
    for example in (ROOT / "examples").glob("*.toml"):
        load(example)


def test_the_table_of_commands_has_every_command() -> None:
    verbs = {command.name for command in app.registered_commands}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        verbs |= {f"{group.name} {command.name}" for command in group.typer_instance.registered_commands}
        if group.typer_instance.info.invoke_without_command is True:
            verbs.add(group.name)
    groups = {group.name for group in app.registered_groups}
    rows = re.findall(r"^\| `phalanx ([\w-]+)(?: ([a-z]+))?", COMMANDS, re.M)
    assert {f"{verb} {inner}".strip() if verb in groups else verb for verb, inner in rows} == verbs


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    """Also in running text: the verb, and each of its options."""
    text = read(page)
    code = re.findall(r"^(?: {4}|\$ )?(phalanx .*)$|`(phalanx [^`]*)`", text, re.M)
    for command in (first or second for first, second in code):
        if command == "phalanx quickstart node 2":
            continue  # the name of a Ray actor
        words = re.split(r"\s+#|[|;&)]| -- ", command.replace("\n", " "))[0].split()[1:]
        unknown = _unknown(VERBS, words)
        assert not unknown, f"{command}: {unknown}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.M), target


def _unknown(command: Any, words: list[str]) -> list[str]:
    """The words that name no verb, and the options that the verb does not have."""
    for place, word in enumerate(words):
        inner = getattr(command, "commands", None)
        if inner is None or (word not in inner and getattr(command, "invoke_without_command", False)):
            words = words[place:]
            break
        if word in ("VERB", "…") or word.startswith("-"):
            return []
        if word not in inner:
            return [word]
        command = inner[word]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    given = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
    return [word for word in given if word not in known]


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_settings_of_every_command_are_legal_unless_the_page_says_otherwise(page: Path) -> None:
    text = read(page)
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


OUTPUTS = script("make_outputs")


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(shown, marks=[pytest.mark.slow] * OUTPUTS.is_slow(shown.command), id=f"{name}: {shown.command}")
        for name, page in OUTPUTS.pages().items()
        if not OUTPUTS.is_followed(page)  # those are followed by tests/test_site.py, from a wheel
        for shown in OUTPUTS.blocks(page)
    ],
)
def test_a_command_of_a_page_prints_what_is_shown(shown: Any) -> None:
    """To the digit what it computes; of what it measures only the words."""
    assert OUTPUTS.renewed(shown) == shown, "run `make outputs`"


def test_mistakes_in_a_run_file_are_reported_as_shown(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "tiny-dense"\n[train]\nlearning_rate = 1e-3\nsequence_length = 256\nsteps = 2000\neval_every = 200\n'
        "eval_sequences = 8\nbatch = 3\n[layout]\ndata = 2\n"
    )
    command = [sys.executable, "-m", "phalanx", "train", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    page = (ROOT / "docs" / "run-file.md").read_text()
    shown = "".join(re.findall(r"^error: run\.toml.*\n", page, re.M))
    assert (done.returncode, done.stderr) == (2, shown) and shown.count("\n") == 2


def test_outputs_are_compared_line_by_line() -> None:
    """Of an excerpt, what stands after lines that are left out is found by its first line."""
    printed = ["a 1", "b 2.50 s", "c", "b 3 min 4 s", "d end"]
    for shown, found in (
        (["a 1", "…"], ["a 1", "…"]),
        (["a 9", "…", "c", "b 1 s", "…"], ["a 1", "…", "c", "b 3 min 4 s", "…"]),
        (["…", "d end"], ["…", "d end"]),
        (["a 1", "b …", "c", "…"], ["a 1", "b …", "c", "…"]),
        (["…", "d …"], ["…", "d …"]),
        (["a 1"], printed),
        (["…", "e"], None),
    ):
        assert OUTPUTS.excerpt(shown, printed) == found, shown
    assert OUTPUTS.compared("phalanx plan x", "step 1") != OUTPUTS.compared("phalanx plan x", "step 2")
    assert OUTPUTS.compared("phalanx train x", "step 1") == OUTPUTS.compared("phalanx train x", "step  22")
    assert OUTPUTS.compared("phalanx train x", "eta 1 min 10 s") == OUTPUTS.compared("phalanx train x", "eta 44 ms")


def test_blocks_have_several_commands_of_several_lines() -> None:
    block = '$ mkdir a\n$ python -c "\nprint(1)\n"\n1\n$ phalanx train \\\n    x.toml\nstep 1\n…\n'
    found = OUTPUTS.parsed(block)
    assert [(shown.command, shown.lines) for shown in found] == [
        ("mkdir a", []),
        ('python -c "\nprint(1)\n"', ["1"]),
        ("phalanx train \\\n    x.toml", ["step 1", "…"]),
    ]
    assert "".join(shown.text() for shown in found) == block


def test_a_command_that_does_not_exist_is_found() -> None:
    for line, unknown in (
        ("train run.toml --dry-run train.steps=1", []),
        ("bench --minutes 1", []),
        ("bench step --model tiny-dense", []),
        ("trian run.toml", ["trian"]),
        ("checkpoint lst runs/a", ["lst"]),
        ("train run.toml --dryrun", ["--dryrun"]),
    ):
        assert _unknown(VERBS, line.split()) == unknown, line
