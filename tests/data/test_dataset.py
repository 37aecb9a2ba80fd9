from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.dataset import open_dataset
from phalanx.data.pack import Samples
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data


def letters(rng: random.Random, count: int) -> tuple[str, ...]:
    return tuple("".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(50, 400))) for _ in range(count))


def stream(samples: Samples) -> list[int]:
    """All windows of the first epoch in the order of the text, end to end."""
    windows = [samples.windows.window(k).tokens for k in range(samples.count)]
    return np.concatenate(windows).tolist()


def test_training_and_evaluation_share_no_text() -> None:
    texts = letters(random.Random(0), 50)
    dataset = open_dataset(Data(source="memory", documents=texts, eval_fraction=0.2), 16, seed=1)
    assert dataset.eval is not None
    total = sum(map(len, texts))
    train, held_out = (dataset.tokenizer.decode(stream(samples)) for samples in (dataset.train, dataset.eval))
    assert len(train) + len(held_out) == pytest.approx(total, abs=2 * 17)  # what fills no whole window is left out
    assert len(held_out) == pytest.approx(0.2 * total, abs=17)
    phrases = [{text[i : i + 16] for i in range(len(text) - 15)} for text in (train, held_out)]
    assert not phrases[0] & phrases[1]


def test_evaluation_does_not_follow_the_seed_and_may_be_absent() -> None:
    data = Data(source="memory", documents=letters(random.Random(1), 50), eval_fraction=0.3)
    dataset = open_dataset(data, 8, seed=1)
    other = open_dataset(data, 8, seed=2)
    assert dataset.eval is not None and other.eval is not None
    first = np.arange(20)
    assert np.array_equal(dataset.eval.batch(first).tokens, other.eval.batch(first).tokens)
    assert not np.array_equal(dataset.train.batch(first).tokens, other.train.batch(first).tokens)
    assert np.ptp(dataset.eval.order(first)) > dataset.eval.count // 2  # a few samples come from all over the held-out text
    assert open_dataset(Data(source="memory", documents=data.documents, eval_fraction=0.0), 8, seed=1).eval is None


def test_the_same_run_sees_the_same_samples_wherever_its_files_lie(tmp_path: Path) -> None:
    texts = letters(random.Random(2), 20)
    opened = []
    for place in ("one", "two"):
        folder = tmp_path / place
        folder.mkdir()
        for i in random.Random(place).sample(range(20), 20):
            (folder / f"{i:02}.txt").write_text(texts[i])
        opened.append(open_dataset(Data(source="text", paths=(str(folder),)), 16, seed=5))
    assert opened[0].fingerprint == opened[1].fingerprint
    at = np.arange(10**9, 10**9 + 50)
    assert np.array_equal(opened[0].train.batch(at).tokens, opened[1].train.batch(at).tokens)
    assert np.array_equal(
        opened[0].train.batch(at).tokens,
        open_dataset(Data(source="memory", documents=texts), 16, seed=5).train.batch(at).tokens,
    )


def test_everything_too_short_is_told_at_once() -> None:
    with pytest.raises(RunError) as caught:
        open_dataset(Data(source="memory", documents=("short",), eval_fraction=0.2), 1024, seed=0)
    assert ["training" in problem for problem in caught.value.problems] == [True, False]
    with pytest.raises(RunError) as caught:
        open_dataset(Data(source="memory", documents=("x" * 2000,)), 1024, seed=0)
    (problem,) = caught.value.problems
    assert "held-out text has 21 tokens" in problem


def test_the_standard_library_opens_at_once_and_at_any_position() -> None:
    began = time.perf_counter()
    dataset = open_dataset(Data(), 256, seed=0)
    assert time.perf_counter() - began < 1.0  # takes 0.02 s; generous for a busy machine
    assert dataset.tokens > 5_000_000
    assert dataset.eval is not None
    assert dataset.eval.count == pytest.approx(0.01 * dataset.train.count, rel=0.05)
    for position in (0, 10**9, 10**15):
        began = time.perf_counter()
        batch = dataset.train.batch(np.arange(position, position + 64))
        assert time.perf_counter() - began < 0.5
        assert 0 <= batch.tokens.min() <= batch.tokens.max() <= dataset.tokenizer.end
        assert "self" in dataset.tokenizer.decode(batch.tokens)
