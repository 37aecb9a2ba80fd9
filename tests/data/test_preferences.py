"""Preferences: records become pairs of texts as TRL makes them, bad ones are counted by reason, and windows hold whole pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.data.chat import PLAIN, ChatTemplate
from phalanx.data.corpus import MemoryCorpus
from phalanx.data.dataset import open_dataset
from phalanx.data.pack import IGNORED
from phalanx.data.preferences import TOO_LONG, PairPacking, PreferenceRenderer
from phalanx.data.record_readers import BadRecord
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Data, Source

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
USER, GOOD, BAD = (
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "assistant", "content": "No"},
)


def renderer(jinja: str | None = CHATML, **source: Any) -> PreferenceRenderer:
    return PreferenceRenderer(None if jinja is None else ChatTemplate(jinja, "a template", {}), Source(**source))


def parts(record: dict[str, Any], made: PreferenceRenderer) -> list[tuple[str, str]]:
    """Prompt and answer of both texts."""
    return [(text.text[: text.answers[0][0]], text.text[slice(*text.answers[0])]) for text in made.render(record)]


def test_texts_follow_their_prompt() -> None:
    record = {"prompt": "Why? ", "chosen": "So.", "rejected": "No"}
    assert parts(record, renderer()) == [("Why? ", "So."), ("Why? ", "No")]
    assert parts({"chosen": "So.", "rejected": "No"}, renderer(None)) == [("", "So."), ("", "No")]
    named = renderer(PLAIN, template="plain")  # a template that the run file names makes turns of them
    assert parts(record, named)[0] == ("User: Why?\n\nAssistant:", " So.\n\n")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["messages", "a text and messages", "whole conversations"],
)
def test_messages_go_through_the_template(record: dict[str, Any]) -> None:
    prompt = "<|user|>Why?<|end|><|assistant|>"
    assert parts(record, renderer()) == [(prompt, "So.<|end|>"), (prompt, "No<|end|>")]


def test_only_the_turns_that_differ_are_answers() -> None:
    more = [USER, {"role": "assistant", "content": "Hm."}, USER]
    (prompt, answer), _ = parts({"chosen": [*more, GOOD], "rejected": [*more, BAD]}, renderer())
    assert prompt.count("<|assistant|>") == 2 and answer == "So.<|end|>"


def test_other_fields() -> None:
    made = renderer(None, prompt_field="question", chosen_field="better", rejected_field="worse")
    assert parts({"question": "Q", "better": "a", "worse": "b"}, made) == [("Q", "a"), ("Q", "b")]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "field missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "no answer"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": "b"}, "bad messages"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "bad messages"),
        ({"prompt": [USER], "chosen": [{"content": "no role"}], "rejected": [BAD]}, "bad messages"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no answer"),
        ({"prompt": "a", "chosen": "b\ud800", "rejected": "c"}, "not UTF-8"),
    ],
)
def test_bad_records(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as bad:
        renderer().render(record)
    assert bad.value.reason == reason


def test_messages_need_a_template() -> None:
    with pytest.raises(BadRecord, match="no chat template"):
        renderer(None).render({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]})


def packed(texts: list[str], length: int) -> PairPacking:
    corpus = MemoryCorpus(tuple(texts))
    return PairPacking(corpus, np.array([[0, corpus.tokens]]), length, end=256)


def test_windows_hold_whole_pairs() -> None:
    texts = ["aaaa", "bb", "cccccc", "d" * 30, "ee", "fff", "g", "hh"]  # the second pair needs 36 positions
    packing = packed(texts, 12)
    assert packing.too_long == 1
    seen = []
    batch = packing.batch(np.arange(packing.count))
    for row in range(packing.count):
        documents = int(batch.documents[row].max()) + 1
        full = documents if (batch.targets[row][batch.documents[row] == documents - 1] >= 0).any() else documents - 1
        assert full % 2 == 0
        for number in range(full):
            own = batch.documents[row] == number
            assert batch.targets[row][own].tolist() == [*batch.tokens[row][own][1:].tolist(), 256]
            assert batch.positions[row][own].tolist() == list(range(own.sum()))
            seen.append(bytes(batch.tokens[row][own].tolist()).decode())
        assert (batch.targets[row][batch.documents[row] >= full] == IGNORED).all()
    pairs = sorted(zip(seen[::2], seen[1::2], strict=True))
    assert pairs == [("aaaa", "bb"), ("ee", "fff"), ("g", "hh")]


def test_answers_of_a_pair_are_held_out_together() -> None:
    texts = tuple(f"{'c' * (5 + number % 7)}{number}" if number % 2 == 0 else f"r{number}" for number in range(400))
    data = open_dataset(Data(source="preferences", documents=texts, eval_fraction=0.25), 32, 0)
    counts = []
    for samples in (data.train.sources[0], data.eval["preferences"]):
        batch = samples.packing.batch(np.arange(samples.count))
        counts.append(
            sum(len(set(row[mask >= 0].tolist())) for row, mask in zip(batch.documents, batch.targets, strict=True)) // 2
        )
    assert sum(counts) >= 199 and counts[1] == pytest.approx(50, abs=3)  # the held-out part may cut one pair


def test_a_file_of_preferences(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Why? ", "chosen": "So.", "rejected": "No"},
        {"prompt": "x"},
        {"prompt": "y", "chosen": "z" * 99, "rejected": "w"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings: dict[str, Any] = {
        "source": "preferences",
        "paths": (str(tmp_path / "pairs.jsonl"),),
        "cache": str(tmp_path / "cache"),
    }
    data = open_dataset(Data(**settings, eval_fraction=0.0), 32, 0)
    assert data.skipped == {"preferences": {"field missing": 1, TOO_LONG: 1}}
    batch = data.train.batch(np.array([0]))
    answers = [bytes(t for t in batch.targets[0][batch.documents[0] == number].tolist() if 0 <= t < 256) for number in (0, 1)]
    assert answers == [b"So.", b"No"]
    with pytest.raises(RunError, match="no pair of at most 8 tokens"):
        open_dataset(Data(**settings, eval_fraction=0.0), 8, 0)


RUN = """\
[model]
preset = "tiny-dense"
[data]
source = "preferences"
paths = ["pairs.jsonl"]
[train]
objective = "dpo"
batch = 2
sequence_length = 32
steps = 2
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('train.objective="next-token"', 'set train.objective = "dpo"'),
        ('data.source="chat"', 'set data.source = "preferences"'),
        ("data.document_mask=false", "lets them see each other"),
        ("memory.loss_chunk=64", "needs those of each answer"),
        ("model.mtp_depth=1", "set model.mtp_depth = 0"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing = 0.5"),
        ("dpo.beta=0", "dpo.beta = 0"),
    ],
)
def test_what_does_not_fit_is_refused(change: str, said: str) -> None:
    loads(RUN)
    with pytest.raises(RunError) as refused:
        loads(RUN, overrides=[change])
    assert said in str(refused.value)


def test_settings_of_dpo_need_the_objective() -> None:
    text = RUN.replace('source = "preferences"\npaths = ["pairs.jsonl"]\n', "").replace('objective = "dpo"\n', "")
    with pytest.raises(RunError, match=r"\[dpo\] has no effect"):
        loads(text, overrides=["dpo.beta=0.5"])
