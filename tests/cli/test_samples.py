"""`train.sample_every` on the command line: samples on the screen and among the events, and mistakes refused before the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import QWEN_BASE
from commands import RUN, InProcess, Workshop, losses
from small_tokenizers import save_family

from phalanx.data.chat_turns import sample_prompts
from phalanx.data.tokenizer import open_tokenizer
from phalanx.events.records import Sampled
from phalanx.spec.load import loads

SAMPLES = ("train.sample_every=4", 'train.sample_prompts=["the "]', "train.sample_tokens=6")


@pytest.mark.slow
def test_samples_are_shown_and_recorded_on_sharded_layouts(workshop: Workshop) -> None:
    layout = ("layout.data=1", "layout.shard=2")
    plain = workshop.train(*layout, "--run-dir", "plain")
    sampled = workshop.train(*layout, *SAMPLES, "--run-dir", "sampled")
    events = workshop.events("sampled")
    samples = [event for event in events if isinstance(event, Sampled)]
    assert [(one.step, one.prompt) for one in samples] == [(4, "the "), (8, "the ")]
    assert "sample of" in sampled.shown and "sample of" not in plain.shown
    assert losses(events) == losses(workshop.events("plain")), "bit for bit"


CHAT = RUN.replace('source = "text"', 'source = "chat"').replace('paths = ["text"]', 'paths = ["a.jsonl"]\ntokenizer = "words"')


@pytest.mark.parametrize(
    ("run", "overrides", "complaint"),
    [
        (RUN, ('train.sample_prompts=["a"]',), "set train.sample_every"),
        (RUN, ("train.sample_every=0",), "train.sample_every"),
        (RUN, ("train.sample_every=2", f'train.sample_prompts=["{"x" * 40}"]'), "leaves no room in train.sequence_length = 32"),
        (CHAT, ("train.sample_every=2",), "no message to answer"),
    ],
)
def test_samples_that_cannot_be_made_are_refused_before_the_start(
    here: InProcess, tmp_path: Path, run: str, overrides: tuple[str, ...], complaint: str
) -> None:
    save_family(tmp_path / "words", QWEN_BASE)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text to read " * 200)
    (tmp_path / "run.toml").write_text(run)
    ended = here("train", "run.toml", *overrides)
    assert ended.code == 2 and complaint in ended.err and not (tmp_path / "runs").exists(), ended


def test_prompts_of_a_run_on_conversations_are_questions(tmp_path: Path) -> None:
    words = open_tokenizer(str(save_family(tmp_path / "words", QWEN_BASE)))
    run = loads(CHAT, overrides=[f"data.tokenizer={json.dumps(str(tmp_path / 'words'))}", "train.sequence_length=128",
                                 "train.sample_every=1", 'train.sample_prompts=["Who?"]'])  # fmt: skip
    (prompt,) = sample_prompts(run, words)
    shown = "".join(words.marks.get(token) or words.decode([token]) for token in prompt.ids)
    assert shown.endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert {words.marks[token] for token in prompt.ends} == {"<|endoftext|>", "<|im_end|>"}
