"""What a model that was trained on conversations needs to hold one: its template, and how the template ends an answer. Called when a run
starts, which stores both next to its tokenizer, and by `evaluation/conversation`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from phalanx.data.chat import ChatTemplate, Message, template_of
from phalanx.data.record_readers import BadRecord
from phalanx.data.tokenizer import TEMPLATE_FILE, Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, Source
from phalanx.spec.sources import kind

GENERATION_CONFIG = "generation_config.json"
"""The file in which transformers keeps the tokens that end a generated text."""
_QUESTION, _ANSWER, _NEXT = "What is asked?", "This is answered.", "And what then?"


class TurnEnd(NamedTuple):
    """How a template ends an answer."""

    token: int | None
    """A special token; None: it has none, and the end token ends the last answer only."""
    text: str = ""
    """Without such a token: the text behind an answer that another turn follows; empty if it is not known."""


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> TurnEnd:
    """Finds how a template ends an answer by rendering one."""
    turns: list[Message] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        _, found, behind = template.render(turns).text.rpartition(_ANSWER)
        followed = template.render([*turns, {"role": "user", "content": _NEXT}]).text
    except BadRecord:  # it needs more than a plain conversation
        return TurnEnd(None)
    if not found:
        return TurnEnd(None)
    ids = tokenizer.encode_spans(behind)[0].tolist()
    token = next((token for token in ids if token in tokenizer.marks or tokenizer.decode([token]).strip()), None)
    if token in tokenizer.marks:
        return TurnEnd(token)
    between = followed.partition(_ANSWER)[2].partition(_NEXT)[0]
    return TurnEnd(None, (behind if behind.strip() else between).rstrip())


def chat_source(data: Data) -> Source | None:
    """The first source of conversations; None: the run reads none."""
    return next((source for source in data.mix or (data,) if kind(source) == "chat"), None)


def stored_template(folder: Path | None) -> str | None:
    """The template in a run directory's folder of tokenizer files: the one of training, if that read conversations."""
    try:
        return None if folder is None else (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}/{TEMPLATE_FILE} cannot be read ({error}).") from None


def model_files(data: Data, tokenizer: Tokenizer) -> dict[str, str]:
    """Files that belong to a model trained on this data, by name: the template of its conversations and the tokens that end an answer. A
    model that is exported with them answers and stops in transformers as it was trained to."""
    source = chat_source(data)
    if source is None:
        return {}
    name, text = template_of(source, tokenizer)
    ends = {tokenizer.end, turn_end(ChatTemplate(text, name, tokenizer.special), tokenizer).token} - {None}
    files = {TEMPLATE_FILE: text}
    if ends != {tokenizer.end}:
        files[GENERATION_CONFIG] = json.dumps({"eos_token_id": sorted(end for end in ends if end is not None)}) + "\n"
    return files
