"""Conversations as documents: ids and masks equal those of transformers' `apply_chat_template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CONVERSATIONS, FAMILIES, SMOL, ZEPHYR_MARKED, supports
from small_tokenizers import save_family

from phalanx.data.chat import ChatRenderer, ChatTemplate, encode_document
from phalanx.data.dataset import open_corpus
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.spec.run import Data

CASES = [(family, about) for family in FAMILIES for about in CONVERSATIONS if supports(family, about)]
MARKED = {"smol": SMOL, "zephyr-marked": ZEPHYR_MARKED}


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def document(words: Tokenizer, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    assert words.chat_template is not None
    renderer = ChatRenderer(ChatTemplate(words.chat_template, "The template", words.special), "messages", "prompt", "response")
    ids, mask = encode_document(renderer.render(record), words)
    return ids.tolist(), mask.astype(int).tolist()


@pytest.mark.parametrize(("family", "about"), CASES)
def test_document_ids_equal_those_of_transformers(family: str, about: str, tmp_path: Path) -> None:
    theirs, record = reference(save_family(tmp_path, FAMILIES[family])), CONVERSATIONS[about]
    ids, mask = document(open_tokenizer(str(tmp_path)), record)
    assert ids == theirs.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=True)["input_ids"]
    assert len(mask) == len(ids)
    answers = theirs.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    for message in record["messages"]:
        content = message.get("content")
        assert content is None or (content.strip() in answers) == (message["role"] == "assistant")


@pytest.mark.parametrize("about", [about for about in CONVERSATIONS if about != "tools"])
@pytest.mark.parametrize("family", MARKED)
def test_document_masks_equal_the_assistant_masks_of_transformers(family: str, about: str, tmp_path: Path) -> None:
    theirs, record = reference(save_family(tmp_path, MARKED[family])), CONVERSATIONS[about]
    expected = theirs.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = document(open_tokenizer(str(tmp_path)), record)
    assert ids == expected["input_ids"]
    assert mask == expected["assistant_masks"] and 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("family", ["qwen", "qwen-base", "llama3", "mistral"])
def test_end_of_an_answer_is_trained_on_once(family: str, tmp_path: Path) -> None:
    known = FAMILIES[family]
    words = open_tokenizer(str(save_family(tmp_path, known)))
    end = next(token for token, text in words.marks.items() if text == (known.end_of_turn or known.eos))
    ids, mask = document(words, CONVERSATIONS["turns"])
    trained = [token for token, counted in zip(ids, mask, strict=True) if counted]
    assert trained.count(end) == 2, "one for each answer"
    assert known.end_of_turn is None or words.end not in ids


def test_token_files_of_conversations_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: JSON Lines, tokenizer processes, token files; documents without an added end token keep their bounds."""
    folder = save_family(tmp_path / "words", FAMILIES["qwen-base"])
    theirs = reference(folder)
    records = [record for record in CONVERSATIONS.values() if record["messages"][-1]["role"] == "assistant"]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = Data(source="chat", paths=(str(tmp_path / "chat.jsonl"),), tokenizer=str(folder), cache=str(tmp_path / "cache"))
    corpus, _ = open_corpus(data, data, open_tokenizer(str(folder)), None)
    bounds = corpus.bounds(0, len(records)).tolist()
    for number, record in enumerate(records):
        ids = np.asarray(corpus.read(bounds[number], bounds[number + 1])).tolist()
        tools = record.get("tools")
        assert ids == theirs.apply_chat_template(record["messages"], tools=tools, return_dict=True)["input_ids"]
