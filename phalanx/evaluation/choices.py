"""Multiple choice: questions from a JSONL file (docs/evaluation.md), each answer scored by its log-likelihood after the question. The
rules are those of lm-evaluation-harness, so that results are comparable with its multiple-choice tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from phalanx.data.record_readers import TOO_LONG, BadRecord, Place, json_lines
from phalanx.evaluation.score import Request, Score, Scorer
from phalanx.spec.errors import RunError

_QUESTION_KEYS = ("question", "context", "prompt")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CHUNK = 256  # questions whose requests are in memory at a time
_MAX_RECORD = 64 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Question:
    """One record."""

    place: Place
    context: str
    choices: tuple[str, ...]
    answer: int

    def continuations(self) -> Iterator[str]:
        """Each choice with a space before it, unless the record has one."""
        for choice in self.choices:
            separated = not self.context or self.context[-1].isspace() or choice[0].isspace()
            yield choice if separated else f" {choice}"


@dataclass(slots=True)
class Chosen:
    """The results of all questions."""

    questions: int = 0
    right: int = 0
    right_normalized: int = 0
    truncated: int = 0
    """Questions whose beginning was dropped because they exceed the model's context."""

    @property
    def accuracy(self) -> float:
        """Fraction of questions whose likeliest choice is the answer."""
        return self.right / self.questions

    @property
    def accuracy_normalized(self) -> float:
        """The same with each log-likelihood divided by the number of characters of the choice."""
        return self.right_normalized / self.questions

    def add(self, question: Question, scores: Sequence[Score]) -> None:
        total = [score.logprob for score in scores]
        normalized = [logprob / len(choice) for logprob, choice in zip(total, question.choices, strict=True)]
        self.questions += 1
        self.right += total.index(max(total)) == question.answer
        self.right_normalized += normalized.index(max(normalized)) == question.answer
        self.truncated += any(score.dropped for score in scores)


class BadRecords:
    """Skipped records, counted by reason, and their maximum number."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.reasons: Counter[str] = Counter()
        self.examples: list[str] = []
        """The first few, each with its problem."""

    def add(self, place: Place, bad: BadRecord) -> None:
        self.reasons[bad.reason] += 1
        if len(self.examples) < 5:
            self.examples.append(f"{place()}: {bad.reason}: {bad.detail}.")
        if self.reasons.total() > self.limit:
            raise RunError(
                [
                    f"--choices {self.path} has more than --max-bad-records = {self.limit} records that cannot be used; "
                    "correct them or raise the limit. The first:",
                    *self.examples,
                ]
            )


def read_questions(path: Path, bad: BadRecords) -> Iterator[Question]:
    """The questions of a file in order; other records are added to `bad`."""
    if not path.is_file():
        raise RunError(f"--choices {path} is not a file: name a JSONL file, which may be compressed (.gz, .zst).")
    for place, record in json_lines(str(path), _MAX_RECORD):
        try:
            if isinstance(record, BadRecord):
                raise record
            question = _question(place, record)
        except BadRecord as problem:
            bad.add(place, problem)
        else:
            yield question


def choose(scorer: Scorer, questions: Iterator[Question], bad: BadRecords) -> Chosen:
    """Score every question's choices."""
    chosen = Chosen()
    encoded = _encode(scorer, questions, bad)
    while chunk := list(islice(encoded, _CHUNK)):
        scores = iter(scorer.scores([request for _, requests in chunk for request in requests]))
        for question, requests in chunk:
            chosen.add(question, [next(scores) for _ in requests])
    if not chosen.questions:
        first = f" The first: {bad.examples[0]}" if bad.examples else ""
        raise RunError(f"--choices {bad.path} holds no question that can be used.{first}")
    return chosen


def _encode(scorer: Scorer, questions: Iterator[Question], bad: BadRecords) -> Iterator[tuple[Question, list[Request]]]:
    for question in questions:
        requests = [scorer.encode(question.context, choice) for choice in question.continuations()]
        longest = max(len(request.continuation) for request in requests)
        if longest <= scorer.context:
            yield question, requests
        else:
            reason = f"a choice has {longest} tokens and the model's context {scorer.context}"
            bad.add(question.place, BadRecord(TOO_LONG, reason))


def _question(place: Place, record: dict[str, Any]) -> Question:
    given = [key for key in _QUESTION_KEYS if key in record]
    if len(given) != 1:
        have = f"it has {' and '.join(given)}" if given else "it has none"
        raise BadRecord("no question", f'one of "question", "context" and "prompt" is expected, and {have}')
    if not isinstance(record[given[0]], str):
        raise BadRecord("no question", f'"{given[0]}" is not text')
    choices = record.get("choices")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise BadRecord("no choices", '"choices" is not a list of two or more texts, none of them empty')
    answer = _answer(record.get("answer"), choices)
    if answer is None:
        quoted = json.dumps(record.get("answer"))[:60]
        raise BadRecord(
            "no answer", f'"answer" = {quoted} is not the number (from 0), letter or text of one of {len(choices)} choices'
        )
    return Question(place, record[given[0]], tuple(choices), answer)


def _answer(answer: Any, choices: Sequence[str]) -> int | None:
    """The index of the right choice, given as its number from 0, its text, or its letter."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer if 0 <= answer < len(choices) else None
    if not isinstance(answer, str):
        return None
    if answer in choices:  # before letters: a choice may be called "A"
        return choices.index(answer)
    letter = _LETTERS.find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
    return letter if 0 <= letter < len(choices) else None
