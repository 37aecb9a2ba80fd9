"""`phalanx tokenize` as people use it: killed and started again, divided among processes, given what is no text."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from commands import Workshop
from small_tokenizers import save_bpe

from phalanx.cli.main import main
from phalanx.data.token_files import TokenFiles


def write_lines(path: Path, megabytes: int) -> None:
    dice = random.Random(0)
    blocks = [json.dumps({"text": " ".join(dice.choices(["alpha", "beta", "語", "the"], k=2000))}) + "\n" for _ in range(20)]
    size = len("".join(blocks).encode())
    with path.open("w") as file:
        for _ in range((megabytes << 20) // size + 1):
            file.writelines(blocks)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_killed_tokenize_command_resumes_with_the_same_files(workshop: Workshop) -> None:
    write_lines(workshop.path / "a.jsonl", 70)
    straight = workshop.run("tokenize", "a.jsonl", "straight", "--processes", 2, "--json")
    assert straight.code == 0 and not straight.complaints, straight
    assert straight.json["parts"] == 5 and straight.json["tokens"] > 60e6
    out = workshop.path / "out"
    attempts = 4
    ends = [(0, signal.SIGKILL), (1, signal.SIGINT), (2, signal.SIGKILL)]
    while ends:
        kills, end = ends.pop(0)
        started = workshop.start("tokenize", "a.jsonl", "out", "--processes", 1)
        begun = f"part-{kills:06}.tokens"
        started.until(lambda name=begun: (out / f"{name}.unfinished").exists() or (out / name).exists(), "a part has begun")
        if kills:
            done = out / f"part-{kills - 1:06}.done"
            started.until(done.exists, "a part is done")
        os.kill(started.pid, end)
        ended = started.wait()
        assert workshop.gone(), "the workers die with it"
        if end == signal.SIGINT and ended.code == 0 and (attempts := attempts - 1):
            shutil.rmtree(out)  # it was done before the signal came: once more
            ends = [(0, signal.SIGKILL), (1, signal.SIGINT), (2, signal.SIGKILL)]
        elif end == signal.SIGINT:
            assert ended.code == 75 and "run the same command to resume" in ended.shown and "Traceback" not in ended.err, ended
        assert not (out / "tokens.json").exists()
    resumed = workshop.run("tokenize", "a.jsonl", "out", "--processes", 2, "--json")
    assert resumed.code == 0, resumed
    assert contents(out) == contents(workshop.path / "straight")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = workshop.run("tokenize", "a.jsonl", "out", "--json")
    assert again.code == 0 and again.json["tokens_per_second"] == 0
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before, "nothing was left to do"
    refused = workshop.run("tokenize", "a.jsonl", "out", "--field", "body", "--json")
    assert refused.code == 2 and 'field was "text" and is "body"' in refused.json["error"][0], refused


def test_tokenize_shows_progress_and_a_summary(workshop: Workshop) -> None:
    words = save_bpe(workshop.path / "words")
    (workshop.path / "a.jsonl").write_text('{"body": "The quick brown fox"}\n{broken\n' + '{"body": ""}\n')
    ended = workshop.run(
        "tokenize", "a.jsonl", "out", "--field", "body", "--tokenizer", words.name, env={"FORCE_COLOR": "1", "COLUMNS": "120"}
    )
    assert ended.code == 0, ended
    assert "tokenizing" in ended.shown and "1 documents" in ended.shown and "skipped (broken JSON)" in ended.shown
    assert "skipped, broken JSON" in ended.shown + ended.err and "a.jsonl, line 2" in ended.shown + ended.err
    files = TokenFiles(workshop.path / "out")
    assert files.documents == 1 and files.meta.tokenizer == words.name


BAD: dict[str, tuple[dict[str, bytes], tuple[str, ...], str]] = {
    "no folder to write": ({"a.jsonl": b"{}"}, ("a.jsonl",), "name the text first and the folder to write last"),
    "wrong field": ({"a.jsonl": b'{"body": "x"}\n'}, ("a.jsonl", "out"), 'no "text"; its fields are: body'),
    "broken lines": ({"a.jsonl": b'{"text": "x"}\n{\n{\n'}, ("a.jsonl", "out", "--max-bad-records", "1"), "2 × broken JSON"),
    "gzip cut off": (
        {"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]},
        ("a.jsonl.gz", "out"),
        "a.jsonl.gz is cut off",
    ),
    "nothing there": ({}, ("*.jsonl", "out"), '"*.jsonl" matches no file'),
    "unreadable tokenizer": (
        {"a.txt": b"x", "t.json": b"{"},
        ("a.txt", "out", "--tokenizer", "t.json"),
        "t.json is no tokenizer",
    ),
    "unknown tokenizer": ({"a.txt": b"x"}, ("a.txt", "out", "--tokenizer", "gpt"), 'data.tokenizer = "gpt" is not known'),
    "unknown kind": (
        {"a.txt": b"x"},
        ("a.txt", "out", "--source", "csv"),
        "--source csv is not known: choose one of text, jsonl",
    ),
    "template without answer": (
        {"a.jsonl": b'{"prompt": "a", "response": "b"}\n', "t.jinja": b"{{ messages[0].content }}"},
        ("a.jsonl", "out", "--source", "chat", "--template", "t.jinja"),
        "does not render what the assistant says",
    ),
    "missing column": ({"a.parquet": b""}, ("a.parquet", "out"), "a.parquet is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_tokenize_refuses_invalid_sources(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files, arguments, said = BAD[name]
    for path, content in files.items():
        (tmp_path / path).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["phalanx", "tokenize", *arguments, "--json"])
    with pytest.raises(SystemExit) as leaving:
        main()
    out, err = capfd.readouterr()
    assert leaving.value.code == 2
    assert "Traceback" not in err
    assert said in json.loads(out)["error"][0]
    assert any(line.startswith("error: ") and said in line for line in err.splitlines())
    assert {path.name for path in tmp_path.iterdir()} <= {*files, "out"}
    assert name == "broken lines" or not (tmp_path / "out").exists()
