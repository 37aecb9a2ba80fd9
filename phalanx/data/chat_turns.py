"""What a model that was trained on conversations needs to hold one: its template, and how the template ends an answer. Called when a run
starts, which stores both next to its tokenizer, and by `evaluation/conversation`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from phalanx.data.chat import ChatTemplate, Message, template_of
from phalanx.data.record_readers import BadRecord
from phalanx.data.tokenizer import TEMPLATE_FILE, Tokenizer
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.run import Data, Run, Source
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


class SamplePrompt(NamedTuple):
    """A prompt of train.sample_prompts."""

    text: str
    ids: list[int]
    ends: frozenset[int]
    """Tokens that end its sample."""


def sample_prompts(run: Run, tokenizer: Tokenizer) -> list[SamplePrompt]:
    """The prompts of a run's samples; those of a run on conversations go through its template. Raises RunError if one cannot be used."""
    source, train = chat_source(run.data), run.train
    template, end = None, None
    if source is not None:
        name, text = template_of(source, tokenizer)
        template = ChatTemplate(text, name, tokenizer.special)
        end = turn_end(template, tokenizer).token
    prompts, problems = list[SamplePrompt](), list[str]()
    for text in train.sample_prompts or ("",):
        if template is None:
            ids = tokenizer.encode(text).tolist() or [tokenizer.end]  # the end of a document begins the next
        else:
            try:
                ids = tokenizer.encode(
                    template.render([{"role": "user", "content": text}], prompt=True).text, special=False
                ).tolist()
            except BadRecord as bad:
                problems.append(f"train.sample_prompts: the template refuses {text!r}: {bad.detail}")
                continue
        if len(ids) >= train.sequence_length:
            problems.append(
                f"train.sample_prompts: {text[:40]!r} has {len(ids)} tokens, which leaves no room in train.sequence_length = "
                f"{train.sequence_length}; shorten it."
            )
        ends = frozenset(token for token in (tokenizer.end, end) if token is not None)
        prompts.append(SamplePrompt(text, ids, ends))
    refuse(problems)
    return prompts


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
