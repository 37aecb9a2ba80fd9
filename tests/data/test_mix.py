from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from corpora import Masked

from phalanx.data.pack import StreamPacking
from phalanx.data.samples import Mixture, Samples, SourceOrder, quotas

PERIOD = 1 << 20


def source(name: str, first: int, windows: int, *, seed: int = 0, shuffle: bool = True) -> Samples:
    """Windows of four tokens: the first is `first`, the others tell which window it is."""
    numbers = [number for k in range(windows) for number in (first, k >> 14, (k >> 7) & 127, k & 127)]
    corpus = Masked([numbers])
    return Samples(StreamPacking(corpus, np.array([[0, 4 * windows + 1]]), 4), seed, shuffle, name)


def test_quotas_divide_a_period_in_given_proportions() -> None:
    def of(weights: list[float], period: int) -> tuple[int, ...]:
        return quotas([Fraction(weight) for weight in weights], period)

    assert of([1, 1, 1], 10) == (4, 3, 3)
    assert of([5, 3, 2], 10) == (5, 3, 2)
    assert of([1e9, 1, 1e-9], 10) == (8, 1, 1)  # whoever is named is seen
    rng = random.Random(0)
    for _ in range(200):
        weights = [rng.random() + 0.001 for _ in range(rng.randint(1, 8))]
        found = of(weights, PERIOD)
        assert sum(found) == PERIOD
        assert all(abs(part - weight / sum(weights) * PERIOD) < 1 for part, weight in zip(found, weights, strict=True))


def test_mix_period_meets_its_quotas_evenly() -> None:
    weights = [0.55, 0.3, 0.1, 0.05]
    order = SourceOrder([10, 20, 30, 40], weights, [None] * 4)
    which, number = order(np.arange(3 * PERIOD))
    assert order.limit is None
    for i, quota in enumerate(quotas([Fraction(weight) for weight in weights], PERIOD)):
        own = number[which == i]
        assert np.array_equal(own, np.arange(3 * quota))  # each sample of a source once, in order
        for window in (100, 1000, 10_000):  # any stretch of the run holds nearly its part, not only the whole
            before = np.cumsum(which[:100_000] == i)
            assert np.abs(before[window:] - before[:-window] - window * weights[i]).max() <= 4


def test_source_order_is_a_function_of_each_index() -> None:
    order = SourceOrder([1000, 10, 500], [3, 1, 2], [None, 25, None])
    together = order(np.arange(5000))
    for index in random.Random(0).sample(range(5000), 200):
        which, number = order(np.array([index]))
        assert (which[0], number[0]) == (together[0][index], together[1][index])
    for far in (10**9, 10**12, 10**15):
        which, number = order(np.arange(far, far + 1000))
        assert set(which.tolist()) == {0, 2}
        assert np.bincount(which, minlength=3)[0] == pytest.approx(600, abs=3)
        for i in (0, 2):
            assert np.array_equal(np.diff(number[which == i]), np.ones((which == i).sum() - 1))
    with pytest.raises(IndexError, match="sample -1"):
        order(np.array([-1]))


def test_mixture_without_weights_shows_every_window_once_per_epoch() -> None:
    windows = [50, 7, 130]
    which, number = SourceOrder(windows, None, [None] * 3)(np.arange(2 * sum(windows)))
    for i, count in enumerate(windows):
        first_epoch = number[: sum(windows)][which[: sum(windows)] == i]
        assert np.array_equal(first_epoch, np.arange(count))
        assert np.array_equal(number[which == i], np.arange(2 * count))


def test_mixture_without_weights_is_proportional_to_size() -> None:
    windows = [3 * 10**11, 10**11, 5]
    which, _ = SourceOrder(windows, None, [None] * 3)(np.arange(10**12, 10**12 + 100_000))
    assert np.bincount(which, minlength=3)[:2].tolist() == pytest.approx([75_000, 25_000], abs=2)


def test_exhausted_source_leaves_its_share_to_the_others() -> None:
    order = SourceOrder([100, 1000, 1000], [2, 1, 1], [150, None, None])
    which, number = order(np.arange(2000))
    assert np.array_equal(number[which == 0], np.arange(150))
    last = int(np.flatnonzero(which == 0)[-1])
    assert last == pytest.approx(300, abs=3)
    assert np.bincount(which[: last + 1]).tolist() == pytest.approx([150, 75, 75], abs=2)
    assert np.bincount(which[last + 1 :])[1:].tolist() == pytest.approx([(1999 - last) / 2] * 2, abs=2)
    for i in (1, 2):
        assert np.array_equal(number[which == i], np.arange((which == i).sum()))


def test_mixture_of_limited_sources_ends_with_all_samples() -> None:
    rng = random.Random(1)
    for _ in range(60):
        n = rng.randint(1, 5)
        windows = [rng.randint(1, 300) for _ in range(n)]
        caps = rng.choice([windows, [rng.randint(1, 2 * count) for count in windows]])  # one epoch each, or any part
        order = SourceOrder(windows, rng.choice([None, [rng.uniform(0.01, 5) for _ in range(n)]]), caps)
        assert order.limit == sum(caps)
        which, number = order(np.arange(sum(caps)))
        assert Counter(zip(which.tolist(), number.tolist(), strict=True)) == Counter(
            (i, k) for i, cap in enumerate(caps) for k in range(cap)
        )
        with pytest.raises(IndexError, match=f"sample {sum(caps)} of {sum(caps)}"):
            order(np.array([sum(caps)]))


def test_mixture_of_one_source_equals_the_source() -> None:
    alone = source("a", 1, 300, seed=4)
    mixture = Mixture([alone])
    assert (mixture.count, mixture.limit) == (300, None)
    for indices in (np.arange(50), np.array([299, 300, 7, 10**12])):
        assert np.array_equal(mixture.batch(indices).tokens, alone.batch(indices).tokens)
        assert mixture.batch(indices).samples.tolist() == indices.tolist()
    assert Mixture([alone], epochs=[0.5]).limit == 150
    assert Mixture([source("a", 1, 10)], epochs=[0.7]).limit == 7


def test_mixture_batch_is_the_same_for_any_grouping_of_indices() -> None:
    mixture = Mixture(
        [
            source("a", 1, 300),
            source("b", 2, 50, seed=9),
            source("c", 3, 700),
        ],
        weights=[3.0, 1.0, 2.0],
        epochs=[None, 2.5, None],
    )
    whole = mixture.batch(np.arange(2000))
    rng = np.random.default_rng(0)
    for _ in range(30):
        asked = rng.integers(0, 2000, rng.integers(1, 40))
        batch = mixture.batch(asked)
        for name in ("tokens", "targets", "positions", "documents", "samples"):
            assert np.array_equal(getattr(batch, name), getattr(whole, name)[asked])
    assert np.bincount(whole.tokens[:600, 0])[1:].tolist() == pytest.approx([300, 100, 200], abs=3)
    seen = Counter(tuple(row) for row in whole.tokens.tolist() if row[0] == 2)
    assert sorted(seen.values()) == [2] * 25 + [3] * 25  # two and a half epochs
    for index in rng.integers(0, 2000, 50).tolist():
        trace = mixture.trace(index)
        first, a, b, c = whole.tokens[index].tolist()
        assert (trace.source, trace.window) == ("abc"[first - 1], (a << 14) + (b << 7) + c)
        assert trace.spans == ((0, 4 * trace.window, 4 * trace.window + 4),)


def test_mixture_without_shuffling_keeps_file_order() -> None:
    mixture = Mixture([source("a", 1, 20, shuffle=False), source("b", 2, 10, shuffle=False)])
    tokens = mixture.batch(np.arange(60)).tokens
    for first, windows in ((1, 20), (2, 10)):
        assert tokens[tokens[:, 0] == first, 3].tolist() == [*range(windows)] * 2
