"""The number of a tokenizer's tokens, against `tokenizers` itself and against files that are none."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel

from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.sources import vocabulary_size

GOOD = "[train]\nbatch = 8\nsteps = 10\n"
MODELS = {
    "bpe": lambda: BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
    "words": lambda: WordLevel({"[UNK]": 0, "one": 1, "far": 9}, "[UNK]"),
    "unigram": lambda: Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("added", [0, 2])
def test_it_is_one_more_than_the_largest_id(tmp_path: Path, kind: str, added: int) -> None:
    tokenizer = Tokenizer(MODELS[kind]())
    tokenizer.add_special_tokens([f"<{i}>" for i in range(added)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    assert vocabulary_size(str(tmp_path)) == vocabulary_size(str(tmp_path / "tokenizer.json")) == expected
    assert loads(GOOD, overrides=[f"data.tokenizer={tmp_path}"]).model.vocab == expected


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for tokens in (3, 5):
        path.write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(tokens)}}}))
        os.utime(path, ns=(tokens, tokens))
        assert vocabulary_size(str(path)) == tokens


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not exist"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "lists no vocabulary"),
        (b"{}", "lists no vocabulary"),
        (b'{"model": {"vocab": {}}, "added_tokens": [{"id": 3}]}', "lists no vocabulary"),
        (b'{"model": {"vocab": 7}}', "lists no vocabulary"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems(path)
    assert problem.startswith(f'run.toml:5: data.tokenizer = "{path}" ')
    assert complaint in problem and ": give " in problem


def problems(tokenizer: Any) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        loads(GOOD + f"[data]\ntokenizer = {json.dumps(str(tokenizer))}\n", name="run.toml")
    return caught.value.problems


def test_folders_and_unreadable_files(tmp_path: Path) -> None:
    assert "is a folder without tokenizer.json" in problems(tmp_path)[0]
    (tmp_path / "file").touch()
    assert "cannot be read (Not a directory)" in problems(tmp_path / "file" / "t.json")[0]
    assert "cannot be read (File name too long)" in problems("a" * 5000)[0]
    assert "cannot be read (Could not determine home directory.)" in problems("~nobody-of-that-name/t.json")[0]
    assert "did you mean" not in problems("bite")[0] and '"byte"' in problems("bite")[0]


def test_a_resolved_file_can_be_read_where_its_tokenizer_is_not(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 299}}}))
    run = loads(GOOD, overrides=[f"data.tokenizer={path}"])
    path.unlink()
    assert loads(dump(run)) == run
    with pytest.raises(RunError, match="does not exist"):
        loads(GOOD, overrides=[f"data.tokenizer={path}", "model.vocab=300"])


def test_a_model_without_a_row_for_each_token(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 399}}}))
    with pytest.raises(RunError, match=r"model\.vocab = 300 has no row for some of the 400 tokens .*: set it to at least 400"):
        loads(GOOD, overrides=[f"data.tokenizer={path}", "model.vocab=300"])
