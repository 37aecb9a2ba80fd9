"""`phalanx init`, `train --dry-run` and `plan --write`: from an empty folder to a run file that trains, by options and by keystrokes."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from commands import PATIENCE, Ended

import phalanx as px
from phalanx.spec.edit_file import with_tables
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.new_run_file import Answers, run_file

PHALANX = [sys.executable, "-m", "phalanx"]


def phalanx(folder: Path, *words: str) -> Ended:
    done = subprocess.run(
        [*PHALANX, *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "stories").mkdir()
    for number in range(3):
        (tmp_path / "stories" / f"{number}.txt").write_text("A rank waits for another rank, and then both add. " * 200)
    return tmp_path


def test_what_init_writes_runs_and_a_dry_run_writes_nothing(corpus: Path) -> None:
    made = phalanx(corpus, "init", "--data", "stories", "--steps", "10")
    assert made.code == 0 and "phalanx train run.toml" in made.out, made
    dry = phalanx(corpus, "train", "run.toml", "cluster.cpu_ranks=1", "--dry-run", "--json")
    assert dry.code == 0, dry
    told = dry.json
    assert told["dry_run"] and told["documents"] == 3 and told["run_tokens"] == 10 * 16 * 128 and not told["resumes"]
    assert told["plan"]["layout"]["data"] == 1 and loads(told["toml"]).train.steps == 10
    assert "training" in dry.err and "reading 3 documents" in dry.err
    assert not (corpus / "runs").exists()
    trained = phalanx(corpus, "train", "run.toml", "cluster.cpu_ranks=1", "--json")
    assert trained.code == 0 and trained.json["steps"] == 10, trained
    assert Path(trained.json["run_dir"]).name == Path(told["run_dir"]).name


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--goal", "win"], ["--goal win", "try, pretrain or finetune"]),
        (["--goal", "pretrain"], ["--goal pretrain needs text", "--data"]),
        (["--data", "gone"], ["--data gone", "no such file"]),
        (["--goal", "try", "--data", "stories"], ["--goal try", "remove --data"]),
        (["--goal", "finetune", "--data", "stories"], ["--goal finetune needs a model", "--model"]),
        (["--model", "gpt9"], ["gpt9 is not a preset", "phalanx models"]),
        (["--data", "stories", "--tokenizer", "gone"], ["data.tokenizer", "gone"]),
        (["--cluster", "moon"], ["cluster.name", "moon"]),
        (["no/folder.toml"], ["no/folder.toml", "no folder no"]),
        (["--example", "nothing"], ["--example nothing", "quickstart.toml"]),
        (["taken.toml"], ["taken.toml exists", "--force"]),
    ],
)
def test_bad_answers_are_refused_and_nothing_is_written(corpus: Path, words: list[str], parts: list[str]) -> None:
    (corpus / "taken.toml").write_text("mine")
    refused = phalanx(corpus, "init", *words)
    assert refused.code == 2 and all(part in refused.err for part in parts), refused
    assert sorted(path.name for path in corpus.iterdir()) == ["stories", "taken.toml"]
    assert (corpus / "taken.toml").read_text() == "mine"


def test_conversations_are_recognized(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "plain.jsonl").write_text(json.dumps({"text": "Hi"}) + "\n")
    chat = run_file(Answers(goal="pretrain", data=(str(tmp_path / "chat.jsonl"),)), "run.toml")
    plain = run_file(Answers(goal="pretrain", data=(str(tmp_path / "plain.jsonl"),)), "run.toml")
    assert tomllib.loads(chat)["data"]["source"] == "chat" and "source" not in tomllib.loads(plain)["data"]


def test_a_new_run_on_conversations_starts_and_cuts_none_of_them(tmp_path: Path) -> None:
    """Bytes have no chat template of their own, so the file names one."""
    turns = [{"role": "user", "content": "How many ranks?"}, {"role": "assistant", "content": "As many as there are GPUs."}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 50)
    assert phalanx(tmp_path, "init", "--goal", "pretrain", "--data", "chat.jsonl", "--steps", "4").code == 0
    dry = phalanx(tmp_path, "train", "run.toml", "cluster.cpu_ranks=1", "--dry-run", "--json")
    assert dry.code == 0, dry
    assert dry.json["documents"] == 50 and loads(dry.json["toml"]).data.packing == "best-fit"


@pytest.mark.parametrize("gpus", [True, False])
@pytest.mark.parametrize("model", [None, "gpt2-124m", "llama3-8b", "deepseek-v3"])
def test_every_answer_gives_a_file_that_loads(model: str | None, gpus: bool) -> None:
    text = run_file(Answers(goal="try", model=model, gpus=gpus, cluster="h100-1024" if gpus else None), "run.toml")
    assert loads(text).model.preset == (model or ("gpt2-124m" if gpus else "tiny-dense"))


def test_init_in_python(tmp_path: Path) -> None:
    run = px.init(px.Answers(goal="try", steps=7), tmp_path / "mine.toml")
    assert run.steps == 7 and px.load(tmp_path / "mine.toml") == run
    with pytest.raises(RunError, match="exists"):
        px.init(px.Answers(goal="try"), tmp_path / "mine.toml")


def test_examples_can_be_copied(tmp_path: Path) -> None:
    listed = phalanx(tmp_path, "init", "--example", "list", "--json")
    assert "quickstart.toml" in listed.json["examples"]
    copied = phalanx(tmp_path, "init", "--example", "quickstart")
    assert copied.code == 0 and px.load(tmp_path / "quickstart.toml").train.steps == 300, copied


def test_a_plan_is_written_into_the_file_and_comments_stay(corpus: Path) -> None:
    phalanx(corpus, "init", "--data", "stories", "--steps", "10")
    before = (corpus / "run.toml").read_text()
    planned = phalanx(corpus, "plan", "run.toml", "--write", "--json")
    assert planned.code == 0, planned
    after = (corpus / "run.toml").read_text()
    assert {line for line in before.splitlines() if "#" in line} <= set(after.splitlines())
    run = px.load(corpus / "run.toml")
    best = planned.json["best"]
    assert run.layout.data == best["layout"]["data"] and run.train.micro_batch == best["micro_batch"]
    given = phalanx(corpus, "plan", "run.toml", "--given", "--json")
    assert given.json["best"]["seconds"] == best["seconds"]


def test_tables_are_merged_except_for_the_layout() -> None:
    text = "# mine\n[layout]  # by hand\ntensor = 4\ndata = 2  # replicas\n\n[train]\nbatch = 8  # sequences\n"
    merged = with_tables(text, "[layout]\ndata = 8\n\n[train]\nmicro_batch = 2\n\n[memory]\ncompile = true")
    assert tomllib.loads(merged) == {
        "layout": {"data": 8},
        "train": {"batch": 8, "micro_batch": 2},
        "memory": {"compile": True},
    }
    assert merged.startswith("# mine\n[layout]  # by hand\n") and "batch = 8  # sequences" in merged and "# replicas" in merged


def test_init_by_keystrokes(corpus: Path) -> None:
    """In a terminal it asks, and asks again after an answer that cannot be."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(corpus)
        os.execvp(PHALANX[0], [*PHALANX, "init"])
    shown = b""

    def until(words: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + PATIENCE
        while words not in shown:
            assert time.monotonic() < deadline, shown.decode(errors="replace")
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 4096)

    try:
        for question, answer in (
            (b"Choose", b"2"),
            (b"Where is your text?", b"nowhere"),
            (b"there is no such file or folder", b"stories"),
            (b"Which model?", b""),
            (b"Which tokenizer?", b""),
            (b"How many steps?", b"5"),
        ):
            until(question)
            shown = shown[shown.index(question) + len(question) :]
            os.write(terminal, answer + b"\n")
        until(b"wrote run.toml")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
    run = px.load(corpus / "run.toml")
    assert (run.train.steps, run.data.paths, run.model.preset) == (5, ("stories",), "tiny-dense")
