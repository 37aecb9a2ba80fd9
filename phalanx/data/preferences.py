"""Preferences: records with a chosen and a rejected answer. Each becomes two documents that follow each other in the corpus, the chosen one
first, and windows hold whole pairs: the document of an even index in its window and the one after it belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.chat import MESSAGES, NO_ANSWER, REFUSED, UNCLEAR, ChatTemplate, Message, Rendered, content_of
from phalanx.data.corpus import Corpus, every_nth, offsets
from phalanx.data.pack import IGNORED, Batch, DocumentSpan, Intervals, best_fit, positions_and_documents, spans_between
from phalanx.data.record_readers import MISSING, NOT_UTF8, BadRecord
from phalanx.spec.run import Source

TOO_LONG = "longer than train.sequence_length"
SAME = "both answers are the same"


class PreferenceRenderer:
    """Renders the two answers of a record, each after its prompt, as TRL does: lists of messages by the chat template, and texts one after
    the other, or by the template if the run file names one."""

    def __init__(self, template: ChatTemplate | None, source: Source):
        self._template, self._texts_as_chat = template, source.template is not None
        self._fields = source.prompt_field, source.chosen_field, source.rejected_field

    def render(self, record: Mapping[str, Any]) -> tuple[Rendered, Rendered]:
        """The chosen and the rejected text. Raises BadRecord if the record is no pair."""
        prompt, chosen, rejected = (record.get(name) for name in self._fields)
        missing = [name for name, value in zip(self._fields[1:], (chosen, rejected), strict=True) if value is None]
        if missing:
            fields = ", ".join(map(str, list(record)[:10])) or "none"
            raise BadRecord(MISSING, f'"{missing[0]}"; its fields are: {fields}')
        if chosen == rejected:
            raise BadRecord(SAME, "there is nothing to prefer")
        if isinstance(chosen, str) and isinstance(rejected, str):
            if not isinstance(prompt, str | None):
                raise BadRecord(MESSAGES, f'"{self._fields[0]}" is a list, but the answers are texts')
            pair = self._of_texts(prompt or "", chosen), self._of_texts(prompt or "", rejected)
        else:
            pair = self._of_messages(prompt, chosen, rejected, record)
        for rendered in pair:
            try:
                rendered.text.encode()
            except UnicodeEncodeError as error:
                raise BadRecord(NOT_UTF8, f"an unpaired surrogate: {rendered.text[error.start]!r}") from None
        return pair

    def _of_texts(self, prompt: str, answer: str) -> Rendered:
        if self._texts_as_chat:
            return self._conversation([{"role": "user", "content": prompt}], [{"role": "assistant", "content": answer}], {})
        if not answer:
            raise BadRecord(NO_ANSWER, "an answer is empty")
        return Rendered(prompt + answer, ((len(prompt), len(prompt) + len(answer)),), ends=True)

    def _of_messages(self, prompt: Any, chosen: Any, rejected: Any, record: Mapping[str, Any]) -> tuple[Rendered, Rendered]:
        _, chosen_field, rejected_field = self._fields
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        first = _messages(before, self._fields[0]) if before else []
        better, worse = _messages(chosen, chosen_field), _messages(rejected, rejected_field)
        if not first:  # both are whole conversations: what they have in common is the prompt
            shared = next(
                (i for i, (a, b) in enumerate(zip(better, worse, strict=False)) if a != b), min(len(better), len(worse))
            )
            first, better, worse = better[:shared], better[shared:], worse[shared:]
        extra = {"tools": record["tools"]} if isinstance(record.get("tools"), list) else {}
        return self._conversation(first, better, extra), self._conversation(first, worse, extra)

    def _conversation(self, prompt: list[Message], answer: list[Message], extra: dict[str, Any]) -> Rendered:
        if self._template is None:
            raise BadRecord(REFUSED, "the tokenizer has no chat template; set data.template")
        if not prompt or not any(turn["content"] for turn in answer):
            raise BadRecord(NO_ANSWER, "an answer is empty, or nothing comes before it")
        before = self._template.render(prompt, prompt=True, **extra).text
        whole = self._template.render([*prompt, *answer], **extra).text
        if not whole.startswith(before) or len(whole) == len(before):
            raise BadRecord(UNCLEAR, "the template changes the prompt once it is answered")
        return Rendered(whole, ((len(before), len(whole)),), ends=True)


def _messages(value: Any, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRecord(MESSAGES, f'"{field}" is not a list of messages')
    messages: list[Message] = []
    for number, message in enumerate(value):
        content = content_of(message) if isinstance(message, dict) and isinstance(message.get("role"), str) else None
        if content is None:
            raise BadRecord(MESSAGES, f'message {number} of "{field}" is not an object with a role and text')
        messages.append({**message, "content": content})
    return messages


def pair_blocks(corpus: Corpus) -> npt.NDArray[np.int64]:
    """Start positions of blocks of consecutive pairs, then the end of the stream: answers of a pair are held out together."""
    return every_nth(corpus.bounds(0, corpus.documents)[::2])


class PairPacking:
    """Windows of whole pairs, longest first. Pairs that are longer than a window are left out, and so are those that a held-out interval
    cuts. Inputs and targets of a document are those of `BestFitPacking`: its end token is a target, but not an input."""

    def __init__(self, corpus: Corpus, intervals: Intervals, length: int, *, end: int):
        self.length, self._corpus, self._end = length, corpus, end
        bounds = corpus.bounds(0, corpus.documents - corpus.documents % 2)
        begins, middles, ends = bounds[:-1:2], bounds[1::2], bounds[2::2]
        edges = intervals.ravel()
        inside = (edges.searchsorted(begins, "right") % 2 == 1) & (
            edges.searchsorted(begins, "right") == edges.searchsorted(ends, "left")
        )
        slots = ends - begins - 2
        fits = inside & (slots <= length)
        self.too_long = int((inside & ~fits).sum())
        """Number of pairs that no window can hold."""
        order = np.flatnonzero(fits)[np.argsort(-slots[fits], kind="stable")]
        window_of, self.count = best_fit(slots[order].astype(np.int64), length)
        order = order[np.argsort(window_of, kind="stable")]
        self._pairs = np.stack((begins[order], middles[order], ends[order]), axis=1)
        self._firsts = offsets(np.bincount(window_of, minlength=self.count))
        self.tokens = int((ends - begins)[fits].sum())
        self.padding_ratio = 1.0 - int(slots[fits].sum()) / (self.count * length) if self.count else 0.0

    def batch(self, numbers: npt.NDArray[np.int64]) -> Batch:
        if numbers.min() < 0 or numbers.max() >= self.count:
            raise IndexError(f"windows {numbers.min()} … {numbers.max()} of {self.count}")
        shape = len(numbers), self.length
        tokens, targets = np.full(shape, self._end, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        begins = np.zeros(shape, dtype=np.bool_)
        for row, number in enumerate(numbers.tolist()):
            column = 0
            for start, stop in self._documents(number):
                ids, mask = self._corpus.read(start, stop), self._corpus.mask(start + 1, stop)
                until = column + stop - start - 1
                tokens[row, column:until], targets[row, column:until] = ids[:-1], ids[1:]
                if mask is not None:
                    targets[row, column:until][~mask] = IGNORED
                begins[row, column] = True
                column = until
            if column < self.length:
                begins[row, column] = True
        return Batch(tokens, targets, *positions_and_documents(begins, True), numbers)

    def trace(self, number: int) -> tuple[DocumentSpan, ...]:
        spans = self._documents(number)
        return tuple(span for start, stop in spans for span in spans_between(self._corpus, start, stop - 1))

    def _documents(self, number: int) -> list[tuple[int, int]]:
        """Start and end in the corpus of each document of a window, chosen and rejected in turn."""
        pairs = self._pairs[self._firsts[number] : self._firsts[number + 1]].tolist()
        return [span for begin, middle, end in pairs for span in ((begin, middle), (middle, end))]
