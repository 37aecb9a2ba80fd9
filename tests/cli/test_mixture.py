"""A mixture of JSONL, Parquet and token files, packed: the same tokens on any number of ranks, killed and resumed or not."""

from __future__ import annotations

import gzip
import json
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from commands import Workshop

from phalanx.events.records import Step

RUN = """\
[model]
preset = "tiny-dense"
dim = 32
layers = 1

[data]
tokenizer = "words/tokenizer.json"
packing = "best-fit"
cache = "cache"
eval_fraction = 0.05

[data.mix.web]
paths = ["web/*.jsonl*"]
field = "body.text"
weight = 0.5

[data.mix.books]
paths = ["books.parquet"]
field = "content"
weight = 0.3
seed = 7

[data.mix.code]
paths = ["code"]
weight = 0.2

[train]
batch = 8
sequence_length = 64
steps = 200

[optimizer]
learning_rate = 3e-3

[cluster]
device = "cpu"
threads = 1

[checkpoint]
every = 20

[watch]
log_every = 50
"""


def sentences(dice: random.Random, words: list[str], documents: int) -> list[str]:
    return [" ".join(dice.choices(words, k=dice.randint(3, 120))) for _ in range(documents)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of three kinds and a tokenizer of its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("corpus")
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghij", k=dice.randint(2, 8))) for _ in range(400)]
    (folder / "web").mkdir()
    texts = {name: sentences(dice, words, 1500) for name in ("web", "books", "code")}
    lines = [json.dumps({"id": i, "body": {"text": text}}) for i, text in enumerate(texts["web"])]
    (folder / "web" / "a.jsonl").write_text("\n".join(lines[:900]) + "\n{broken\n")
    with gzip.open(folder / "web" / "b.jsonl.gz", "wt") as packed:
        packed.write("\n".join(lines[900:]))
    pq.write_table(pa.table({"content": texts["books"]}), folder / "books.parquet", row_group_size=200)
    (folder / "code.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts["code"]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts["web"], trainer)
    (folder / "words").mkdir()
    tokenizer.save(str(folder / "words" / "tokenizer.json"))
    return folder


@pytest.fixture
def shop(workshop: Workshop, corpus: Path) -> Workshop:
    for name in ("web", "books.parquet", "code.jsonl", "words"):
        (workshop.path / name).symlink_to(corpus / name)
    ended = workshop.run("tokenize", "code.jsonl", "code", "--tokenizer", "words")
    assert ended.code == 0, ended
    (workshop.path / "mixed.toml").write_text(RUN)
    return workshop


def digests(shop: Workshop, run_dir: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in shop.events(run_dir):
        if isinstance(event, Step):
            assert found.setdefault(event.step, event.batch_digest) == event.batch_digest, f"step {event.step} differs"
    return found


def trained(shop: Workshop, run_dir: str, *overrides: str) -> dict[int, str]:
    ended = shop.run("train", "mixed.toml", "--run-dir", run_dir, "--json", *overrides)
    assert ended.code == 0, ended
    return digests(shop, run_dir)


@pytest.mark.slow
def test_mixture_batches_are_independent_of_ranks_and_accumulation(shop: Workshop) -> None:
    short = ("train.steps=12",)
    one = trained(shop, "one", "layout.data=1", "train.micro_batch=8", *short)
    assert sorted(one) == list(range(1, 13))
    assert trained(shop, "two", "layout.data=2", "train.micro_batch=1", *short) == one
    assert trained(shop, "four", "layout.data=4", "train.micro_batch=2", *short) == one
    warned = [event.message for event in shop.events("one") if event.kind == "warned"]
    assert any("1" in message and "JSON" in message for message in warned), warned


def test_data_preview_of_a_mixture_has_the_batches_of_the_run(shop: Workshop) -> None:
    seen = trained(shop, "seen", "train.steps=3", "layout.data=2")
    sources: Counter[str] = Counter()
    for step in (1, 2, 3):
        ended = shop.run("data", "preview", "mixed.toml", "--step", step, "--json")
        assert ended.code == 0, ended
        assert ended.json["batch_digest"] == seen[step]
    from phalanx.data.dataset import open_dataset
    from phalanx.spec.load import load

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shop.path)
        run = load("mixed.toml")
        data = open_dataset(run.data, 64, 0)
        for index in range(1600, 3200):
            sources[data.train.trace(index).source] += 1
    assert {name: count / 1600 for name, count in sources.items()} == pytest.approx(
        {"web": 0.5, "books": 0.3, "code": 0.2}, abs=0.01
    )


@pytest.mark.slow
def test_mixture_batches_survive_five_kills_on_changing_ranks(shop: Workshop) -> None:
    whole = trained(shop, "whole", "layout.data=1", "train.micro_batch=4")
    assert sorted(whole) == list(range(1, 201))
    dice = random.Random(1)
    for kill in range(5):
        ranks = dice.choice([1, 2, 4])
        command = shop.start(
            "train", "mixed.toml", "--run-dir", "killed", f"layout.data={ranks}", f"train.micro_batch={8 // ranks // 2}"
        )
        command.until(shop.reached("killed", 25 * (kill + 1) + dice.randint(0, 20)), f"kill {kill}")
        command.process.send_signal(signal.SIGKILL)
        command.wait()
        assert shop.gone()
    assert trained(shop, "killed", "layout.data=4") == whole
    assert trained(shop, "two", "layout.data=2", "train.micro_batch=1") == whole
    assert trained(shop, "four", "layout.data=4", "train.micro_batch=2") == whole
