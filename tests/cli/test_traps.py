"""Traps of the first hour that cost work or a wrong result without a word, through the command line alone: what a person reads there."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from commands import Ended, FinishedRun, FinishedRuns, InProcess, Workshop

EXAMPLES = Path(__file__).parents[2] / "examples"
PRESET = """
[model]
preset = "qwen3-0.6b"

[data]
source = "text"
paths = ["text"]
tokenizer = "byte"

[train]
batch = 8
sequence_length = 64
steps = 4
"""
OURS = """
[model]
preset = "llama3.2-1b"
vocab = 128256

[train]
batch = 64
sequence_length = 2048
steps = 100

[cluster]
gpu = "a100-sxm-40gb"
network = "ethernet-100"
"""


def answer(ended: Ended) -> dict[str, Any]:
    """The JSON object at the end of the output."""
    assert ended.out, ended
    value: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return value


@pytest.fixture
def damaged(finished: FinishedRuns, tmp_path: Path) -> Path:
    """A run whose newest checkpoint, of step 8, has a changed byte; the one before is of step 4."""
    path = tmp_path / "damaged"
    shutil.copytree(finished(1).path, path)
    newest = path / "checkpoints" / "step-00000008"
    file = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "verb", [["generate", "RUN", "the", "--tokens", "2"], ["export", "RUN", "out"]], ids=["generate", "export"]
)
def test_an_older_checkpoint_is_not_used_without_a_word(here: InProcess, damaged: Path, verb: list[str]) -> None:
    ended = here(*(str(damaged) if word == "RUN" else word for word in verb))
    assert ended.code == 0, ended
    (warning,) = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert "step-00000008 is damaged" in warning
    assert "using step 4 (" in ended.err


def test_a_damaged_checkpoint_is_not_called_valid(here: InProcess, damaged: Path) -> None:
    listed = here("checkpoint", "list", damaged)
    assert listed.code == 0 and not re.search(r"\bvalid\b", listed.shown), listed


def test_rows_of_a_preset_follow_the_tokenizer(here: InProcess) -> None:
    """The published model has 596,049,920 parameters, among them 151,936 rows of 1,024: bytes need 257 of them."""
    Path("text").mkdir()
    Path("text/one.txt").write_text("A rank waits. " * 200)
    Path("run.toml").write_text(PRESET)
    ended = here("plan", "run.toml", "--json")
    assert ended.code == 0, ended
    others = 596_049_920 - 151_936 * 1024
    assert others + 257 * 1024 <= answer(ended)["model"]["parameters"] <= others + 512 * 1024


def test_a_run_says_what_it_reads_at_its_start_and_at_its_end(finished: FinishedRuns) -> None:
    done: FinishedRun = finished(1)
    shown = re.sub(r"[\s│]+", " ", done.ended.shown)
    assert re.search(
        r"reading 3 documents, [\d.]+k tokens; the run trains on [\d.]+k tokens: [\d.]+ epochs, [\d.]+ tokens per", shown
    )
    assert re.search(r"data 3 documents, [\d.]+k tokens: [\d.]+ epochs, [\d.]+ tokens per parameter", shown)


def test_pictures_and_weights_among_the_text_are_named(workshop: Workshop) -> None:
    (workshop.path / "text" / "picture.png").write_bytes(b"\x89PNG\r\n" + b"pixels" * 900)
    (workshop.path / "text" / "model.safetensors").write_bytes(b"weights\0" * 900)
    ended = workshop.run("train", "tiny.toml", "train.steps=1")
    assert ended.code == 0, ended
    (warning,) = [line for line in ended.shown.splitlines() if line.startswith("warning: ")]
    assert "picture.png" in warning and "model.safetensors" in warning


def test_a_run_directory_among_the_text_is_refused(workshop: Workshop) -> None:
    ended = workshop.run("train", "tiny.toml", "train.steps=1", "--run-dir", "text/mine")
    assert ended.code == 2 and "text/mine" in ended.err and "data.paths" in ended.err, ended
    assert not (workshop.path / "text" / "mine").exists()


def test_a_cluster_of_ones_own_is_written_down_in_four_lines(here: InProcess) -> None:
    """Four nodes with 8 A100 of 40 GB and one port of 100 Gbit/s each."""
    Path("ours.toml").write_text(f"{OURS}nodes = 4\nnics = 1\n")
    ended = here("plan", "ours.toml", "--json")
    assert ended.code == 0, ended
    cluster = answer(ended)["cluster"]
    assert (cluster["gpus"], cluster["nodes"], cluster["nics"]) == (32, 4, 1)
    assert cluster["network"] == pytest.approx(100e9 / 8 / 8), "bytes a second of one port, for each of eight GPUs"
    assert "1 port of 100 Gbit/s Ethernet" in re.sub(r"\s+", " ", ended.shown)


def test_ports_that_nobody_has_named_are_told(here: InProcess) -> None:
    Path("ours.toml").write_text(f"{OURS}gpus = 32\n")
    ended = here("plan", "ours.toml")
    shown = re.sub(r"\s+", " ", ended.shown)
    assert ended.code == 0 and "8 ports of 100 Gbit/s Ethernet" in shown and "cluster.nics sets their number" in shown, ended


def test_a_cluster_of_the_catalogue_is_a_template(here: InProcess) -> None:
    ended = here("clusters", "show", "h100-1024", "--toml")
    assert ended.code == 0 and "h100" in json.dumps(tomllib.loads(ended.out)).lower(), ended


@pytest.mark.slow
def test_a_plan_counts_the_parameters_of_the_module_itself(here: InProcess) -> None:
    """An embedding, and four blocks of a norm, a matrix of 384 × 128 and one of 128 × 128: not a decoder of these sizes."""
    shutil.copytree(EXAMPLES, "examples", ignore=shutil.ignore_patterns("__pycache__"))
    ended = here("plan", "examples/own_model.toml", "--json")
    assert ended.code == 0, ended
    assert answer(ended)["model"]["parameters"] == 257 * 128 + 4 * (128 + 384 * 128 + 128 * 128) + 128


def test_control_bytes_of_a_model_do_not_reach_the_terminal(here: InProcess, finished: FinishedRuns) -> None:
    ended = here("generate", finished(1).path, "the", "--tokens", 300, "--temperature", 5)
    assert ended.code == 0, ended
    raw = [char for char in ended.out if unicodedata.category(char) == "Cc" and char not in "\n\t"]
    assert not raw and re.search(r"\\x[0-9a-f]{2}", ended.out), ended


def test_models_show_their_context_layers_and_width(here: InProcess) -> None:
    (line,) = [line for line in here("models").out.splitlines() if "mixtral-8x7b" in line]
    assert {"32", "4,096", "32,768"} <= set(line.split()), line


def test_a_difference_of_checkpoints_is_text(here: InProcess, finished: FinishedRuns) -> None:
    four, eight = (finished(1).path / "checkpoints" / f"step-0000000{step}" for step in (4, 8))
    ended = here("checkpoint", "diff", four, eight)
    assert ended.code == 1 and "step" in ended.out and "{" not in ended.out, ended


def test_errors_of_the_command_line_are_json_too(here: InProcess) -> None:
    ended = here("plan", "--bogus", "--json")
    assert ended.code == 2 and answer(ended) == {"error": ["No such option: --bogus"]}
