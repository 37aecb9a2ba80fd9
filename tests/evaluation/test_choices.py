"""Multiple choice against one text at a time with transformers, on a model that has learnt its answers, and on bad records."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.tiny import CONTEXT, Pair, spec, twins

from phalanx.data.tokenizer import ByteTokenizer
from phalanx.evaluation.choices import BadRecords, Chosen, choose, read_questions
from phalanx.evaluation.score import Scorer
from phalanx.models.init import build, materialize
from phalanx.spec.errors import RunError


def write(path: Path, records: list[Any]) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
    return path


def asked(model: Any, path: Path, limit: int = 0, batch: int = 4) -> tuple[Chosen, BadRecords]:
    bad = BadRecords(path, limit)
    scorer = Scorer(model, ByteTokenizer(), context=CONTEXT, batch=batch)
    return choose(scorer, read_questions(path, bad), bad), bad


@pytest.fixture(scope="module")
def pair() -> Pair:
    return twins(vocab=257)


def test_equals_one_choice_at_a_time_with_transformers(pair: Pair, tmp_path: Path) -> None:
    records = []
    for number in range(12):
        choices = [f"{word}{'!' * (number % 3)}" for word in ("red", "green and blue", "x", "a longer answer")][
            : 2 + number % 3
        ]
        records.append({"question": f"Number {number}, which?", "choices": choices, "answer": number % len(choices)})
    right = normalized = 0
    for record in records:
        context = list(str(record["question"]).encode())
        sums = [pair.logprob(context, list(f" {choice}".encode()))[0] for choice in record["choices"]]  # type: ignore[attr-defined]
        each = [value / len(choice) for value, choice in zip(sums, record["choices"], strict=True)]  # type: ignore[arg-type]
        right += sums.index(max(sums)) == record["answer"]
        normalized += each.index(max(each)) == record["answer"]
    assert 0 < right != normalized, "the two ways of counting must differ for this to test both"
    for batch in (1, 5):
        got, bad = asked(pair.ours, write(tmp_path / "q.jsonl", records), batch=batch)
        assert (got.questions, got.right, got.right_normalized, got.truncated) == (12, right, normalized, 0)
        assert got.accuracy == right / 12 and got.accuracy_normalized == normalized / 12
        assert not bad.reasons


def test_a_model_that_has_learnt_its_answers_is_always_right(tmp_path: Path) -> None:
    model = materialize(build(spec(257)), 0, torch.device("cpu"))
    facts = {"sky": "blue", "grass": "green", "coal": "black"}
    texts = [list(f"The {thing} is {colour}.".encode()) for thing, colour in facts.items()]
    length = max(map(len, texts))
    tokens = torch.tensor([text + [256] * (length - len(text)) for text in texts])
    positions = torch.arange(length - 1).expand(len(texts), -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(tokens[:, :-1], positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    colours = [*facts.values(), "a very long wrong answer"]
    records: list[dict[str, object]] = [
        {"prompt": "The sky is", "choices": colours, "answer": 0},
        {"context": "The grass is ", "choices": colours, "answer": "green"},
        {"question": "The coal is", "choices": [f" {colour}" for colour in colours], "answer": "C"},
    ]
    got, _ = asked(model.eval(), write(tmp_path / "q.jsonl", records))
    assert (got.accuracy, got.accuracy_normalized) == (1.0, 1.0)
    wrong = [record | {"answer": 3} for record in records]
    got, _ = asked(model, write(tmp_path / "wrong.jsonl", wrong))
    assert (got.accuracy, got.accuracy_normalized) == (0.0, 0.0)


def test_answers_in_every_form(tmp_path: Path) -> None:
    choices = ["B", "A", "x y"]
    forms = {0: 0, 2: 2, "x y": 2, "B": 0, "A": 1, "c": 2, " C ": 2}
    path = write(tmp_path / "q.jsonl", [{"question": "?", "choices": choices, "answer": answer} for answer in forms])
    found = [question.answer for question in read_questions(path, BadRecords(path, 0))]
    assert found == list(forms.values())


BAD: dict[str, tuple[Any, str]] = {
    "broken JSON": (b'{"question": "?"', "broken JSON"),
    "mixed encoding": (b'{"question": "caf\xe9"}', "not UTF-8"),
    "a list": ([1, 2], "not an object"),
    "no question": ({"choices": ["a", "b"], "answer": 0}, "no question"),
    "two questions": ({"question": "?", "context": "!", "choices": ["a", "b"], "answer": 0}, "no question"),
    "question is a number": ({"question": 3, "choices": ["a", "b"], "answer": 0}, "no question"),
    "no choices": ({"question": "?", "answer": 0}, "no choices"),
    "one choice": ({"question": "?", "choices": ["a"], "answer": 0}, "no choices"),
    "an empty choice": ({"question": "?", "choices": ["a", ""], "answer": 0}, "no choices"),
    "answer out of range": ({"question": "?", "choices": ["a", "b"], "answer": 2}, "no answer"),
    "negative answer": ({"question": "?", "choices": ["a", "b"], "answer": -1}, "no answer"),
    "answer is true": ({"question": "?", "choices": ["a", "b"], "answer": True}, "no answer"),
    "no answer": ({"question": "?", "choices": ["a", "b"]}, "no answer"),
    "unknown letter": ({"question": "?", "choices": ["a", "b"], "answer": "D"}, "no answer"),
    "choice too long": ({"question": "?", "choices": ["a", "b" * 100], "answer": 0}, "too long"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_counted(pair: Pair, tmp_path: Path, name: str) -> None:
    record, reason = BAD[name]
    good = {"question": "?", "choices": ["a", "b"], "answer": 0}
    path = write(tmp_path / "q.jsonl", [good, record, b"", good])
    got, bad = asked(pair.ours, path, limit=1)
    assert got.questions == 2 and dict(bad.reasons) == {reason: 1}
    assert bad.examples[0].startswith(f"{path}, line 2: {reason}: ")
    with pytest.raises(RunError, match=r"max-bad-records = 0") as refused:
        asked(pair.ours, path)
    assert f"{path}, line 2: " in str(refused.value)


def test_a_question_too_long_is_cut_and_counted(pair: Pair, tmp_path: Path) -> None:
    long = {"question": "x" * 500 + "?", "choices": ["a", "b"], "answer": 0}
    short = {"question": "?", "choices": ["a", "b"], "answer": 0}
    got, _ = asked(pair.ours, write(tmp_path / "q.jsonl", [long, short]))
    assert (got.questions, got.truncated) == (2, 1)


def test_files_without_questions(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no question"):
        asked(pair.ours, write(tmp_path / "empty.jsonl", []))
    with pytest.raises(RunError, match=r"holds no question that can be used.*, line 1: "):
        asked(pair.ours, write(tmp_path / "bad.jsonl", [b"x"]), limit=5)
    with pytest.raises(RunError, match="is not a file"):
        asked(pair.ours, tmp_path / "missing.jsonl")


def test_most_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": "?", "choices": ["a", "b"], "answer": 0}] * 5)
    assert len(list(islice(read_questions(path, BadRecords(path, 0)), 3))) == 3
