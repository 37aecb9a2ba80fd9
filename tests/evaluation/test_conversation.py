from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tokenizers import CHATML, save_bpe

from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.evaluation.conversation import Conversation
from phalanx.evaluation.open_model import Opened
from phalanx.models.sampling import Sampling
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Data, Run, Train

SPEC = ModelSpec(vocab=512, dim=8, layers=1, heads=1, ffn=8, context=400)


class Reciter(torch.nn.Module):
    """A model that knows one answer by heart, and records every prompt."""

    def __init__(self, answers: list[list[int]]):
        super().__init__()
        self.spec, self.weight = SPEC, torch.nn.Parameter(torch.zeros(1))
        self.answers, self.prompts, self._rest = answers, list[list[int]](), iter(())

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if (following := next(self._rest, None)) is None:
            self.prompts.append(tokens[0].tolist())
            self._rest: Iterator[int] = iter(self.answers[len(self.prompts) - 1])
            following = next(self._rest)
        logits = torch.zeros(1, tokens.shape[1], SPEC.vocab)
        logits[0, -1, following] = 1.0
        return logits


def opened(tokenizer: Tokenizer, *answers: list[int]) -> Opened:
    run = Run(model=SPEC, data=Data(), train=Train(batch=1, steps=1))
    return Opened(Reciter(list(answers)), tokenizer, run, Path("runs/mine"), frozenset((tokenizer.end,)))


def ask(conversation: Conversation, question: str, tokens: int = 300) -> str:
    return "".join(conversation.ask(question, tokens, Sampling(temperature=0)))


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_answer_ends_where_the_plain_template_begins_another_turn() -> None:
    """The end token ends the last turn of a conversation only: before that, an answer ends where the next question begins."""
    words = open_tokenizer("byte")
    endless = ids(" It's\n\nUseful.\n\nUser: And I go on\n\nAssistant: as both")
    model = opened(words, endless, [*ids(" Yes.\n\n"), words.end], ids(" cut"))
    talk = Conversation(model, "plain", "Be brief.")
    assert ask(talk, "What is it?") == "It's\n\nUseful." and talk.finished
    model.model._rest = iter(())  # type: ignore[assignment]
    assert ask(talk, "Really?") == "Yes." and talk.finished
    assert ask(talk, "Why?", tokens=3) == "cu" and not talk.finished
    prompts: Any = model.model.prompts
    text = "System: Be brief.\n\nUser: What is it?\n\nAssistant: It's\n\nUseful.\n\nUser: Really?\n\nAssistant:"
    assert bytes(prompts[1]).decode() == text
    assert [turn["content"] for turn in talk.transcript()][-2:] == ["Why?", "cu"]


def test_answer_ends_with_the_special_token_of_the_template(tmp_path: Path) -> None:
    words = open_tokenizer(str(save_bpe(tmp_path, template=CHATML)))  # whose own end token is another one
    end = next(token for token, text in words.marks.items() if text == "<|im_end|>")
    said = [int(token) for token in words.encode("This is answered.")]
    talk = Conversation(opened(words, [*said, end, *said]))
    assert ask(talk, "What is asked?") == "This is answered." and talk.finished and talk.tokens == len(said) + 1


def test_interrupted_answer_is_kept_as_far_as_it_was_taken() -> None:
    talk = Conversation(opened(open_tokenizer("byte"), ids(" one two three")), "plain")
    answer = talk.ask("Count.", 100, Sampling(temperature=0))
    taken = [next(answer) for _ in range(4)]
    answer.close()  # type: ignore[attr-defined]
    assert talk.messages[-1]["content"] == "".join(taken).strip() == "one"
    assert talk.undo() == "Count." and talk.messages == [] and talk.undo() is None


def test_question_that_cannot_be_asked_is_dropped(tmp_path: Path) -> None:
    talk = Conversation(opened(open_tokenizer("byte"), ids(" Yes.")), "plain")
    with pytest.raises(RunError, match=r"has \d+ tokens and the model's context 400, which leaves no room"):
        ask(talk, "x" * 400)
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text(
        "{% for m in messages %}{% if 'why' in m.content %}{{ raise_exception('not why') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    talk = Conversation(opened(open_tokenizer("byte"), ids(" Yes.")), str(refusing))
    with pytest.raises(RunError, match="refuses this conversation: not why"):
        ask(talk, "why?")
    assert talk.messages == []
