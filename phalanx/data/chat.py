"""Jinja chat templates: a conversation to text, with what has to be learnt marked. `chat` renders records with it.

The environment is the one transformers gives templates, so that the text is the same; it is sandboxed, since templates come
with tokenizers from anywhere.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.text_records import MISSING, NOT_UTF8, BadRecord
from phalanx.data.tokenizer import Ids, Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

PLAIN = """\
{%- for message in messages -%}
{{- message.role | capitalize + ': ' + message.content | trim + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
"""The template called "plain": each turn as `Role: text` and an empty line."""
_NOW = datetime(2024, 7, 26)
"""The day it is in every template: ids must not depend on when they were made. Llama's template falls back to this one."""

Message = Mapping[str, Any]


class TemplateRefusal(Exception):
    """The template does not take this conversation; the words are its own."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters, from … to, that the model is to learn."""
    ends: bool = False
    """Whether the last turn is an answer, so that the end belongs to it."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, name: str, special: Mapping[str, str]):
        """`name`: what to call it in errors. `special`: texts of bos_token, eos_token …"""
        import jinja2

        self._name = name
        self._special = {"bos_token": "", "eos_token": "", **special}
        mark = secrets.token_hex(8)  # no text holds it
        self._marks = re.compile(f"<{mark}>|</{mark}>")
        environment = _environment(mark)
        try:
            self._compiled = environment.from_string(source)
            # The tag, not the word: a template may well speak of generation.
            self.marks_answers = any(
                kind == "block_begin" and following[1:] == ("name", "generation")
                for (_, kind, _), following in _pairs(environment.lex(source))
            )
        except jinja2.TemplateSyntaxError as error:
            raise RunError(
                [f"{name}, line {error.lineno}, is no valid Jinja: {error.message}; correct the template."]
            ) from None
        self._probe()

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **more: Any) -> Rendered:
        """The conversation as text. `prompt`: with what makes the model answer. Answers only where the template marks them."""
        try:
            marked = self._compiled.render(
                **({"tools": None, "documents": None} | more),
                messages=messages,
                add_generation_prompt=prompt,
                **self._special,
            )
        except Exception as error:  # templates may raise what they like
            raise TemplateRefusal(str(error) or type(error).__name__) from None
        if not self.marks_answers:
            return Rendered(marked, ())
        pieces: list[str] = []
        answers: list[tuple[int, int]] = []
        length = last = begun = 0
        for match in self._marks.finditer(marked):
            pieces.append(marked[last : match.start()])
            length += len(pieces[-1])
            last = match.end()
            if match.group()[1] != "/":
                begun = length
            elif length > begun:
                answers.append((begun, length))
        return Rendered("".join(pieces) + marked[last:], tuple(answers))

    def _probe(self) -> None:
        """A template that leaves answers out teaches nothing: told before anything is read."""
        question, answer = "What is asked?", "This is answered."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            shown = self.render(turns)
        except TemplateRefusal:
            return  # it may want more than a plain conversation; the records will tell
        if answer not in shown.text:
            raise RunError(
                [f"{self._name} does not show what the assistant says: no answer is in its text, so there is nothing to learn."]
            )
        if self.marks_answers and not any(answer in shown.text[a:b] for a, b in shown.answers):
            raise RunError([f"{self._name} has a generation tag, but not around what the assistant says; put it there."])


def _pairs(tokens: Any) -> list[tuple[Any, Any]]:
    useful = [token for token in tokens if token[1] != "whitespace"]
    return list(itertools.pairwise(useful))


def _environment(mark: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} around what the model is to say."""

        tags = {"generation"}  # noqa: RUF012 -- jinja declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"<{mark}>{caller()}</{mark}>"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **style)  # jinja's own escapes what HTML would mistake

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _NOW.strftime
    return environment


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


class ChatRenderer:
    """Turns records into text with the answers' places, by one template."""

    def __init__(self, template: ChatTemplate, field: str, prompt_field: str, answer_field: str):
        self._template, self._field, self._prompt, self._answer = template, field, prompt_field, answer_field

    def render(self, record: Mapping[str, Any]) -> Rendered | BadRecord:
        messages = self._messages(record)
        if isinstance(messages, BadRecord):
            return messages
        if not any(turn["role"] == "assistant" and (turn["content"] or turn.get("tool_calls")) for turn in messages):
            return BadRecord(NO_ANSWER, "no message of the assistant says anything")
        more = {"tools": record["tools"]} if isinstance(record.get("tools"), list) else {}
        try:
            rendered = self._whole(messages, more)
        except TemplateRefusal as error:
            return BadRecord(REFUSED, str(error))
        if isinstance(rendered, BadRecord):
            return rendered
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            return BadRecord(NOT_UTF8, f"half a character: {rendered.text[error.start]!r}")
        if not rendered.answers:
            return BadRecord(NO_ANSWER, "the template marks none")
        return replace(rendered, ends=messages[-1]["role"] == "assistant")

    def _whole(self, messages: list[Message], more: dict[str, Any]) -> Rendered | BadRecord:
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
            if isinstance(answer, BadRecord):
                return BadRecord(answer.reason, f"message {number}: {answer.detail}")
            answers.append(answer)
        return Rendered(whole.text, tuple(answers))

    def _messages(self, record: Mapping[str, Any]) -> list[Message] | BadRecord:
        value: Any = record
        for name in [self._field] if self._field in record else self._field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is None and self._prompt in record and self._answer in record:
            value = [{"role": "user", "content": record[self._prompt]}, {"role": "assistant", "content": record[self._answer]}]
            if record.get("system"):
                value.insert(0, {"role": "system", "content": record["system"]})
        if value is None:
            there = ", ".join(map(str, list(record)[:10])) or "none"
            return BadRecord(
                MISSING, f'neither "{self._field}" nor "{self._prompt}" and "{self._answer}"; its fields are: {there}'
            )
        if not isinstance(value, list) or not value:
            return BadRecord(MESSAGES, f'"{self._field}" is no list of messages')
        messages: list[Message] = []
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return BadRecord(MESSAGES, f"message {number} is no object with a role")
            content = _content(message)
            if content is None:
                return BadRecord(MESSAGES, f"the content of message {number} is not text")
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


def _added(whole: str, before: str, until: str, message: Message) -> tuple[int, int] | BadRecord:
    """Where the text of a turn stands: between what asks for the answer and what follows it."""
    if not until.startswith(before):
        return BadRecord(
            UNCLEAR, "the template writes the question otherwise once it is answered; mark answers in it (generation tag)"
        )
    last_line = next((line.strip() for line in reversed(message["content"].splitlines()) if line.strip()), "")
    added = until[len(before) :]
    if last_line not in added and json.dumps(last_line, ensure_ascii=False)[1:-1] not in added:
        return BadRecord(UNCLEAR, "the template does not show this answer")
    if whole.startswith(until):
        return len(before), len(until)
    # Some templates write earlier turns otherwise than the last one (they leave thinking out): where the answer itself still
    # stands behind its question, followed by what ends a turn, it is known all the same.
    content = message["content"].strip()
    ending = until[until.rfind(content) + len(content) :] if content in added else None
    if ending is not None and whole.startswith(before + content + ending):
        return len(before), len(before) + len(content) + len(ending)
    return BadRecord(UNCLEAR, "the template writes earlier turns otherwise than the last; mark answers in it (generation tag)")
