from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from corpora import END, Masked, one_window, some_documents

from phalanx.data.corpus import Corpus, MemoryCorpus
from phalanx.data.pack import IGNORED, Intervals, StreamPacking
from phalanx.data.samples import Samples, split


def windows_of(*texts: str, length: int, document_mask: bool = True) -> StreamPacking:
    corpus = MemoryCorpus(texts)
    return StreamPacking(corpus, split(corpus.blocks, 0.0, 0)[0], length, document_mask=document_mask)


def reference(corpus: Masked, intervals: Intervals, length: int, document_mask: bool) -> list[tuple[list[int], ...]]:
    """Every window, from the whole stream written out as a list of (token, what it belongs to, whether it is a target)."""
    stream = []
    for interval, (start, stop) in enumerate(intervals.tolist()):
        for i in range(start, stop):
            document = sum(int(begin) <= i for begin in corpus._begins)
            stream.append((int(corpus.ids[i]), (interval, document), corpus.trained is None or bool(corpus.trained[i])))
    windows = []
    for begin in range(0, len(stream) - length, length):
        cut = stream[begin : begin + length + 1]
        targets = [b if d == c and trained else IGNORED for (_, c, _), (b, d, trained) in pairwise(cut)]
        positions, ids = [0], [0]
        for (_, before, _), (_, now, _) in pairwise(cut[:length]):
            new = document_mask and before != now
            positions.append(0 if new else positions[-1] + 1)
            ids.append(ids[-1] + new)
        windows.append(([token for token, _, _ in cut[:length]], targets, positions, ids))
    return windows


@pytest.mark.parametrize("document_mask", [True, False])
def test_stream_window_equals_its_slice_of_the_corpus(document_mask: bool) -> None:
    rng = random.Random(0)
    cases = 0
    for seed in range(60):
        documents = some_documents(rng, rng.randint(1, 20), rng.choice([1, 3, 10, 40]))
        tokens = sum(len(ids) + 1 for ids in documents)
        corpus = Masked(documents, rng.choice([None, rng.choices([True, False], k=tokens)]))
        for intervals in split(corpus.blocks, rng.choice([0.0, 0.3, 0.5]), seed):
            for length in (1, 2, 7, 16):
                expected = reference(corpus, intervals, length, document_mask)
                windows = StreamPacking(corpus, intervals, length, document_mask=document_mask)
                assert windows.count == len(expected)
                assert windows.tokens == int((intervals[:, 1] - intervals[:, 0]).sum())
                if not expected:
                    continue
                asked = rng.choices(range(windows.count), k=windows.count)  # in any order, some of them twice
                found = windows.batch(np.array(asked))
                for row, k in enumerate(asked):
                    assert tuple(array[row].tolist() for array in found[:4]) == expected[k]
                cases += 1
    assert cases > 200


def test_stream_window_by_hand() -> None:
    window = one_window(windows_of("abc", "d", "efgh", length=8), 0)
    a, b, c, d, e, f, g = b"abcdefg"
    assert window.tokens.tolist() == [a, b, c, END, d, END, e, f]
    assert window.targets.tolist() == [b, c, END, IGNORED, END, IGNORED, f, g]
    assert window.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert window.documents.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [array.dtype for array in window[:4]] == [np.int64, np.int64, np.int64, np.int32]


def test_window_that_ends_with_a_document_has_no_target_in_the_next() -> None:
    windows = windows_of("abc", "defg", length=4)
    assert windows.count == 2
    assert one_window(windows, 0).targets.tolist() == [*b"bc", END, IGNORED]
    assert one_window(windows, 0).documents.tolist() == [0, 0, 0, 0]
    assert one_window(windows, 1).tokens.tolist() == [*b"defg"]
    assert one_window(windows, 1).targets.tolist() == [*b"efg", END]


def test_text_before_a_gap_has_no_target_behind_it() -> None:
    corpus = MemoryCorpus(["abcdefgh"])
    window = one_window(StreamPacking(corpus, np.array([[0, 3], [5, 8]]), 5), 0)
    assert bytes(window.tokens.tolist()) == b"abcfg"
    assert window.targets.tolist() == [*b"bc", IGNORED, *b"gh"]
    assert window.positions.tolist() == [0, 1, 2, 0, 1]


def test_batch_has_boundaries_only_if_attention_needs_them() -> None:
    first_has, second_has_not = [np.array([0]), np.array([1])]
    texts = ("a", "bcdefghijklm")
    samples = Samples(windows_of(*texts, length=5), 0, shuffle=False)
    assert samples.batch(first_has).has_boundaries
    assert not samples.batch(second_has_not).has_boundaries
    assert not Samples(windows_of(*texts, length=5, document_mask=False), 0, shuffle=False).batch(first_has).has_boundaries


def test_window_numbers_out_of_range_are_refused() -> None:
    windows = windows_of("abcdefgh", length=2)
    for k in (-1, windows.count):
        with pytest.raises(IndexError):
            one_window(windows, k)
    with pytest.raises(IndexError, match="sample -1"):
        one_window(Samples(windows, 0, shuffle=True), -1)


def test_each_epoch_visits_every_window_once_in_its_own_order() -> None:
    samples = Samples(windows_of("x" * 700, length=7), 3, shuffle=True)
    n = samples.count
    orders = [samples.order(np.arange(epoch * n, (epoch + 1) * n)).tolist() for epoch in range(5)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(set(map(tuple, orders))) == 5
    other_seed = Samples(samples.packing, 4, shuffle=True)
    assert other_seed.order(np.arange(n)).tolist() != orders[0]


def test_epoch_order_is_a_permutation_for_any_grouping_of_indices() -> None:
    samples = Samples(windows_of("x" * 5000, length=2), 3, shuffle=True)
    n = samples.count
    whole = samples.order(np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    asked = np.random.default_rng(0).permutation(n)[:500]
    assert np.array_equal(samples.order(asked), whole[asked])
    assert samples.order(asked[:1] + 7 * n).tolist() == Samples(samples.packing, 3, True).order(asked[:1] + 7 * n).tolist()


def test_samples_without_shuffling_keep_file_order() -> None:
    samples = Samples(windows_of("x" * 70, length=7), 3, shuffle=False)
    assert samples.order(np.arange(25)).tolist() == [*range(10), *range(10), *range(5)]


def test_batch_stacks_samples_across_epochs() -> None:
    rng = random.Random(2)
    texts = ["".join(rng.choices("abcdef", k=rng.randint(1, 30))) for _ in range(40)]
    samples = Samples(windows_of(*texts, length=9), 5, shuffle=True)
    indices = np.array([0, samples.count - 1, samples.count, 7 * samples.count + 3, 10**9, 10**15])
    batch = samples.batch(indices)
    assert batch.samples.tolist() == indices.tolist()
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == batch.documents.shape == (6, 9)
    for row, index in enumerate(indices.tolist()):
        sample = one_window(samples, index)
        for stacked, array in zip(batch, sample, strict=True):
            assert stacked[row].tolist() == array.tolist()


def text_of(corpus: Corpus, pieces: tuple[tuple[int, int, int], ...]) -> list[int]:
    """The ids that pieces of documents name."""
    found: list[int] = []
    for document, start, stop in pieces:
        begin, end = corpus.bounds(document, document + 1).tolist()
        assert 0 <= start < stop <= end - begin
        found += corpus.read(begin + start, begin + stop).tolist()
    return found


def test_trace_names_the_documents_of_a_sample() -> None:
    rng = random.Random(4)
    corpus = Masked(some_documents(rng, 30, 25))
    windows = StreamPacking(corpus, split(corpus.blocks, 0.4, 1)[0], 11)
    samples = Samples(windows, 1, shuffle=True, name="some")
    for index in range(3 * samples.count):
        trace = samples.trace(index)
        assert (trace.source, trace.epoch) == ("some", index // samples.count)
        assert text_of(corpus, trace.spans) == one_window(samples, index).tokens.tolist()
        assert len({document for document, _, _ in trace.spans}) <= one_window(samples, index).documents[-1] + 1
