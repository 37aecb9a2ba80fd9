from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import write_tokens

from phalanx.data.dataset import Dataset, open_dataset
from phalanx.data.loader import Loader, ReplicaShare
from phalanx.data.pack import Batch
from phalanx.data.samples import Samples
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, MixedSource


def letters(rng: random.Random, count: int) -> tuple[str, ...]:
    return tuple("".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(50, 400))) for _ in range(count))


def stream(samples: Samples) -> list[int]:
    """All windows of the first epoch in the order of the text, end to end."""
    return samples.packing.batch(np.arange(samples.count)).tokens.ravel().tolist()


def the_eval(dataset: Dataset) -> Samples:
    (samples,) = dataset.eval.values()
    return samples


def test_training_and_evaluation_share_no_text() -> None:
    texts = letters(random.Random(0), 50)
    dataset = open_dataset(Data(source="memory", documents=texts, eval_fraction=0.2), 16, seed=1)
    assert list(dataset.eval) == ["memory"]
    total = sum(map(len, texts))
    train, held_out = (dataset.tokenizer.decode(stream(samples)) for samples in (dataset.train.sources[0], the_eval(dataset)))
    assert len(train) + len(held_out) == pytest.approx(total, abs=2 * 17)  # what fills no whole window is left out
    assert len(held_out) == pytest.approx(0.2 * total, abs=17)
    phrases = [{text[i : i + 16] for i in range(len(text) - 15)} for text in (train, held_out)]
    assert not phrases[0] & phrases[1]


def test_held_out_samples_are_independent_of_the_seed_and_optional() -> None:
    data = Data(source="memory", documents=letters(random.Random(1), 50), eval_fraction=0.3)
    dataset = open_dataset(data, 8, seed=1)
    other = open_dataset(data, 8, seed=2)
    first = np.arange(20)
    assert np.array_equal(the_eval(dataset).batch(first).tokens, the_eval(other).batch(first).tokens)
    assert not np.array_equal(dataset.train.batch(first).tokens, other.train.batch(first).tokens)
    assert np.ptp(the_eval(dataset).order(first)) > the_eval(dataset).count // 2  # a few come from all over the held-out text
    assert open_dataset(replace(data, eval_fraction=0.0), 8, seed=1).eval == {}
    assert open_dataset(replace(data, seed=2), 8, seed=1).train.trace(0) == other.train.trace(0)  # the source's own seed


def test_samples_are_independent_of_the_folder_of_the_files(tmp_path: Path) -> None:
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
    expected = opened[0].train.batch(at).tokens
    assert np.array_equal(expected, opened[1].train.batch(at).tokens)
    in_memory = open_dataset(Data(source="memory", documents=texts), 16, seed=5)
    assert np.array_equal(expected, in_memory.train.batch(at).tokens)
    # And whether it is read as text or was made into token files, in one folder or in two.
    ids = [list(text.encode()) for text in texts]
    folders = [write_tokens(tmp_path / "a", [ids[:3], ids[3:11]]), write_tokens(tmp_path / "b", [ids[11:]])]
    as_tokens = open_dataset(Data(paths=tuple(map(str, folders))), 16, seed=5)
    assert np.array_equal(expected, as_tokens.train.batch(at).tokens)
    assert list(as_tokens.eval) == ["tokens"]
    assert as_tokens.fingerprint != open_dataset(Data(paths=(str(folders[0]),)), 16, seed=5).fingerprint


def test_too_short_text_is_reported_with_numbers_and_a_remedy() -> None:
    with pytest.raises(RunError) as caught:
        open_dataset(Data(source="memory", documents=("short",), eval_fraction=0.2), 1024, seed=0)
    train, held_out = caught.value.problems
    assert "training text has 5 tokens, fewer than the 1025 that one window" in train
    assert "use a shorter train.sequence_length or more text. `phalanx data inspect RUN.toml`" in train
    assert "held-out text has 1 tokens" in held_out
    with pytest.raises(RunError) as caught:
        open_dataset(Data(source="memory", documents=("x" * 2000,)), 1024, seed=0)
    (problem,) = caught.value.problems
    assert "held-out text has 20 tokens" in problem
    assert "data.eval_fraction" in problem
    mix = tuple(MixedSource(name=name, source="memory", documents=("x" * n,)) for name, n in (("a", 9000), ("b", 150)))
    with pytest.raises(RunError) as caught:
        open_dataset(Data(mix=mix), 80, seed=0)
    assert ["of data.mix.b has" in problem for problem in caught.value.problems] == [True]
    assert open_dataset(Data(source="memory", documents=("x" * 161,)), 80, seed=0).eval["memory"].count == 1  # more than 0.01
    assert open_dataset(Data(mix=mix, packing="best-fit"), 80, seed=0).padding_ratio > 0  # which can fill up short ones
    assert open_dataset(Data(source="memory", documents=("x" * 79,), eval_fraction=0.0), 79, seed=0).train.count == 1


def mixture(tmp_path: Path, packing: str = "stream") -> Data:
    """Three sources, of which one is token files with a mask and one may be gone through twice only."""
    rng = random.Random(3)
    (tmp_path / "web").mkdir(exist_ok=True)
    for i, text in enumerate(letters(rng, 60)):
        (tmp_path / "web" / f"{i:02}.txt").write_text(text)
    ids = [list(text.encode()) for text in letters(rng, 30)]
    masks = [[[rng.random() < 0.5 for _ in range(len(document) + 1)] for document in part] for part in (ids[:7], ids[7:])]
    write_tokens(tmp_path / "chats", [ids[:7], ids[7:]], masks)
    mix = (
        MixedSource(name="web", paths=(str(tmp_path / "web"),), weight=0.5),
        MixedSource(name="notes", source="memory", documents=letters(rng, 20), weight=0.3, epochs=2.0, seed=5),
        MixedSource(name="chats", paths=(str(tmp_path / "chats"),), weight=0.2),
    )
    return Data(mix=mix, packing=packing, eval_fraction=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_mixture_is_the_same_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path, packing: str) -> None:
    data = mixture(tmp_path, packing)
    dataset = open_dataset(data, 24, seed=7)
    assert list(dataset.eval) == ["web", "notes", "chats"]
    batch, steps = 16, 100
    whole = [dataset.train.batch(np.arange(step * batch, (step + 1) * batch)) for step in range(steps)]
    rng = random.Random(packing)
    for replicas in (1, 2, 4):
        seen: list[list[Batch]] = [[] for _ in range(steps)]
        for replica in range(replicas):
            share = ReplicaShare(batch=batch, replica=replica, replicas=replicas, micro_batch=rng.choice([1, 2, 4]))
            cuts = sorted(rng.sample(range(1, steps), 5))
            for first, last in zip([0, *cuts], [*cuts, steps], strict=True):  # killed and resumed, each time opened anew
                again = open_dataset(data, 24, seed=7)
                with closing(
                    Loader(again.train, share, start=first * batch, prefetch=3, prepare=lambda given: given)
                ) as loader:
                    for step in range(first, last):
                        seen[step] += next(loader)
        for step in range(steps):
            for name in ("tokens", "targets", "positions", "documents", "samples"):
                together = np.concatenate([getattr(part, name) for part in seen[step]])
                assert np.array_equal(together, getattr(whole[step], name))


def test_mixture_keeps_its_weights_until_a_source_ends(tmp_path: Path) -> None:
    dataset = open_dataset(mixture(tmp_path), 24, seed=7)
    notes = dataset.train.sources[1]
    sources = [dataset.train.trace(i).source for i in range(2500)]
    last = max(i for i, name in enumerate(sources) if name == "notes")
    assert last < 2400
    assert Counter(sources)["notes"] == 2 * notes.count
    for name, weight in (("web", 0.5), ("notes", 0.3), ("chats", 0.2)):
        assert sources[:last].count(name) == pytest.approx(weight * last, rel=0.01)
    assert dataset.train.limit is None
    limited = replace(mixture(tmp_path), mix=tuple(replace(source, epochs=1.0) for source in mixture(tmp_path).mix))
    assert open_dataset(limited, 24, seed=7).train.limit == dataset.train.count


def test_fingerprint_of_a_mixture_depends_on_each_source(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    before = open_dataset(data, 24, seed=0).fingerprint
    assert open_dataset(mixture(tmp_path, "best-fit"), 32, seed=1).fingerprint == before  # the same text, cut otherwise
    renamed = (replace(data.mix[0], name="other"), *data.mix[1:])
    assert open_dataset(replace(data, mix=renamed), 24, seed=0).fingerprint != before
    path = tmp_path / "web" / "07.txt"
    path.write_text(path.read_text()[:-1] + "!")
    assert open_dataset(data, 24, seed=0).fingerprint != before


def test_token_files_of_another_tokenizer_are_refused_with_both_names(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "a", [[[1, 2, 3]]], tokenizer="llama/tokenizer.json", tokenizer_sha256="0" * 64)
    mix = (MixedSource(name="wiki", source="tokens", paths=(str(folder), str(tmp_path / "none"), str(tmp_path))),)
    with pytest.raises(RunError) as caught:
        open_dataset(Data(mix=mix), 2, seed=0)
    other, missing, none = caught.value.problems
    assert f'data.mix.wiki.paths: {folder} was tokenized with "llama/tokenizer.json"' in other
    assert 'data.tokenizer = "byte"' in other
    assert 'set data.tokenizer = "llama/tokenizer.json"' in other
    assert f'data.mix.wiki.paths: "{tmp_path}/none" matches no folder' in missing
    assert f"data.mix.wiki.paths: {tmp_path} holds no token files" in none


def test_token_files_may_be_named_by_a_pattern_or_their_meta_file(tmp_path: Path) -> None:
    for name in "ab":
        write_tokens(tmp_path / name, [[[1, 2, 3]] * 10], skipped={"not JSON": 2})
    dataset = open_dataset(Data(source="tokens", paths=(str(tmp_path / "*"),), eval_fraction=0.0), 2, seed=0)
    assert dataset.tokens == 80
    assert dataset.skipped == {"tokens": {"not JSON": 4}}
    assert open_dataset(Data(paths=(str(tmp_path / "a" / "tokens.json"),), eval_fraction=0.0), 2, seed=0).tokens == 40


def test_epochs_of_less_than_a_window_are_refused() -> None:
    data = Data(source="memory", documents=("x" * 100,), epochs=0.01, eval_fraction=0.0)
    with pytest.raises(RunError, match=r"data\.epochs = 0\.01 of 10 windows .* give it at least 0\.1 "):
        open_dataset(data, 10, seed=0)


def test_late_samples_read_no_more_than_early_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = {}
    plain = os.preadv
    for position in (0, 10**9):
        asked: list[int] = []

        def counted(fd: int, buffers: list[memoryview], at: int, asked: list[int] = asked) -> int:
            asked.append(len(buffers[0]))
            return plain(fd, buffers, at)

        monkeypatch.setattr(os, "preadv", counted)
        dataset = open_dataset(mixture(tmp_path), 24, seed=7)
        opened = len(asked)
        dataset.train.batch(np.arange(position, position + 200))
        reads[position] = opened, len(asked) - opened, sum(asked)
    assert reads[0][0] == reads[10**9][0]
    assert reads[10**9][1] < 1.5 * reads[0][1]
    assert reads[10**9][2] < 1.5 * reads[0][2]


def test_stdlib_source_opens_without_reading_and_reads_little_at_any_position(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, preadv = list[int](), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: lengths.append(len(buffers[0])) or preadv(fd, buffers, at))
    dataset = open_dataset(Data(), 256, seed=0)
    assert not lengths
    assert dataset.tokens > 5_000_000
    assert the_eval(dataset).count == pytest.approx(0.01 * dataset.train.count, rel=0.05)
    for position in (0, 10**9, 10**15):
        lengths.clear()
        batch = dataset.train.batch(np.arange(position, position + 64))
        assert sum(lengths) <= 64 * 257
        assert 0 <= batch.tokens.min() <= batch.tokens.max() <= dataset.tokenizer.end
        assert "self" in dataset.tokenizer.decode(batch.tokens)
