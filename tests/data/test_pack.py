from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from phalanx.data.pack import IGNORED, Samples, Windows
from phalanx.data.source import Memory
from phalanx.data.split import Spans, split
from phalanx.spec.errors import RunError

END = 256


def spans_of(*texts: str) -> Spans:
    return split(Memory(texts).lengths, 0.0, 0)[0]


def windows_of(*texts: str, length: int, document_mask: bool = True) -> Windows:
    return Windows(Memory(texts), spans_of(*texts), length, end=END, document_mask=document_mask)


def corpus(rng: random.Random, count: int, longest: int) -> list[str]:
    return ["".join(rng.choices("abcdef", k=rng.randint(1, longest))) for _ in range(count)]


def reference(texts: list[str], spans: Spans, length: int, document_mask: bool) -> list[tuple[list[int], ...]]:
    """Every window, from the whole stream written out as a list of (token, document)."""
    stream = [
        (token, document) for document, start, stop in spans.tolist() for token in [*texts[document].encode()[start:stop], END]
    ]
    windows = []
    for begin in range(0, len(stream) - length, length):
        cut = stream[begin : begin + length + 1]
        targets = [b if d == c else IGNORED for (_, c), (b, d) in pairwise(cut)]
        positions, ids = [0], [0]
        for (_, before), (_, now) in pairwise(cut[:length]):
            new = document_mask and before != now
            positions.append(0 if new else positions[-1] + 1)
            ids.append(ids[-1] + new)
        windows.append(([token for token, _ in cut[:length]], targets, positions, ids))
    return windows


@pytest.mark.parametrize("document_mask", [True, False])
def test_every_window_is_its_slice_of_the_stream(document_mask: bool) -> None:
    rng = random.Random(0)
    for seed in range(60):
        texts = corpus(rng, rng.randint(1, 30), rng.choice([1, 3, 10, 80]))
        documents = Memory(texts)
        for spans in split(documents.lengths, rng.choice([0.0, 0.3, 0.5]), seed):
            for length in (1, 2, 3, 7, 16):
                expected = reference(texts, spans, length, document_mask)
                if not expected:
                    continue
                windows = Windows(documents, spans, length, end=END, document_mask=document_mask)
                assert windows.count == len(expected)
                for k, arrays in enumerate(expected):
                    assert tuple(array.tolist() for array in windows.window(k)) == arrays


def test_a_window_by_hand() -> None:
    window = windows_of("abc", "d", "efgh", length=8).window(0)
    a, b, c, d, e, f, g = b"abcdefg"
    assert window.tokens.tolist() == [a, b, c, END, d, END, e, f]
    assert window.targets.tolist() == [b, c, END, IGNORED, END, IGNORED, f, g]
    assert window.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert window.documents.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [array.dtype for array in window] == [np.int64, np.int64, np.int64, np.int32]


def test_a_window_that_ends_with_a_document_does_not_foretell_the_next() -> None:
    windows = windows_of("abc", "defg", length=4)
    assert windows.count == 2
    assert windows.window(0).targets.tolist() == [*b"bc", END, IGNORED]
    assert windows.window(0).documents.tolist() == [0, 0, 0, 0]
    assert windows.window(1).tokens.tolist() == [*b"defg"]
    assert windows.window(1).targets.tolist() == [*b"efg", END]


def test_boundaries_are_seen_only_where_attention_must_respect_them() -> None:
    first_has, second_has_not = [np.array([0]), np.array([1])]
    texts = ("a", "bcdefghijklm")
    samples = Samples(windows_of(*texts, length=5), 0, shuffle=False)
    assert samples.batch(first_has).has_boundaries
    assert not samples.batch(second_has_not).has_boundaries
    assert not Samples(windows_of(*texts, length=5, document_mask=False), 0, shuffle=False).batch(first_has).has_boundaries


def test_windows_outside_are_refused() -> None:
    windows = windows_of("abcdefgh", length=2)
    for k in (-1, windows.count):
        with pytest.raises(IndexError):
            windows.window(k)
    with pytest.raises(IndexError, match="sample -1"):
        Samples(windows, 0, shuffle=True).sample(-1)


def test_too_little_text_is_told_with_numbers_and_a_remedy() -> None:
    assert windows_of("abcd", length=4).count == 1
    with pytest.raises(RunError, match=r"training text has 5 tokens, fewer than the 6 .* = 5 needs; .* or more text\."):
        windows_of("abcd", length=5)
    with pytest.raises(RunError, match=r"held-out text has 5 tokens.* data\.eval_fraction"):
        Windows(Memory(["abcd"]), spans_of("abcd"), 9, end=END, part="eval")
    with pytest.raises(RunError, match="has 0 tokens"):
        Windows(Memory(["a"]), np.empty((0, 3), dtype=np.int64), 9, end=END)


def test_each_epoch_visits_every_window_once_in_an_order_of_its_own() -> None:
    samples = Samples(windows_of("x" * 700, length=7), 3, shuffle=True)
    n = samples.count
    orders = [samples.order(np.arange(epoch * n, (epoch + 1) * n)).tolist() for epoch in range(5)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(set(map(tuple, orders))) == 5
    other_seed = Samples(samples.windows, 4, shuffle=True)
    assert other_seed.order(np.arange(n)).tolist() != orders[0]


def test_without_shuffling_the_order_is_the_files() -> None:
    samples = Samples(windows_of("x" * 70, length=7), 3, shuffle=False)
    assert samples.order(np.arange(25)).tolist() == [*range(10), *range(10), *range(5)]


def test_a_batch_stacks_its_samples_even_across_epochs() -> None:
    texts = corpus(random.Random(2), 40, 30)
    samples = Samples(windows_of(*texts, length=9), 5, shuffle=True)
    indices = np.array([0, samples.count - 1, samples.count, 7 * samples.count + 3, 10**9, 10**15])
    batch = samples.batch(indices)
    assert batch.samples.tolist() == indices.tolist()
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == batch.documents.shape == (6, 9)
    for row, index in enumerate(indices.tolist()):
        sample = samples.sample(index)
        for stacked, array in zip((batch.tokens, batch.targets, batch.positions, batch.documents), sample, strict=True):
            assert stacked[row].tolist() == array.tolist()
