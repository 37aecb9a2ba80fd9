from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from phalanx.data.pack import Intervals
from phalanx.data.samples import split


def blocks(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def tokens_of(intervals: Intervals) -> list[int]:
    return [i for start, stop in intervals.tolist() for i in range(start, stop)]


def documents_of(intervals: Intervals, each: int) -> set[int]:
    return {i // each for i in tokens_of(intervals)}


def test_split_puts_every_token_on_one_side_and_meets_the_fraction() -> None:
    rng = random.Random(0)
    for seed in range(200):
        lengths = np.array([rng.randint(1, 40) for _ in range(rng.randint(1, 30))])
        fraction = rng.choice([0.01, 0.1, 0.25, 0.5])
        parts = split(blocks(lengths), fraction, seed)
        train, held_out = map(tokens_of, parts)
        assert sorted(train + held_out) == list(range(lengths.sum()))
        assert len(held_out) == max(1, round(fraction * lengths.sum()))
        for part in parts:
            assert all(start < stop for start, stop in part.tolist())
            assert all(one[1] < other[0] for one, other in pairwise(part.tolist()))  # in order, and none touch


def test_split_cuts_at_most_one_document_and_holds_out_its_tail() -> None:
    for seed in range(50):
        train, held_out = split(blocks(np.full(20, 7)), 0.3, seed)
        shared = documents_of(train, 7) & documents_of(held_out, 7)
        assert len(shared) <= 1
        for document in shared:
            inside = [i for i in tokens_of(held_out) if i // 7 == document]
            assert inside == list(range(inside[0], 7 * document + 7))


def test_split_cuts_a_single_document() -> None:
    train, held_out = split(blocks([1000]), 0.01, 3)
    assert train.tolist() == [[0, 990]]
    assert held_out.tolist() == [[990, 1000]]


def test_split_of_an_empty_corpus_is_empty() -> None:
    for part in split(blocks([]), 0.1, 0):
        assert part.shape == (0, 2)


def test_split_with_fraction_zero_holds_out_nothing() -> None:
    train, held_out = split(blocks([3, 4]), 0.0, 0)
    assert train.tolist() == [[0, 7]]
    assert held_out.shape == (0, 2)


def test_held_out_documents_depend_on_the_seed_alone() -> None:
    lengths = blocks(np.full(20, 5))
    assert split(lengths, 0.1, 7)[1].tolist() == split(lengths, 0.1, 7)[1].tolist()
    drawn = np.zeros(20)
    for seed in range(2000):
        drawn[list(documents_of(split(lengths, 0.1, seed)[1], 5))] += 1
    assert drawn.sum() == 4000
    assert drawn == pytest.approx(200, abs=70)  # five standard deviations


def test_added_documents_hardly_change_the_split() -> None:
    before = documents_of(split(blocks(np.full(1000, 5)), 0.1, 0)[1], 5)
    after = documents_of(split(blocks(np.full(1100, 5)), 0.1, 0)[1], 5)
    assert len(before - after) <= 20


def test_split_is_the_same_in_every_version() -> None:
    # A resumed run must not train on what it held out before.
    assert split(blocks(np.full(10, 10)), 0.25, 0)[1].tolist() == [[10, 30], [45, 50]]
