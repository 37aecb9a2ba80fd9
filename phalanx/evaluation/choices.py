"""Multiple choice: questions from a JSONL file, each answer scored by its log-likelihood after the question.

`phalanx eval --choices` calls it. docs/evaluation.md describes the file; the rules are those of lm-evaluation-harness, so that
numbers can be laid beside those of its multiple-choice tasks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.text_records import TOO_LONG, BadRecord, JsonLines
from phalanx.evaluation.score import Request, Score, Scorer
from phalanx.spec.errors import RunError

_ASKED = ("question", "context", "prompt")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PORTION = 256  # questions whose requests are in memory at a time
_LONGEST = 64 << 20  # bytes of a record


@dataclass(frozen=True, slots=True)
class Question:
    """One record."""

    line: int
    context: str
    choices: tuple[str, ...]
    answer: int

    def continuations(self) -> Iterator[str]:
        """Each choice with a space before it, unless the record brings one itself."""
        for choice in self.choices:
            apart = not self.context or self.context[-1].isspace() or choice[0].isspace()
            yield choice if apart else f" {choice}"


@dataclass(slots=True)
class Chosen:
    """What became of all questions."""

    questions: int = 0
    right: int = 0
    right_normalized: int = 0
    truncated: int = 0
    """Questions whose beginning was left out because the model's context is shorter."""

    @property
    def accuracy(self) -> float:
        """Share of questions whose likeliest choice is the answer."""
        return self.right / self.questions

    @property
    def accuracy_normalized(self) -> float:
        """The same with each log-likelihood divided by the choice's number of characters."""
        return self.right_normalized / self.questions

    def add(self, question: Question, scores: Sequence[Score]) -> None:
        lengths = [len(choice) for choice in question.choices]
        normalized = [score.logprob / length for score, length in zip(scores, lengths, strict=True)]
        self.questions += 1
        self.right += _first_largest([score.logprob for score in scores]) == question.answer
        self.right_normalized += _first_largest(normalized) == question.answer
        self.truncated += any(score.dropped for score in scores)


class BadRecords:
    """Records that were left out, counted by reason, and the limit of how many may be."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.reasons: Counter[str] = Counter()
        self.places: list[str] = []
        """The first few, each with what is wrong."""

    def add(self, line: int, bad: BadRecord) -> None:
        self.reasons[bad.reason] += 1
        if len(self.places) < 5:
            self.places.append(f"{self.path}, line {line}: {bad.reason}: {bad.detail}.")
        if self.reasons.total() > self.limit:
            raise RunError(
                [
                    f"--choices {self.path} has more than --max-bad-records = {self.limit} records that cannot be used; "
                    "correct them or raise the limit. The first:",
                    *self.places,
                ]
            )


def read_questions(path: Path, bad: BadRecords, most: int | None = None) -> Iterator[Question]:
    """The file's questions in order, at most so many; records that are none are told to `bad`."""
    if not path.is_file():
        raise RunError([f"--choices {path} is no file: name a JSONL file, which may be packed (.gz, .zst)."])
    found = 0
    for line, record in JsonLines(str(path), _LONGEST):
        if found == most:
            return
        question = record if isinstance(record, BadRecord) else _question(line, record)
        if isinstance(question, BadRecord):
            bad.add(line, question)
        else:
            found += 1
            yield question


def choose(scorer: Scorer, questions: Iterator[Question], bad: BadRecords) -> Chosen:
    """Score every question's choices."""
    chosen = Chosen()
    portion: list[tuple[Question, list[Request]]] = []
    for question in questions:
        requests = [scorer.encode(question.context, choice) for choice in question.continuations()]
        longest = max(len(request.continuation) for request in requests)
        if longest > scorer.context:
            bad.add(
                question.line, BadRecord(TOO_LONG, f"a choice has {longest} tokens and the model's context {scorer.context}")
            )
            continue
        portion.append((question, requests))
        if len(portion) == _PORTION:
            _score(scorer, portion, chosen)
            portion = []
    _score(scorer, portion, chosen)
    if not chosen.questions:
        first = f" The first: {bad.places[0]}" if bad.places else ""
        raise RunError([f"--choices {bad.path} holds no question that can be used.{first}"])
    return chosen


def _score(scorer: Scorer, portion: Sequence[tuple[Question, list[Request]]], chosen: Chosen) -> None:
    scores = iter(scorer.scores([request for _, requests in portion for request in requests]))
    for question, requests in portion:
        chosen.add(question, [next(scores) for _ in requests])


def _first_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def _question(line: int, record: dict[str, Any]) -> Question | BadRecord:
    asked = [key for key in _ASKED if key in record]
    if len(asked) != 1:
        have = f"it has {' and '.join(asked)}" if asked else "it has none"
        return BadRecord("no question", f'one of "question", "context" and "prompt" is wanted and {have}')
    if not isinstance(record[asked[0]], str):
        return BadRecord("no question", f'"{asked[0]}" is not text')
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        return BadRecord("no choices", '"choices" is not a list of two or more texts, none of them empty')
    answer = _answer(record.get("answer"), choices)
    if answer is None:
        shown = json.dumps(record.get("answer"))[:60]
        return BadRecord(
            "no answer", f'"answer" = {shown} is no number (from 0), letter or text of one of {len(choices)} choices'
        )
    return Question(line, record[asked[0]], tuple(choices), answer)


def _answer(answer: Any, choices: Sequence[str]) -> int | None:
    """Which choice is right: given as its number from 0, its text, or its letter."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer if 0 <= answer < len(choices) else None
    if not isinstance(answer, str):
        return None
    if answer in choices:  # before letters: a choice may be called "A"
        return choices.index(answer)
    letter = _LETTERS.find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
    return letter if 0 <= letter < len(choices) else None
