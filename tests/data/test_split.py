from __future__ import annotations

import random

import numpy as np
import pytest

from phalanx.data.split import Spans, split


def tokens_of(spans: Spans) -> list[tuple[int, int]]:
    return [(document, i) for document, start, stop in spans.tolist() for i in range(start, stop)]


def test_every_token_is_on_one_side_and_the_fraction_is_met() -> None:
    rng = random.Random(0)
    for seed in range(100):
        lengths = np.array([rng.randint(1, 40) for _ in range(rng.randint(1, 30))])
        fraction = rng.choice([0.01, 0.1, 0.25, 0.5])
        train, held_out = map(tokens_of, split(lengths, fraction, seed))
        everything = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
        assert sorted(train + held_out) == everything
        assert train == sorted(train)
        assert held_out == sorted(held_out)
        assert len(held_out) == max(1, round(fraction * len(everything)))


def test_at_most_one_document_is_on_both_sides_with_its_tail_held_out() -> None:
    for seed in range(50):
        train, held_out = split(np.full(20, 7), 0.3, seed)
        shared = set(train[:, 0].tolist()) & set(held_out[:, 0].tolist())
        assert len(shared) <= 1
        for document in shared:
            ((_, start, cut),) = train[train[:, 0] == document].tolist()
            assert start == 0
            assert held_out[held_out[:, 0] == document].tolist() == [[document, cut, 7]]


def test_a_single_document_is_cut() -> None:
    train, held_out = split(np.array([1000]), 0.01, 3)
    assert train.tolist() == [[0, 0, 990]]
    assert held_out.tolist() == [[0, 990, 1000]]


def test_fraction_zero_holds_out_nothing() -> None:
    train, held_out = split(np.array([3, 4]), 0.0, 0)
    assert train.tolist() == [[0, 0, 3], [1, 0, 4]]
    assert held_out.shape == (0, 3)


def test_the_draw_follows_the_seed_alone_and_favours_no_document() -> None:
    lengths = np.full(20, 5)
    assert split(lengths, 0.1, 7)[1].tolist() == split(lengths, 0.1, 7)[1].tolist()
    drawn = np.zeros(20)
    for seed in range(2000):
        drawn[split(lengths, 0.1, seed)[1][:, 0]] += 1
    assert drawn.sum() == 4000
    assert drawn == pytest.approx(200, abs=70)  # five standard deviations


def test_more_documents_hardly_change_what_the_old_ones_are_for() -> None:
    before = set(split(np.full(1000, 5), 0.1, 0)[1][:, 0].tolist())
    after = set(split(np.full(1100, 5), 0.1, 0)[1][:, 0].tolist())
    assert len(before - after) <= 20


def test_the_draw_never_changes_between_versions() -> None:
    # A resumed run must not train on what it held out before.
    assert split(np.full(10, 10), 0.25, 0)[1].tolist() == [[1, 0, 10], [2, 0, 10], [4, 5, 10]]
