from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import CHATML, MARKED, save_bpe, save_unigram

from phalanx.data.chat import (
    MESSAGES,
    NO_ANSWER,
    PLAIN,
    REFUSED,
    UNCLEAR,
    ChatRenderer,
    ChatTemplate,
    Rendered,
    encode,
    template_of,
)
from phalanx.data.record_readers import MISSING, NOT_UTF8, BadRecord
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is asked?"},
    {"role": "assistant", "content": "This is answered."},
    {"role": "user", "content": "naïve – 語?"},
    {"role": "assistant", "content": "déjà vu 🜁!"},
]
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The way Qwen3's writes earlier answers: without the thinking that the last one has."""


def chat(template: str, **special: str) -> ChatRenderer:
    return ChatRenderer(ChatTemplate(template, "The template", special), "messages", "prompt", "response")


def answers(rendered: Rendered) -> list[str]:
    return [rendered.text[a:b] for a, b in rendered.answers]


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("save", [save_bpe, save_unigram])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_chat_ids_equal_those_of_transformers(save: Callable[..., Path], template: str, tmp_path: Path) -> None:
    theirs = reference(save(tmp_path, template=template))
    words = open_tokenizer(str(tmp_path))
    assert words.chat_template is not None
    rendered = chat(words.chat_template).render({"messages": TURNS})
    assert isinstance(rendered, Rendered)
    assert rendered.text == theirs.apply_chat_template(TURNS, tokenize=False)
    ids, mask = encode(rendered, words)
    expected = theirs.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert ids.tolist() == expected
    assert len(mask) == len(ids)


@pytest.mark.parametrize("save", [save_bpe, save_unigram])
def test_marked_answers_equal_those_of_transformers(save: Callable[..., Path], tmp_path: Path) -> None:
    theirs = reference(save(tmp_path, template=MARKED))
    words = open_tokenizer(str(tmp_path))
    rendered = chat(MARKED).render({"messages": TURNS})
    assert isinstance(rendered, Rendered)
    ids, mask = encode(rendered, words)
    expected = theirs.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert ids.tolist() == expected["input_ids"]
    assert mask.astype(int).tolist() == expected["assistant_masks"]
    assert 0 < mask.sum() < len(mask)


def test_unmarked_answer_is_the_text_after_the_prompt(tmp_path: Path) -> None:
    rendered = chat(CHATML).render({"messages": TURNS})
    assert answers(rendered) == ["This is answered.<|im_end|>\n", "déjà vu 🜁!<|im_end|>\n"]
    words = open_tokenizer(str(save_bpe(tmp_path)))
    assert isinstance(rendered, Rendered)
    ids, mask = encode(rendered, words)
    assert words.decode(ids[mask]) == "This is answered.\ndéjà vu 🜁!\n"
    assert words.decode(ids[~mask]) == "system\nBe brief.\nuser\nWhat is asked?\nassistant\nuser\nnaïve – 語?\nassistant\n"


def test_template_that_renders_earlier_answers_differently(tmp_path: Path) -> None:
    rendered = chat(QWEN3).render({"messages": TURNS})
    assert answers(rendered) == ["This is answered.<|im_end|>\n", "<think>\n\n</think>\n\ndéjà vu 🜁!<|im_end|>\n"]


def test_plain_chat_template() -> None:
    rendered = chat(PLAIN).render({"prompt": "What? ", "response": "That.", "system": "Be brief."})
    assert isinstance(rendered, Rendered)
    assert rendered.text == "System: Be brief.\n\nUser: What?\n\nAssistant: That.\n\n"
    assert answers(rendered) == [" That.\n\n"]
    ids, mask = encode(rendered, open_tokenizer("byte"))
    assert bytes(ids[mask].astype(np.uint8)) == b" That.\n\n"


def test_content_parts_and_extra_keys_reach_the_chat_template() -> None:
    parts = [{"type": "text", "text": "This is "}, {"type": "text", "text": "answered."}]
    turns = [{"role": "user", "content": "Who?", "name": "me"}, {"role": "assistant", "content": parts}]
    template = CHATML.replace("message.role + ", "message.role + (message.name or '') + ")
    rendered = chat(template).render({"messages": turns})
    assert answers(rendered) == ["This is answered.<|im_end|>\n"]
    assert isinstance(rendered, Rendered) and rendered.text.startswith("<|im_start|>userme\nWho?")


def test_chat_templates_have_the_helpers_of_transformers() -> None:
    template = (
        "{{ bos_token }}{{ {'ä': '<'} | tojson }}{{ strftime_now('%d %b %Y') }}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content + eos_token }}{% endfor %}"
    )
    rendered = chat(template, bos_token="<s>", eos_token="</s>").render({"messages": TURNS[:3]})
    assert isinstance(rendered, Rendered)
    assert rendered.text == '<s>{"ä": "<"}26 Jul 2024What is asked?</s>This is answered.</s>'
    assert answers(rendered) == ["This is answered.</s>"]


BAD_RECORDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no fields": ({"text": "a"}, MISSING, 'neither "messages" nor "prompt" and "response"; its fields are: text'),
    "messages no list": ({"messages": "hi"}, MESSAGES, "not a list"),
    "no messages": ({"messages": []}, MESSAGES, "not a list"),
    "message no object": ({"messages": ["hi"]}, MESSAGES, "message 0"),
    "no role": ({"messages": [{"content": "hi"}]}, MESSAGES, "message 0"),
    "content a number": ({"messages": [{"role": "user", "content": 3}]}, MESSAGES, "content of message 0"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, MESSAGES, "content of message 0"),
    "only questions": ({"messages": TURNS[:2]}, NO_ANSWER, "assistant"),
    "empty answer": ({"prompt": "a", "response": ""}, NO_ANSWER, "assistant"),
    "answer null": ({"prompt": "a", "response": None}, MESSAGES, "content of message 1"),
    "half a character": ({"prompt": "a", "response": "\ud83d"}, NOT_UTF8, "unpaired surrogate"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_bad_chat_records_have_a_reason(name: str) -> None:
    record, reason, detail = BAD_RECORDS[name]
    with pytest.raises(BadRecord) as bad:
        chat(CHATML).render(record)
    assert bad.value.reason == reason and detail in bad.value.detail


def test_refused_conversation_quotes_the_template() -> None:
    template = CHATML.replace(
        "{{ '<|im_start|>' + message",
        "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{{ '<|im_start|>' + message",
        1,
    )
    with pytest.raises(BadRecord) as bad:
        chat(template).render({"messages": [{"role": "tool", "content": "x"}, *TURNS]})
    assert (bad.value.reason, bad.value.detail) == (REFUSED, "no tools here")
    assert isinstance(chat(template).render({"messages": TURNS}), Rendered)


def test_answer_that_the_template_hides_or_moves_is_skipped() -> None:
    hides = CHATML.replace("message.content", "(message.content if message.content != 'hidden' else '')")
    with pytest.raises(BadRecord) as bad:
        chat(hides).render({"prompt": "a", "response": "hidden"})
    assert bad.value.reason == UNCLEAR
    moves = "{{ messages | length }}" + CHATML
    with pytest.raises(BadRecord) as bad:
        chat(moves).render({"messages": TURNS})
    assert bad.value.reason == UNCLEAR and "generation tag" in bad.value.detail


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not render what the assistant says"),
        ("{% for m in messages %}\n{% if %}{% endfor %}", "line 2, is no valid Jinja"),
        ("{% generation %}{% endgeneration %}" + CHATML, "not around what the assistant says"),
        ("{% generation %}" + CHATML, "is no valid Jinja"),
    ],
)
def test_template_that_shows_no_answer_is_refused_at_once(template: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        chat(template)


def test_chat_templates_are_sandboxed() -> None:
    escape = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(BadRecord) as bad:
        chat(escape).render({"messages": TURNS})
    assert bad.value.reason == REFUSED


def test_origin_of_the_chat_template(tmp_path: Path) -> None:
    words: Tokenizer = open_tokenizer("byte")
    with pytest.raises(RunError, match=r'data.tokenizer = "byte" has no chat template; set data.template'):
        template_of(Source(source="chat"), words)
    assert template_of(Source(template="plain"), words)[1] == PLAIN
    (tmp_path / "own.jinja").write_text(CHATML)
    assert template_of(Source(template=str(tmp_path / "own.jinja")), words)[1] == CHATML
    with pytest.raises(RunError, match=r"gone\.jinja.*No such file"):
        template_of(Source(template=str(tmp_path / "gone.jinja")), words)
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match=r"binary\.jinja"):
        template_of(Source(template=str(tmp_path / "binary.jinja")), words)
    assert json.dumps(template_of(Source(), open_tokenizer(str(save_bpe(tmp_path, template=MARKED))))[1]) == json.dumps(MARKED)
