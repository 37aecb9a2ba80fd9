"""Random choices that are computed, never stored: the order of samples, and which documents are held out for evaluation.

`data/pack` visits windows in the order of a Permutation; `data/dataset` calls `split`.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]
"""[n, 2]: start and stop in a corpus' stream, sorted, none empty, no two adjacent."""

_ROUNDS = 8
"""Four rounds make a Feistel network with wide halves pseudo-random; small n has narrow halves and gets twice as many."""


def key(purpose: str, seed: int, index: int = 0) -> int:
    """64 bits that depend on the arguments alone: the same in every process, on every machine, in every version."""
    return int.from_bytes(hashlib.blake2b(f"{purpose}/{seed}/{index}".encode(), digest_size=8).digest(), "little")


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """MurmurHash3's finalizer: a bijection of 64 bits in which every input bit flips half the output bits on average."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


class Permutation:
    """A pseudo-random bijection of range(n) that takes no memory and can be evaluated at any point.

    A Feistel network permutes the smallest power of two that is not below n: each round adds a function of one half of the
    bits to the other half, which can be undone. A value outside range(n) passes through the network again until it is inside
    ("cycle walking"). That takes fewer than two passes on average and is still a bijection, because a cycle that starts
    inside range(n) returns to it.
    """

    def __init__(self, n: int, key: int):
        assert 1 <= n <= 2**62, n
        self.n = n
        bits = (n - 1).bit_length()
        self._shift = np.uint64(bits // 2)
        self._low = np.uint64((1 << bits // 2) - 1)
        self._high = np.uint64((1 << (bits - bits // 2)) - 1)
        digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8 * _ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.n), (positions, self.n)
        x = self._network(positions.ravel().astype(np.uint64))
        while (outside := x >= np.uint64(self.n)).any():
            x[outside] = self._network(x[outside])
        return x.astype(np.int64).reshape(positions.shape)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        low, high = x & self._low, x >> self._shift
        for even, odd in self._round_keys.reshape(-1, 2):
            high ^= mix(low + even) & self._high
            low ^= mix(high + odd) & self._low
        return (high << self._shift) | low


def split(blocks: npt.NDArray[np.int64], fraction: float, seed: int, least: int = 1) -> tuple[Intervals, Intervals]:
    """Intervals to train on and intervals to evaluate on: disjoint, and together the whole corpus.

    `blocks`: start positions of the corpus' blocks, then its end; a block is one document unless there are very many.
    Whole blocks are held out, so that evaluation never continues a text that was trained on. The one exception is the last
    block drawn: only its tail is held out, which meets the fraction exactly and splits even a single document.
    `least`: tokens to hold out even if the fraction gives fewer, provided that as many remain.
    """
    begins, ends = blocks[:-1], blocks[1:]
    cuts = ends.copy()  # where the held-out part of each block begins; for most blocks at the end
    total = int(blocks[-1])
    held_out = max(least if 2 * least <= total else 1, round(fraction * total)) if fraction > 0 else 0
    if held_out and len(begins):
        # Sorting by a hash of the index, instead of a shuffle: added documents hardly change which others are drawn.
        order = np.argsort(mix(np.arange(len(begins), dtype=np.uint64) + np.uint64(key("held out", seed))))
        drawn = np.cumsum((ends - begins)[order])
        last = int(np.searchsorted(drawn, held_out))
        cuts[order[:last]] = begins[order[:last]]
        cuts[order[last]] = begins[order[last]] + drawn[last] - held_out
    return _merged(begins, cuts), _merged(cuts, ends)


def _merged(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Intervals:
    """Drops empty intervals and joins adjacent ones."""
    nonempty = starts < stops
    starts, stops = starts[nonempty], stops[nonempty]
    apart = starts[1:] != stops[:-1]
    return np.stack([starts[np.append(True, apart)[: len(starts)]], stops[np.append(apart, True)[: len(stops)]]], axis=1)
