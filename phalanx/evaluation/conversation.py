"""A conversation with a trained model, through the chat template that it was trained with. Called by `phalanx chat` and
`phalanx generate --chat`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

from phalanx.data.chat import ChatTemplate, Message, template_of
from phalanx.data.chat_turns import chat_source, stored_template, turn_end
from phalanx.data.record_readers import BadRecord
from phalanx.data.tokenizer import TEMPLATE_FILE
from phalanx.evaluation.generated_text import sample_tokens
from phalanx.evaluation.open_model import Opened
from phalanx.models.sampling import Sampling
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source


class Conversation:
    """Messages so far, and the model that answers them."""

    def __init__(self, opened: Opened, template: str | None = None, system: str | None = None):
        """`template`: a Jinja file or "plain" instead of the model's own template. `system`: the system message."""
        name, text = _template(opened, template)
        self._opened, self._template = opened, ChatTemplate(text, name, opened.tokenizer.special)
        self._end = turn_end(self._template, opened.tokenizer)
        self.system = system
        self.messages: list[Message] = []
        """Without the system message."""
        self.tokens = 0
        """Tokens of the last answer, with the one that ended it."""
        self.finished = False
        """Whether the last answer ended by itself, not by the limit of tokens."""

    def ask(self, question: str, tokens: int, sampling: Sampling) -> Generator[str]:
        """Answers a question piece by piece, with up to `tokens` tokens. The conversation keeps what the caller has taken of the answer.
        Raises RunError if the template refuses the question or the context has no room for an answer; the question is then dropped."""
        prompt = self.prompt(question)
        context = self._opened.run.model.context
        if len(prompt) >= context:
            raise RunError(
                f"The conversation has {len(prompt)} tokens and the model's context {context}, which leaves no room for an answer: "
                "begin a new one, or ask for less."
            )
        self.messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in self._pieces(prompt, min(tokens, context - len(prompt)), sampling):
                answer += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": answer.strip()})

    def undo(self) -> str | None:
        """Takes back the last question and its answer; returns the question, or None if there is none."""
        if not self.messages:
            return None
        *self.messages, question, _ = self.messages
        return str(question["content"])

    def transcript(self) -> list[Message]:
        """All messages, beginning with the system message if there is one."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def prompt(self, question: str) -> list[int]:
        """Ids of the conversation with a question, up to the place of its answer. Raises RunError if the template refuses it."""
        try:
            text = self._template.render([*self.transcript(), {"role": "user", "content": question}], prompt=True).text
        except BadRecord as bad:
            raise RunError(f"The chat template refuses this conversation: {bad.detail}") from None
        # The template writes the special tokens.
        return [int(token) for token in self._opened.tokenizer.encode(text, special=False)]

    def _pieces(self, prompt: list[int], tokens: int, sampling: Sampling) -> Iterator[str]:
        stops = {*self._opened.stops, self._opened.tokenizer.end, self._end.token}
        push, cut = self._opened.tokenizer.stream(), _CutAt(self._end.text)
        self.tokens, self.finished = 0, False
        begun = False
        # Another seed for every answer: otherwise an answer would draw the random numbers of the one before.
        sampling = replace(sampling, seed=sampling.seed + len(self.messages) // 2)
        for token in sample_tokens(self._opened, prompt, tokens, sampling, stops):
            self.tokens += 1
            self.finished = token in stops
            text = "" if self.finished else cut.push(push(token))
            if not begun:
                text = text.lstrip()
            begun = begun or bool(text)
            if text:
                yield text
            if cut.found:
                self.finished = True
                break
        if rest := cut.rest():
            yield rest


class _CutAt:
    """Passes text through, up to and without a stop text; holds back what may be the beginning of it."""

    def __init__(self, stop: str):
        self._stop, self._held, self.found = stop, "", False

    def push(self, text: str) -> str:
        if not self._stop:
            return text
        text, self._held = self._held + text, ""
        if self._stop in text:
            self.found = True
            return text[: text.index(self._stop)]
        for length in range(min(len(text), len(self._stop) - 1), 0, -1):
            if text.endswith(self._stop[:length]):
                self._held = text[-length:]
                return text[:-length]
        return text

    def rest(self) -> str:
        """The text that was held back, without white space at its end, which may have been the end of a turn."""
        return "" if self.found else self._held.rstrip()


def _template(opened: Opened, requested: str | None) -> tuple[str, str]:
    """Display name and text of the template: the requested one, that of training, or the tokenizer's."""
    if requested is not None:
        return template_of(Source(template=requested), opened.tokenizer)
    if (stored := stored_template(opened.tokenizer_folder)) is not None:
        return f"{opened.tokenizer_folder}/{TEMPLATE_FILE}", stored
    source = chat_source(opened.run.data)
    if source is None and opened.tokenizer.chat_template is None:
        raise RunError(
            f'{opened.path} was not trained on conversations, and its tokenizer "{opened.tokenizer.name}" has no chat template: '
            'name one with --template (a Jinja file, or "plain"), or continue a text with `phalanx generate`.'
        )
    return template_of(source or Source(), opened.tokenizer)
