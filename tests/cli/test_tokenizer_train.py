"""`phalanx tokenizer train`: a tokenizer that the data room and transformers read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import InProcess, Workshop

from phalanx.data.tokenizer import HfTokenizer, open_tokenizer
from phalanx.spec.load import load

TEXT = [
    "The quick brown fox jumps over the lazy dog.\n" * 20,
    "Der Bär – naïve 語 🜁 says: 42 × 17 = 714!\n" * 20,
    "def add(a, b):\n    return a + b\n" * 20,
]
TURNS = [{"role": "user", "content": "Who jumps?"}, {"role": "assistant", "content": "The fox."}]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXT):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    return tmp_path


def reference(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def test_trained_tokenizer_is_read_by_phalanx_and_transformers(here: InProcess, texts: Path) -> None:
    ended = here(
        "tokenizer", "train", "text", "words", "--vocab", 340, "--special", "<|tool|>", "--chat-template", "chatml", "--json"
    )
    assert ended.code == 0, ended
    size = sum(len(text.encode()) for text in TEXT)
    assert (ended.json["documents"], ended.json["bytes"], ended.json["vocab"]) == (3, size, 340)
    assert ended.json["special"] == ["<|endoftext|>", "<|tool|>", "<|im_start|>", "<|im_end|>"]
    ours, theirs = open_tokenizer("words"), reference(texts / "words")
    assert isinstance(ours, HfTokenizer) and ours.vocab == len(theirs) == 340
    assert ours.marks[ours.end] == theirs.eos_token == "<|endoftext|>"
    for text in [*TEXT, "never seen: Ωмега \x00\t👩‍🚀  "]:
        ids = ours.encode(text).tolist()
        assert ids == theirs(text)["input_ids"] and ours.decode(ids) == theirs.decode(ids) == text
    assert ended.json["bytes_per_token"] == pytest.approx(size / sum(len(ours.encode(text)) for text in TEXT))
    assert ours.encode("<|tool|>").tolist() == [theirs.convert_tokens_to_ids("<|tool|>")]
    marked = theirs.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert (
        theirs.decode(marked["input_ids"])
        == "<|im_start|>user\nWho jumps?<|im_end|>\n<|im_start|>assistant\nThe fox.<|im_end|>\n"
    )
    trained = [token for token, counted in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if counted]
    assert theirs.decode(trained) == "The fox.<|im_end|>"


def test_tokenizer_of_a_run_file_that_names_it(here: InProcess, texts: Path) -> None:
    """The run file may name the tokenizer before it exists. Of conversations, only what people and the model say is read."""
    (texts / "chat.jsonl").write_text(
        "\n".join([json.dumps({"messages": TURNS})] * 5 + [json.dumps({"prompt": "Who?", "response": "Me."})])
    )
    (texts / "run.toml").write_text(
        '[model]\ndim = 32\nlayers = 1\nheads = 2\nvocab = 320\n[train]\nbatch = 2\nsequence_length = 16\nsteps = 1\n[data]\ntokenizer = "words"\n'
        'cache = "cache"\n[data.mix.web]\npaths = ["text"]\n[data.mix.talk]\nsource = "chat"\npaths = ["chat.jsonl"]\n'
    )
    ended = here("tokenizer", "train", "run.toml", "words", "--vocab", 320, "--chat-template", "chatml")
    assert ended.code == 0 and "read 15 documents" in ended.out and 'data.tokenizer = "words"' in ended.out, ended
    preview = here("data", "preview", "run.toml", "--json")
    assert preview.code == 0, preview
    assert load("run.toml").data.tokenizer == "words"


def test_text_is_limited_evenly_and_a_small_vocabulary_is_told(here: InProcess, texts: Path) -> None:
    lines = [json.dumps({"text": f"{word} " * 50}) for word in ("alpha", "beta", "gamma", "delta") for _ in range(25)]
    (texts / "a.jsonl").write_text("\n".join(lines))
    whole = here("tokenizer", "train", "a.jsonl", "whole", "--vocab", 600, "--json").json
    part = here("tokenizer", "train", "a.jsonl", "part", "--vocab", 600, "--max-bytes", whole["bytes"] // 4, "--json").json
    assert part["bytes"] <= whole["bytes"] // 4 and 10 < part["documents"] <= 25
    words = open_tokenizer("part")
    assert all(len(words.encode(f" {word}")) == 1 for word in ("alpha", "beta", "gamma", "delta")), (
        "all of the text is represented"
    )
    told = here("tokenizer", "train", "a.jsonl", "again", "--vocab", 600).out
    assert "fewer than the 600 requested" in told and whole["vocab"] < 600


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("text", "out", "--vocab", "257"), "--vocab 257 is too small"),
        (("out",), "name the text first"),
        (("gone.txt", "out"), '"gone.txt" matches no file'),
        (("text", "full"), "full is not empty"),
        (("text", "text/0.txt"), "is a file"),
        (("text", "text/words"), "is inside text"),
        (("text", "out", "--chat-template", "gone.jinja"), "gone.jinja cannot be read"),
        (("text", "out", "--chat-template", "bad.jinja"), "is no valid Jinja"),
        (("text", "out", "--max-bytes", "many"), "--max-bytes"),
        (("text", "out", "--source", "pictures"), "--source pictures is not known"),
        (("text", "out", "--end-token", " "), "--end-token"),
        (("broken.jsonl", "out", "--max-bad-records", "1"), "broken JSON"),
        (("empty.jsonl", "out"), "no text in empty.jsonl"),
        (("run.toml", "out", "--field", "body"), "--field: run.toml is a run file"),
    ],
)
def test_tokenizer_train_refuses_mistakes(here: InProcess, texts: Path, arguments: tuple[str, ...], complaint: str) -> None:
    (texts / "full").mkdir()
    (texts / "full" / "file").touch()
    (texts / "bad.jinja").write_text("{% if %}")
    (texts / "broken.jsonl").write_text("{\n{\n{\n")
    (texts / "empty.jsonl").write_text('{"text": ""}\n')
    (texts / "run.toml").write_text("")
    ended = here("tokenizer", "train", *arguments)
    assert ended.code == 2 and complaint in ended.err, ended
    assert not (texts / "out").exists(), "nothing is left behind"


@pytest.mark.slow
def test_model_with_a_trained_tokenizer(workshop: Workshop) -> None:
    ended = workshop.run("tokenizer", "train", "tiny.toml", "words", "--vocab", 400)
    assert ended.code == 0, ended
    workshop.train("data.tokenizer=words", "data.cache=cache", "model.vocab=400", "train.steps=4")
    assert workshop.run("generate", "runs/tiny", "the ", "--tokens", 5).code == 0
