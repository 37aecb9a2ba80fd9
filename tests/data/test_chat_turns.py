from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import FAMILIES
from small_tokenizers import CHATML, save_bpe, save_family

from phalanx.data.chat import PLAIN, ChatTemplate
from phalanx.data.chat_turns import TurnEnd, chat_source, model_files, turn_end
from phalanx.data.tokenizer import open_tokenizer
from phalanx.spec.run import Data, MixedSource


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_an_answer_is_the_token_of_the_family(family: str, tmp_path: Path) -> None:
    known = FAMILIES[family]
    words = open_tokenizer(str(save_family(tmp_path, known)))
    end = turn_end(ChatTemplate(known.template, "The template", words.special), words)
    assert end.token is not None and words.marks[end.token] == (known.end_of_turn or known.eos)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (PLAIN, TurnEnd(None, "\n\nUser:")),
        (CHATML, TurnEnd(None, "<|im_end|>")),  # plain text for a tokenizer without such a token
        ("{% if messages | length == 2 %}{{ raise_exception('three or none') }}{% endif %}", TurnEnd(None)),
    ],
)
def test_end_of_an_answer_without_a_special_token_is_a_text(template: str, end: TurnEnd) -> None:
    assert turn_end(ChatTemplate(template, "The template", {}), open_tokenizer("byte")) == end


def test_files_of_a_model_that_holds_conversations(tmp_path: Path) -> None:
    words = open_tokenizer(str(save_bpe(tmp_path / "words", template=CHATML)))
    chats = Data(source="chat", paths=("a.jsonl",))
    files = model_files(chats, words)
    ends = {words.marks[token] for token in json.loads(files.pop("generation_config.json"))["eos_token_id"]}
    assert files == {"chat_template.jinja": CHATML} and ends == {"<|endoftext|>", "<|im_end|>"}
    same = open_tokenizer(str(save_bpe(tmp_path / "same", template=CHATML, eos="<|im_end|>")))
    assert list(model_files(chats, same)) == ["chat_template.jinja"], "its own end token is enough"
    mixed = Data(mix=(MixedSource(name="a", paths=("a.txt",)), MixedSource(name="b", source="chat", template="plain")))
    assert model_files(mixed, words)["chat_template.jinja"] == PLAIN
    assert model_files(Data(paths=("a.txt",)), words) == {} and chat_source(Data(paths=("a.txt",))) is None
