"""Inspecting a corpus: every number against a plain count over the same documents."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_token_files
from small_tokenizers import CHATML, save_bpe
from tokenizers import Tokenizer

from phalanx.data import inspect as module
from phalanx.data.corpus import MemoryCorpus, TextFileCorpus
from phalanx.data.dataset import open_corpus
from phalanx.data.inspect import DocumentExcerpt, InspectOptions, Lengths, inspect, padding
from phalanx.data.pack import BestFitPacking
from phalanx.data.token_files import TokenFiles
from phalanx.data.tokenizer import ByteTokenizer, open_tokenizer
from phalanx.spec.run import Data

WORDS = ByteTokenizer()


def texts(count: int = 300, seed: int = 0) -> list[str]:
    dice = np.random.default_rng(seed)
    return ["".join(chr(97 + int(c)) for c in dice.integers(26, size=int(n))) for n in dice.integers(1, 90, size=count)]


def expected_lengths(lengths: list[int]) -> dict[str, float]:
    ordered = sorted(lengths)

    def at(part: float) -> int:
        return ordered[max(0, -(-int(part * 100) * len(ordered) // 100) - 1)]

    return {
        "min": ordered[0],
        "median": at(0.5),
        "mean": pytest.approx(statistics.mean(ordered)),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": ordered[-1],
    }


def test_inspect_counts_documents_and_lengths() -> None:
    documents = texts()
    found = inspect(MemoryCorpus(documents), WORDS, InspectOptions())
    lengths = [len(text) for text in documents]
    assert (found.documents, found.tokens, found.bytes) == (300, sum(lengths) + 300, sum(lengths))
    assert not found.bytes_estimated and found.masked_tokens is None and found.padding is None
    assert found.lengths == expected_lengths(lengths)
    assert sum(times for _, _, times in found.histogram) == 300
    for low, high, times in found.histogram:
        assert times == sum(low <= length <= high for length in lengths)


@pytest.mark.parametrize("portion", [50, 1000])
def test_inspect_is_independent_of_the_portion_size(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """Portions smaller than a document, of a few, and of all."""
    documents = [*texts(50), *texts(20), "x" * 700, "y" * 700]
    whole = inspect(MemoryCorpus(documents), WORDS, InspectOptions())
    monkeypatch.setattr(module, "_PORTION", portion)
    portions: list[int] = []
    assert inspect(MemoryCorpus(documents), WORDS, InspectOptions(), portions.append) == whole
    assert len(portions) > 1 and sum(portions) == whole.tokens


def test_lengths_of_several_portions_with_a_very_long_document() -> None:
    portions = [[len(text) for text in texts(seed=seed)] for seed in (0, 1)] + [[1 << 40]]
    lengths = Lengths()
    for portion in portions:
        lengths.add(np.array(portion))
    assert lengths.table() == expected_lengths([length for portion in portions for length in portion])
    assert lengths.histogram()[-1] == (1 << 40, (1 << 41) - 1, 1)


def test_inspect_counts_duplicates() -> None:
    documents = ["aa", "b", "aa", "c", "b", "b", "ab", "a", "a" * 50, "a" * 51]
    found = inspect(MemoryCorpus(documents), WORDS, InspectOptions())
    extra = sum(times - 1 for times in Counter(documents).values())
    assert (found.duplicates, found.duplicates_of) == (extra, len(documents))
    assert found.duplicate_share == extra / len(documents)


def test_inspect_counts_duplicate_files_in_any_portions(tmp_path: Path) -> None:
    for number, text in enumerate(["same", "other", "same"]):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = TextFileCorpus({str(path): path.stat().st_size for path in tmp_path.iterdir()})
    assert inspect(corpus, WORDS, InspectOptions()).duplicates == 1


def test_inspect_estimates_duplicates_of_a_large_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [f"text {i % 3000}" for i in range(4000)]
    monkeypatch.setattr(module, "_MAX_DOCUMENTS", 1000)
    found = inspect(MemoryCorpus(documents), WORDS, InspectOptions())
    assert 600 < found.duplicates_of < 1400
    assert found.duplicate_share == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("length", [8, 33, 100])
def test_inspected_padding_equals_best_fit_packing(tmp_path: Path, length: int) -> None:
    corpus = MemoryCorpus(texts())
    packed = BestFitPacking(corpus, np.array([[0, corpus.tokens]]), length, end=WORDS.end, document_mask=True, cache=tmp_path)
    assert padding(corpus, length) == pytest.approx(packed.padding_ratio)
    assert inspect(corpus, WORDS, InspectOptions(sequence_length=length)).padding == pytest.approx(packed.padding_ratio)


def test_inspect_draws_documents_by_the_seed() -> None:
    documents = texts()
    corpus = MemoryCorpus(documents)

    def shown(**values: Any) -> list[dict[str, Any]]:
        return inspect(corpus, WORDS, InspectOptions(**values)).sample

    assert shown() == shown() and shown(seed=1) != shown(seed=2)
    assert len(shown(samples=5)) == 5 and shown(samples=0) == []
    for sample in shown(samples=5, characters=7):
        text = documents[sample.document]
        assert (sample.text, sample.tokens) == (text[:7], len(text))
    assert len(shown(samples=1000)) == 300


def test_inspect_token_files_with_masks_and_without_a_tokenizer(tmp_path: Path) -> None:
    write_token_files(tmp_path, WORDS, [[1, 2, 3], [4, 5]], [[False, True, True], [False, False]])
    found = inspect(TokenFiles(tmp_path), None, InspectOptions())
    assert found.masked_tokens == 1 + 3  # a document's end is trained on if its last token is
    assert found.bytes is None
    assert found.sample[0] == DocumentExcerpt(document=0, tokens=3, text=None, ids=[1, 2, 3, 256])


@pytest.mark.parametrize("ends_turns", ["<|im_end|>", "<|endoftext|>"])
def test_inspect_counts_every_token_of_a_conversation(tmp_path: Path, ends_turns: str) -> None:
    """A conversation ends as its template ends it, here with a new line: no end token is behind it."""
    template = CHATML.replace("<|im_end|>", ends_turns)
    name = str(save_bpe(tmp_path / "words", template=template))
    talks = [[("user", "What is asked?"), ("assistant", "This is answered." * times)] for times in (1, 2, 7)]
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = Data(source="chat", paths=(str(tmp_path / "chat.jsonl"),), tokenizer=name, cache=str(tmp_path / "cache"))
    words = open_tokenizer(name)
    corpus, _ = open_corpus(data, data, words, None)
    found = inspect(corpus, words, InspectOptions())
    library = Tokenizer.from_file(str(tmp_path / "words" / "tokenizer.json"))
    texts = ["".join(f"<|im_start|>{role}\n{text}{ends_turns}\n" for role, text in talk) for talk in talks]
    lengths = [len(library.encode(text).ids) for text in texts]
    assert found.lengths == expected_lengths(lengths) and found.tokens == sum(lengths)
    assert [sample.tokens for sample in found.sample] == lengths
    assert inspect(corpus, None, InspectOptions()).lengths == found.lengths


def test_inspect_does_not_count_the_end_token_behind_a_conversation(tmp_path: Path) -> None:
    """The plain template ends an answer with no token of its own; a conversation that ends with a question has no end token at all."""
    question, answer = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}
    records = [{"messages": messages} for messages in ([question, answer], [question, answer, question])]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = Data(source="chat", paths=(str(tmp_path / "chat.jsonl"),), template="plain", cache=str(tmp_path / "cache"))
    corpus, _ = open_corpus(data, data, WORDS, None)
    found = inspect(corpus, WORDS, InspectOptions())
    texts = ["User: ask\n\nAssistant: say\n\n", "User: ask\n\nAssistant: say\n\nUser: ask\n\n"]
    assert [sample.text for sample in found.sample] == texts
    assert [sample.tokens for sample in found.sample] == [len(text) for text in texts]
    assert (found.bytes, found.tokens) == (sum(map(len, texts)), sum(map(len, texts)) + 1)


def test_inspect_an_empty_corpus() -> None:
    found = inspect(MemoryCorpus([]), WORDS, InspectOptions(sequence_length=8))
    assert (found.documents, found.tokens, found.lengths, found.histogram, found.sample) == (0, 0, {}, [], [])
    assert found.duplicate_share == 0.0 and found.padding == 0.0
