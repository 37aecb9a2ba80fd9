from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from phalanx.data.samples import Permutation, key


@pytest.mark.parametrize("sizes", [range(1, 301), (1023, 1024, 1025, 65537, 200_003)])
def test_permutation_is_a_bijection(sizes: range | tuple[int, ...]) -> None:
    for n in sizes:
        assert np.array_equal(np.sort(Permutation(n, key("test", n))(np.arange(n))), np.arange(n)), n


def test_permutation_value_is_independent_of_its_batch() -> None:
    permutation = Permutation(1000, 5)
    together = permutation(np.arange(1000))
    assert [int(permutation(np.array([i]))[0]) for i in range(1000)] == together.tolist()
    assert permutation(np.arange(1000).reshape(10, 100)).tolist() == together.reshape(10, 100).tolist()
    assert permutation(np.array([], dtype=np.int64)).size == 0


def test_permutation_of_a_large_range_at_any_point() -> None:
    rng = np.random.default_rng(0)
    for n in (2**40 + 1, 2**61 - 1, 2**62):
        asked = np.unique(np.concatenate([rng.integers(0, n, 20_000), [0, n - 1]]))
        answers = Permutation(n, 1)(asked)
        assert len(np.unique(answers)) == len(asked)
        assert answers.min() >= 0
        assert answers.max() < n
        assert answers.mean() == pytest.approx(n / 2, rel=0.02)


def test_permutation_looks_random() -> None:
    for n in (1000, 4096, 100_003):
        for index in range(5):
            order = Permutation(n, key("test", 0, index))(np.arange(n)).astype(float)
            other = Permutation(n, key("test", 0, index + 1))(np.arange(n)).astype(float)
            pairs = [(order, np.arange(n)), (order, other), *((order[:-lag], order[lag:]) for lag in (1, 2, 3, 64))]
            for x, y in pairs:
                assert abs(np.corrcoef(x, y)[0, 1]) < 5 / n**0.5
            steps = np.histogram(np.diff(order) % n, bins=20, range=(0, n))[0]
            assert steps == pytest.approx(n / 20, abs=6 * (n / 20) ** 0.5)


def test_permutation_keys_reach_every_position() -> None:
    keys = [key("test", 1, index) for index in range(1000)]
    for n in (2, 3, 5, 8):
        counts = np.zeros((n, n))
        for one in keys:
            counts[np.arange(n), Permutation(n, one)(np.arange(n))] += 1
        assert counts == pytest.approx(1000 / n, rel=0.3)


def test_shuffle_keys_are_stable_and_differ_by_every_argument() -> None:
    code = "from phalanx.data.samples import key; print(key('epoch', 1, 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert int(out.stdout) == key("epoch", 1, 2)
    assert len({key(p, s, i) for p in "ab" for s in (0, 1, 11, 2**63 - 1) for i in (0, 1, 11, 10**12)}) == 32


def test_permutation_is_the_same_in_every_version() -> None:
    # A checkpoint is a position in this order: if these numbers change, old runs no longer resume exactly.
    assert Permutation(10, key("epoch", 0, 0))(np.arange(10)).tolist() == [3, 9, 7, 2, 6, 0, 5, 4, 1, 8]
    assert Permutation(1_000_003, key("epoch", 42, 7))(np.arange(4)).tolist() == [504278, 585426, 913454, 32560]
