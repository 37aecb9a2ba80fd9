"""Errors about data name a command that shows the data; it is run here as it stands in the error."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import RUN, Ended, FinishedRuns, InProcess, Workshop


def recommended(ended: Ended) -> list[str]:
    """The `phalanx data` command in an error."""
    (command,) = set(re.findall(r"`phalanx (data [^`]*)`", ended.err))  # the same for every problem
    return shlex.split(command)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    text = RUN.replace('source = "text"\npaths = ["text"]', 'paths = ["a.jsonl"]\ncache = "cache"')
    assert text != RUN
    (tmp_path / "my run.toml").write_text(text)
    return tmp_path / "my run.toml"


def test_too_many_bad_records_name_a_preview_of_the_good_ones(here: InProcess, run_file: Path) -> None:
    good = [json.dumps({"text": f"this is good record number {i} " * 5}) for i in range(50)]
    (run_file.parent / "a.jsonl").write_text("\n".join([*good, *["{broken"] * 200]))
    refused = here("train", run_file.name)
    assert refused.code == 2 and "max_bad_records" in refused.err, refused
    shown = here(*recommended(refused))
    assert shown.code == 0 and "good record" in shown.out


def test_text_without_a_usable_record_names_a_preview(here: InProcess, run_file: Path) -> None:
    (run_file.parent / "a.jsonl").write_text(
        "\n".join(json.dumps({"body": f"found under its own name {i} " * 9}) for i in range(50))
    )
    refused = here("train", run_file.name)
    assert refused.code == 2 and "data.field" in refused.err
    shown = here(*recommended(refused), "data.field=body")
    assert shown.code == 0 and "found under its own name" in shown.out


def test_too_little_text_names_an_inspection(here: InProcess, run_file: Path) -> None:
    (run_file.parent / "a.jsonl").write_text(json.dumps({"text": "short"}))
    refused = here("train", run_file.name)
    assert refused.code == 2 and "fewer than the" in refused.err
    shown = here(*recommended(refused))
    assert shown.code == 0 and "short" in shown.out


def test_changed_text_names_a_preview_of_the_next_step(workshop: Workshop, finished: FinishedRuns) -> None:
    before = finished(2)
    workshop.copy(str(before.path), "run")
    (workshop.path / "text" / "0.txt").write_text("something else " * 500)
    refused = workshop.run("train", "tiny.toml", "layout.data=2", "train.steps=9", "--run-dir", "run")
    assert refused.code == 2 and "--accept-changed-data" in refused.err, refused
    command = recommended(refused)
    assert command == ["data", "preview", "tiny.toml", "--step", "9"]
    shown = workshop.run(*command, "train.steps=9")
    assert shown.code == 0 and "step 9: 8 samples" in shown.out
