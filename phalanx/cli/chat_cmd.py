"""`phalanx chat`: a conversation with a trained model, in a terminal or with messages from a pipe."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, TextIO

from typer import Option

from phalanx.checkpointing.find_checkpoint import pin_model
from phalanx.cli.options import AsJson, Device, MaxTokens, Model, Seed, Temperature, TopK, TopP
from phalanx.cli.output import finish, report_checkpoint
from phalanx.dashboard.numbers import visible
from phalanx.spec.errors import RunError

if TYPE_CHECKING:
    from phalanx.evaluation.conversation import Conversation
    from phalanx.models.sampling import Sampling

_HELP = """\
/reset          begin a new conversation
/system TEXT    set the system message and begin a new conversation; without a text, remove it
/retry          answer the last message again
/help           show this
/quit           end, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is written with two of them."""
_PROMPT = "> "
_LIMIT = "(stopped after {} tokens; --tokens sets the limit)"


def chat(
    checkpoint: Model,
    system: Annotated[str | None, Option(help="The system message.")] = None,
    template: Annotated[str | None, Option(help='A Jinja file, or "plain". Default: the template of training.')] = None,
    tokens: MaxTokens = 1000,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Talk to a trained model through its chat template. Reads one message per line."""
    from phalanx.evaluation.conversation import Conversation
    from phalanx.evaluation.open_model import open_model
    from phalanx.models.sampling import Sampling

    opened = open_model(str(pin_model(checkpoint)), device)
    used = report_checkpoint(opened.path, opened.step, opened.damaged)
    conversation = Conversation(opened, template, system)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    _Chat(conversation, tokens, sampling, sys.stderr if json else sys.stdout).run()
    finish(json, {"messages": conversation.transcript()} | used)


class _Chat:
    """Reads messages and commands, and writes answers."""

    def __init__(self, conversation: Conversation, tokens: int, sampling: Sampling, output: TextIO):
        self._conversation, self._tokens, self._sampling, self._output = conversation, tokens, sampling, output
        self._terminal = sys.stdin.isatty()

    def run(self) -> None:
        if self._terminal:
            import readline  # noqa: F401 -- input() then edits lines and remembers them

            self._note("One message per line; /help shows the commands, Ctrl-D ends.")
        while (line := self._read()) is not None:
            if not (line := line.strip()):
                continue
            if not line.startswith("/") or line.startswith("//"):
                self._ask(line[1:] if line.startswith("//") else line)
            elif not self._obey(*line.partition(" ")[::2]):
                return

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if not self._terminal:
            line = sys.stdin.buffer.readline()
            return line.decode(errors="replace") if line else None
        while True:
            try:
                return os.fsencode(self._input()).decode(errors="replace")
            except EOFError:
                self._write("\n")
                return None
            except KeyboardInterrupt:
                self._note("\nCtrl-D ends the conversation.")

    def _input(self) -> str:
        if self._output is sys.stdout and sys.stdout.isatty():
            return input(_PROMPT)
        print(_PROMPT, end="", file=sys.stderr, flush=True)  # standard output is for answers, or for JSON alone
        return input()

    def _obey(self, command: str, argument: str) -> bool:
        """Obeys a command; False: the conversation is over."""
        talk, argument = self._conversation, argument.strip()
        match command:
            case "/quit" | "/exit":
                return False
            case "/reset":
                talk.messages.clear()
                self._note("new conversation")
            case "/system":
                talk.system = argument or None
                talk.messages.clear()
                self._note(f"new conversation, {'with this' if argument else 'without a'} system message")
            case "/retry":
                if (question := talk.undo()) is None:
                    self._note("There is no message to answer again.")
                else:
                    self._sampling = _other_draw(self._sampling)
                    self._ask(question)
            case "/help":
                self._note(_HELP)
            case _:
                self._note(f"{command} is no command. To send it as a message, write /{command}.\n{_HELP}")
        return True

    def _ask(self, question: str) -> None:
        answer = self._conversation.ask(question, self._tokens, self._sampling)
        try:
            for piece in answer:
                self._write(visible(piece))
            self._write("\n")
        except KeyboardInterrupt:
            answer.close()  # the conversation keeps what was shown
            self._output.flush()  # the interrupt may have come between a word and its way to the screen
            self._note("\n(stopped)")
            return
        except RunError as error:
            self._note(str(error))
            return
        if not self._conversation.finished:
            full = self._conversation.tokens < self._tokens
            self._note(
                "(the model's context is full; /reset begins a new conversation)" if full else _LIMIT.format(self._tokens)
            )

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()

    def _note(self, text: str) -> None:
        """Says something that is no part of the conversation, on standard error."""
        print(text, file=sys.stderr, flush=True)


def _other_draw(sampling: Sampling) -> Sampling:
    from dataclasses import replace

    return replace(sampling, seed=sampling.seed + 1_000_003)
