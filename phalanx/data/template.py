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
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from phalanx.spec.errors import RunError

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


class Refused(Exception):
    """The template does not take this conversation; the words are its own."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters, from … to, that the model is to learn."""
    ends: bool = False
    """Whether the last turn is an answer, so that the end belongs to it."""


class Template:
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
            raise Refused(str(error) or type(error).__name__) from None
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
        except Refused:
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
