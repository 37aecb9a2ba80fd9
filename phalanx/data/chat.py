"""Chat records to token ids: Jinja templates, and a mask over the answers. The Jinja environment equals that of transformers, so that the
text is the same, and is sandboxed, because templates come with tokenizers from anywhere."""

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

from phalanx.data.record_readers import MISSING, NOT_UTF8, BadRecord
from phalanx.data.tokenizer import Ids, Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

PLAIN = """\
{%- for message in messages -%}
{{- message.role | capitalize + ': ' + message.content | trim + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
"""The template named "plain": each turn as `Role: text` and an empty line."""
_NOW = datetime(2024, 7, 26)
"""The date in every template, because ids must not depend on the day they were made. Llama's template defaults to it."""

MESSAGES, NO_ANSWER, REFUSED, UNCLEAR = "bad messages", "no answer", "refused by the template", "answer not found"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Character ranges (start, stop) of the answers, which are trained on."""
    ends: bool = False
    """Whether the last turn is an answer."""


class ChatTemplate:
    """A compiled Jinja chat template."""

    def __init__(self, source: str, name: str, special: Mapping[str, str]):
        """`name`: the name in error messages. `special`: texts of bos_token, eos_token …"""
        import jinja2

        self._name = name
        self._special = {"bos_token": "", "eos_token": "", **special}
        mark = secrets.token_hex(8)  # random, so that no text contains it
        self._marks = re.compile(f"<{mark}>|</{mark}>")
        environment = _environment(mark)
        try:
            self._compiled = environment.from_string(source)
            # Looks for the tag, not the word: a template may contain the word "generation".
            self.marks_answers = any(
                kind == "block_begin" and following[1:] == ("name", "generation")
                for (_, kind, _), following in itertools.pairwise(
                    token for token in environment.lex(source) if token[1] != "whitespace"
                )
            )
        except jinja2.TemplateSyntaxError as error:
            raise RunError(f"{name}, line {error.lineno}, is no valid Jinja: {error.message}; correct the template.") from None
        self._check_shows_answers()

    def render(self, messages: Sequence[Message], *, prompt: bool = False, **more: Any) -> Rendered:
        """Renders a conversation. `prompt`: adds the generation prompt. Has answers only if the template marks them. Raises BadRecord with
        the message of a template that raises an error."""
        try:
            marked = self._compiled.render(
                **({"tools": None, "documents": None} | more),
                messages=messages,
                add_generation_prompt=prompt,
                **self._special,
            )
        except Exception as error:  # templates may raise anything
            raise BadRecord(REFUSED, str(error) or type(error).__name__) from None
        if not self.marks_answers:
            return Rendered(marked, ())
        pieces: list[str] = []
        answers: list[tuple[int, int]] = []
        length = last = start = 0
        for match in self._marks.finditer(marked):
            pieces.append(marked[last : match.start()])
            length += len(pieces[-1])
            last = match.end()
            if match.group()[1] != "/":
                start = length
            elif length > start:
                answers.append((start, length))
        return Rendered("".join(pieces) + marked[last:], tuple(answers))

    def _check_shows_answers(self) -> None:
        """Refuses a template that omits answers, before any record is read."""
        question, answer = "What is asked?", "This is answered."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            shown = self.render(turns)
        except BadRecord:
            return  # it may need more than a plain conversation; the records will show
        if answer not in shown.text:
            raise RunError(
                f"{self._name} does not render what the assistant says: its text contains no answer, so there is nothing to learn."
            )
        if self.marks_answers and not any(answer in shown.text[a:b] for a, b in shown.answers):
            raise RunError(f"{self._name} has a generation tag, but not around what the assistant says; move it there.")


def _environment(mark: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %} … {% endgeneration %} around an answer."""

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
        return json.dumps(value, ensure_ascii=ensure_ascii, **style)  # jinja's own filter escapes HTML characters

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _NOW.strftime}
    return environment


def template_of(source: Source, tokenizer: Tokenizer) -> tuple[str, str]:
    """The template of a source: its display name and its text. Raises RunError if there is none."""
    if source.template == "plain":
        return 'data.template = "plain"', PLAIN
    if source.template is not None:
        path = Path(source.template).expanduser()
        try:
            return f"The template {path}", path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunError(
                f'data.template = "{source.template}" cannot be read ({reason}); name a Jinja file, or write "plain".'
            ) from None
    if tokenizer.chat_template is None:
        raise RunError(
            f'data.tokenizer = "{tokenizer.name}" has no chat template; set data.template to a Jinja file, or to "plain".'
        )
    return f"The chat template of {tokenizer.name}", tokenizer.chat_template


class ChatRenderer:
    """Renders records as text with the character ranges of the answers."""

    def __init__(self, template: ChatTemplate, field: str, prompt_field: str, answer_field: str):
        self._template, self._field, self._prompt, self._answer = template, field, prompt_field, answer_field

    def render(self, record: Mapping[str, Any]) -> Rendered:
        """Raises BadRecord if the record is no conversation with an answer."""
        messages = messages_of(record, self._field, self._prompt, self._answer)
        if not any(turn["role"] == "assistant" and (turn.get("content") or turn.get("tool_calls")) for turn in messages):
            raise BadRecord(NO_ANSWER, "every message of the assistant is empty")
        extra = {"tools": record["tools"]} if isinstance(record.get("tools"), list) else {}
        rendered = self._with_answers(messages, extra)
        try:
            rendered.text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(NOT_UTF8, f"an unpaired surrogate: {rendered.text[error.start]!r}") from None
        if not rendered.answers:
            raise BadRecord(NO_ANSWER, "the template marks no answer")
        return replace(rendered, ends=messages[-1]["role"] == "assistant")

    def _with_answers(self, messages: list[Message], extra: dict[str, Any]) -> Rendered:
        whole = self._template.render(messages, **extra)
        if self._template.marks_answers:
            return whole
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(messages[:number], prompt=True, **extra).text
            until = self._template.render(messages[: number + 1], **extra).text
            try:
                answers.append(_answer_range(whole.text, before, until, message))
            except ValueError as error:
                raise BadRecord(UNCLEAR, f"message {number}: {error}") from None
        return Rendered(whole.text, tuple(answers))


def messages_of(record: Mapping[str, Any], field: str, prompt_field: str, answer_field: str) -> list[Message]:
    """The messages of a record, each with a role and text; raises BadRecord if it has none."""
    value: Any = record
    for name in [field] if field in record else field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None and prompt_field in record and answer_field in record:
        value = [{"role": "user", "content": record[prompt_field]}, {"role": "assistant", "content": record[answer_field]}]
        if record.get("system"):
            value.insert(0, {"role": "system", "content": record["system"]})
    if value is None:
        fields = ", ".join(map(str, list(record)[:10])) or "none"
        raise BadRecord(MISSING, f'neither "{field}" nor "{prompt_field}" and "{answer_field}"; its fields are: {fields}')
    if not isinstance(value, list) or not value:
        raise BadRecord(MESSAGES, f'"{field}" is not a list of messages')
    messages: list[Message] = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRecord(MESSAGES, f"message {number} is not an object with a role")
        messages.append(_with_reasoning(_with_text(message, number)))
    return messages


def encode(rendered: Rendered, tokenizer: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Ids of a conversation, and which of them belong to an answer. The template writes the special tokens.

    A token belongs to an answer if it has a character of it, except that one which begins inside and ends behind the answer counts, too: as
    in the assistant masks of transformers.
    """
    ids, starts, stops = tokenizer.encode_spans(rendered.text)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for begin, end in rendered.answers:
        mask |= (starts < end) & ((starts >= begin) | (stops > begin))
    return ids, mask


def encode_document(rendered: Rendered, tokenizer: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Ids and mask of a document: those of the template, if it ends an answer with a special token. Otherwise the end token follows and is
    trained on, or the model would not learn to stop."""
    ids, mask = encode(rendered, tokenizer)
    if not rendered.ends or _ending(ids, tokenizer) is not None:
        return ids, mask
    return np.append(ids, np.int32(tokenizer.end)), np.append(mask, True)


def content_of(message: Mapping[str, Any]) -> str | None:
    """The text of a message, "" for a call of tools without one; None: it is no text."""
    try:
        return str(_with_text(dict(message), 0).get("content") or "")
    except BadRecord:
        return None


def _ending(ids: Ids, tokenizer: Tokenizer) -> int | None:
    """The special token that ends a text, perhaps with white space behind it; None: another token does."""
    for token in reversed(ids.tolist()):
        if token in tokenizer.marks:
            return int(token)
        if tokenizer.decode([token]).strip():
            return None
    return None


def _with_text(message: Message, number: int) -> Message:
    """The message with its content as one text. A call of tools may have none; templates see what the record has. Raises BadRecord."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadRecord(MESSAGES, f"the content of message {number} is not text")
    return {**message, "content": "".join(map(str, texts))}


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under the names that templates read, as in transformers."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _answer_range(whole: str, before: str, until: str, message: Message) -> tuple[int, int]:
    """Character range of a turn: from the end of the text that prompts for it (`before`) to the end of the turn (`until`). Raises
    ValueError if it is not known."""
    if not until.startswith(before):
        raise ValueError("the template changes the question once it is answered; mark answers in it (generation tag)")
    text = message.get("content") or ""
    last_line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    added = until[len(before) :]
    if last_line not in added and json.dumps(last_line, ensure_ascii=False)[1:-1] not in added:
        raise ValueError("the template does not render this answer")
    if whole.startswith(until):
        return len(before), len(until)
    # Some templates render earlier turns differently from the last one (they drop the thinking). The range is still known if
    # the answer itself follows its question, with the same end of turn behind it.
    content = text.strip()
    ending = until[until.rfind(content) + len(content) :] if content in added else None
    if ending is not None and whole.startswith(before + content + ending):
        return len(before), len(before) + len(content) + len(ending)
    raise ValueError("the template renders earlier turns differently from the last; mark answers in it (generation tag)")
