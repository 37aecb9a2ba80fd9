from __future__ import annotations

import bisect
import os
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from corpora import END, Masked, one_window, some_documents

from phalanx.data import pack
from phalanx.data.pack import IGNORED, BestFitPacking, DiskArray, Intervals, best_fit
from phalanx.data.samples import split
from phalanx.spec.errors import RunError, RunFailed

NOWHERE = Path("/nonexistent")


def one_by_one(lengths: list[int], room: int) -> list[int]:
    """The room each window has left when the pieces are placed one after the other."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [k for k, free in enumerate(left) if free >= length]
        if fitting:
            left[min(fitting, key=lambda k: left[k])] -= length
        else:
            left.append(room - length)
    return left


def test_best_fit_by_counts_equals_placing_one_by_one() -> None:
    rng = random.Random(0)
    for _ in range(300):
        room = rng.randint(1, 60)
        lengths = [rng.randint(1, rng.randint(1, room)) for _ in range(rng.randint(1, 120))]
        window_of, count = best_fit(np.array(sorted(lengths, reverse=True)), room)
        filled = np.bincount(window_of, weights=sorted(lengths, reverse=True), minlength=count)
        assert filled.max() <= room
        assert sorted((room - filled).tolist()) == sorted(one_by_one(lengths, room))


def packed(corpus: Masked, intervals: Intervals, length: int, document_mask: bool = True) -> BestFitPacking:
    return BestFitPacking(corpus, intervals, length, end=END, document_mask=document_mask, cache=NOWHERE)


def segments(corpus: Masked, intervals: Intervals) -> list[tuple[int, int]]:
    """What the intervals leave of each document."""
    begins = corpus._begins.tolist()
    found = []
    for start, stop in intervals.tolist():
        cuts = sorted({start, stop, *(begin for begin in begins if start < begin < stop)})
        found += list(pairwise(cuts))
    return found


def test_best_fit_shows_every_token_once_and_separates_documents() -> None:
    rng = random.Random(1)
    for case in range(150):
        documents = some_documents(rng, rng.randint(1, 30), rng.choice([3, 12, 60]))
        total = sum(len(ids) + 1 for ids in documents)
        corpus = Masked(documents, rng.choice([None, rng.choices([True, False], k=total)]))
        places = Masked(documents)
        places.ids = np.arange(total)  # ids that tell where they come from
        length = rng.choice([1, 2, 5, 16])
        for intervals in split(corpus.blocks, rng.choice([0.0, 0.3]), case):
            windows, where = packed(corpus, intervals, length), packed(places, intervals, length)
            expected = [i for start, stop in segments(corpus, intervals) for i in range(start, stop - 1)]
            assert (windows.count == 0) == (not expected)
            seen: Counter[int] = Counter()
            full = 0
            for k in range(windows.count):
                shown, origin = one_window(windows, k), one_window(where, k)
                own = origin.targets != IGNORED
                assert own.tolist() == sorted(own.tolist(), reverse=True)  # padding comes last
                seen.update(origin.tokens[own].tolist())
                full += int(own.sum())
                assert origin.targets[own].tolist() == (origin.tokens[own] + 1).tolist()
                trained = own if corpus.trained is None else own & corpus.trained[np.where(own, origin.targets, 0)]
                assert shown.tokens.tolist() == np.where(own, corpus.ids[np.where(own, origin.tokens, 0)], END).tolist()
                assert (
                    shown.targets.tolist() == np.where(trained, corpus.ids[np.where(own, origin.targets, 0)], IGNORED).tolist()
                )
                # Within one document number: neighbours in the corpus, of one document, with positions counted from 0.
                for number in range(shown.documents[-1] + 1):
                    now = shown.documents == number
                    assert shown.positions[now].tolist() == list(range(int(now.sum())))
                    tokens = origin.tokens[now & own].tolist()
                    assert tokens == list(range(tokens[0], tokens[0] + len(tokens))) if tokens else not own[now].any()
                    assert len({corpus.find(i) for i in tokens}) <= 1
                assert sum(stop - start for _, start, stop in windows.trace(k)) == own.sum()
            assert seen == Counter(expected)
            if windows.count:
                assert windows.padding_ratio == pytest.approx(1 - full / (windows.count * length))


def test_best_fit_meets_its_window_bound_and_keeps_short_documents_whole() -> None:
    rng = random.Random(2)
    for _ in range(40):
        documents = [rng.choices(range(256), k=rng.randint(1, 70)) for _ in range(rng.randint(1, 60))]
        corpus, length = Masked(documents), 32
        windows = packed(corpus, np.array([[0, corpus.tokens]]), length)
        full = sum(len(ids) // length for ids in documents)
        rests = [len(ids) % length for ids in documents if len(ids) % length]
        assert windows.count == full + len(one_by_one(rests, length))
        pieces = [piece for k in range(windows.count) for piece in windows.trace(k)]
        for i, ids in enumerate(documents):
            own = sorted((start, stop) for document, start, stop in pieces if document == i)
            assert [stop - start for start, stop in own] == [length] * (len(ids) // length) + [len(ids) % length] * (
                len(ids) % length > 0
            )


def test_best_fit_window_by_hand() -> None:
    corpus = Masked([list(b"abc"), list(b"defghij"), list(b"k")])
    windows = packed(corpus, np.array([[0, corpus.tokens]]), 5)
    assert windows.count == 3
    assert one_window(windows, 0).tokens.tolist() == [*b"defgh"]
    assert one_window(windows, 0).targets.tolist() == [*b"efghi"]  # a document that goes on elsewhere knows its next token
    assert one_window(windows, 1).tokens.tolist() == [*b"abcij"]
    assert one_window(windows, 1).targets.tolist() == [*b"bc", END, *b"j", END]
    assert one_window(windows, 2).tokens.tolist() == [*b"k", END, END, END, END]
    assert one_window(windows, 2).targets.tolist() == [END, IGNORED, IGNORED, IGNORED, IGNORED]
    assert one_window(windows, 2).documents.tolist() == [0, 1, 1, 1, 1]
    assert one_window(windows, 2).positions.tolist() == [0, 0, 1, 2, 3]
    assert windows.padding_ratio == pytest.approx(4 / 15)
    assert one_window(packed(corpus, np.array([[0, corpus.tokens]]), 5, document_mask=False), 2).documents.tolist() == [0] * 5
    with pytest.raises(IndexError):
        one_window(windows, 3)


def test_stored_packing_plan_is_made_once_and_gives_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Masked(some_documents(random.Random(3), 200, 40))
    intervals = split(corpus.blocks, 0.1, 0)[0]
    plain = packed(corpus, intervals, 16)
    monkeypatch.setattr(pack, "_STORED", 1)
    first = BestFitPacking(corpus, intervals, 16, end=END, document_mask=True, cache=tmp_path)
    assert len(list((tmp_path / "packing").iterdir())) == 1
    made: list[int] = []
    monkeypatch.setattr(pack, "make_plan", lambda *given: made.append(1))
    second = BestFitPacking(corpus, intervals, 16, end=END, document_mask=True, cache=tmp_path)
    assert not made
    assert isinstance(second._plan.piece_starts, DiskArray)
    numbers = np.arange(plain.count)
    for kept in (first, second):
        assert (kept.count, kept.padding_ratio) == (plain.count, plain.padding_ratio)
        assert all(np.array_equal(a, b) for a, b in zip(kept.batch(numbers), plain.batch(numbers), strict=True))


def test_disk_array_reads_like_an_array_in_memory(tmp_path: Path) -> None:
    numbers = np.cumsum(np.arange(50, dtype=np.int64) % 7)
    np.save(tmp_path / "numbers.npy", numbers)
    stored = DiskArray(tmp_path / "numbers.npy")
    assert len(stored) == 50
    assert [stored[i] for i in (0, 7, 49, -1)] == numbers[[0, 7, 49, -1]].tolist()
    for at in (slice(3, 9), slice(9, 3), slice(45, 60), slice(None), slice(0, 50, 7)):
        assert stored[at].tolist() == numbers[at].tolist()
    assert all(bisect.bisect_right(stored, n) == numbers.searchsorted(n, "right") for n in range(-1, 160))
    with pytest.raises(IndexError):
        stored[50]
    os.truncate(tmp_path / "numbers.npy", 200)
    assert stored[:5].tolist() == numbers[:5].tolist()
    with pytest.raises(RunFailed, match=r"numbers\.npy has shrunk"):
        stored[40:]


def test_unwritable_packing_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_STORED", 1)
    (tmp_path / "file").write_text("")
    corpus = Masked([[1, 2, 3]])
    with pytest.raises(RunError, match=r"cannot be stored in .*file/packing.* set data\.cache"):
        BestFitPacking(corpus, np.array([[0, 4]]), 2, end=END, document_mask=True, cache=tmp_path / "file")


def test_best_fit_packs_a_million_documents_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.sort(np.random.default_rng(0).geometric(1 / 400, 1_000_000).clip(1, 2048))[::-1]
    rounds, repeat = [], np.repeat
    monkeypatch.setattr(np, "repeat", lambda *values: rounds.append(1) or repeat(*values))
    window_of, count = best_fit(lengths, 2048)
    assert len(rounds) < 50_000, "one round places all documents of a length into all windows of a free space"
    assert np.bincount(window_of, weights=lengths).max() <= 2048
    assert count * 2048 < 1.001 * lengths.sum() + 2048
