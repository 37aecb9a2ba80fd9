"""Conversations and instructions to ids, with a mask over the answers. `piecework` calls it for source = "chat"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.template import PLAIN, Message, Refused, Rendered, Template
from phalanx.data.text_records import MISSING, NOT_UTF8, Bad
from phalanx.data.tokenizer import Ids, Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

MESSAGES, NO_ANSWER, REFUSED, UNCLEAR = "bad messages", "no answer", "refused by the template", "answer not found"


def template_of(source: Source, words: Tokenizer) -> tuple[str, str]:
    """The template that a source asks for: its name for people, and its text; else RunError."""
    if source.template == "plain":
        return 'data.template = "plain"', PLAIN
    if source.template is not None:
        path = Path(source.template).expanduser()
        try:
            return f"The template {path}", path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunError(
                [f'data.template = "{source.template}" cannot be read ({reason}); name a Jinja file, or write "plain".']
            ) from None
    if words.chat_template is None:
        raise RunError(
            [f'data.tokenizer = "{words.name}" brings no chat template; set data.template to a Jinja file, or to "plain".']
        )
    return f"The chat template of {words.name}", words.chat_template


class Chat:
    """Turns records into text with the answers' places, by one template."""

    def __init__(self, template: Template, field: str, prompt_field: str, answer_field: str):
        self._template, self._field, self._prompt, self._answer = template, field, prompt_field, answer_field

    def render(self, record: Mapping[str, Any]) -> Rendered | Bad:
        messages = self._messages(record)
        if isinstance(messages, Bad):
            return messages
        if not any(turn["role"] == "assistant" and (turn["content"] or turn.get("tool_calls")) for turn in messages):
            return Bad(NO_ANSWER, "no message of the assistant says anything")
        more = {"tools": record["tools"]} if isinstance(record.get("tools"), list) else {}
        try:
            rendered = self._whole(messages, more)
        except Refused as error:
            return Bad(REFUSED, str(error))
        if isinstance(rendered, Bad):
            return rendered
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            return Bad(NOT_UTF8, f"half a character: {rendered.text[error.start]!r}")
        if not rendered.answers:
            return Bad(NO_ANSWER, "the template marks none")
        return replace(rendered, ends=messages[-1]["role"] == "assistant")

    def _whole(self, messages: list[Message], more: dict[str, Any]) -> Rendered | Bad:
        whole = self._template.render(messages, **more)
        if self._template.marks_answers:
            return whole
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(messages[:number], prompt=True, **more).text
            until = self._template.render(messages[: number + 1], **more).text
            answer = _added(whole.text, before, until, message)
            if isinstance(answer, Bad):
                return Bad(answer.reason, f"message {number}: {answer.detail}")
            answers.append(answer)
        return Rendered(whole.text, tuple(answers))

    def _messages(self, record: Mapping[str, Any]) -> list[Message] | Bad:
        value: Any = record
        for name in [self._field] if self._field in record else self._field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None and self._prompt in record and self._answer in record:
            value = [{"role": "user", "content": record[self._prompt]}, {"role": "assistant", "content": record[self._answer]}]
            if record.get("system"):
                value.insert(0, {"role": "system", "content": record["system"]})
        if value is None:
            there = ", ".join(map(str, list(record)[:10])) or "none"
            return Bad(MISSING, f'neither "{self._field}" nor "{self._prompt}" and "{self._answer}"; its fields are: {there}')
        if not isinstance(value, list) or not value:
            return Bad(MESSAGES, f'"{self._field}" is no list of messages')
        messages: list[Message] = []
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return Bad(MESSAGES, f"message {number} is no object with a role")
            content = _content(message)
            if content is None:
                return Bad(MESSAGES, f"the content of message {number} is not text")
            messages.append({**message, "content": content})
        return messages


def encode(rendered: Rendered, words: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Ids of a conversation, and which of them begin inside an answer. Special tokens are the template's affair."""
    ids, starts, _ = words.encode_spans(rendered.text)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for begin, end in rendered.answers:
        mask |= (starts >= begin) & (starts < end)
    return ids, mask


def encode_document(rendered: Rendered, words: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """The same with the end token, unless the template has written it: learnt where the conversation ends with an answer."""
    ids, mask = encode(rendered, words)
    if len(ids) and ids[-1] == words.end:
        return ids, mask
    return np.append(ids, np.int32(words.end)), np.append(mask, rendered.ends)


def _content(message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            return None
        return "".join(map(str, texts))
    return content if isinstance(content, str) else None


def _added(whole: str, before: str, until: str, message: Message) -> tuple[int, int] | Bad:
    """Where the text of a turn stands: between what asks for the answer and what follows it."""
    if not until.startswith(before):
        return Bad(
            UNCLEAR, "the template writes the question otherwise once it is answered; mark answers in it (generation tag)"
        )
    last_line = next((line.strip() for line in reversed(message["content"].splitlines()) if line.strip()), "")
    added = until[len(before) :]
    if last_line not in added and json.dumps(last_line, ensure_ascii=False)[1:-1] not in added:
        return Bad(UNCLEAR, "the template does not show this answer")
    if whole.startswith(until):
        return len(before), len(until)
    # Some templates write earlier turns otherwise than the last one (they leave thinking out): where the answer itself still
    # stands behind its question, followed by what ends a turn, it is known all the same.
    content = message["content"].strip()
    ending = until[until.rfind(content) + len(content) :] if content in added else None
    if ending is not None and whole.startswith(before + content + ending):
        return len(before), len(before) + len(content) + len(ending)
    return Bad(UNCLEAR, "the template writes earlier turns otherwise than the last; mark answers in it (generation tag)")
