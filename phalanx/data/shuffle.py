"""Random orders that are computed, never stored. `pack` visits windows in such an order, `split` draws documents by the hash."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
"""Four make a Feistel network pseudo-random if its halves are wide; twice that is for the narrow halves of small n."""


def key(purpose: str, seed: int, index: int = 0) -> int:
    """64 bits that follow from the arguments alone: the same in every process, on every machine, in every version."""
    return int.from_bytes(hashlib.blake2b(f"{purpose}/{seed}/{index}".encode(), digest_size=8).digest(), "little")


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """MurmurHash3's finalizer: a bijection of 64 bits in which every bit of the input moves half the bits of the output."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


class Permutation:
    """A bijection of range(n), chosen by `key`, that takes no memory and answers at any point at once.

    A Feistel network permutes the smallest power of two that holds n: whatever its rounds compute from one half of the bits
    is added to the other half and can be taken off again. A value that lands outside range(n) goes through the network once
    more until it lands inside ("cycle walking"): fewer than two passes on average, and still a bijection, since following
    a cycle from inside range(n) comes back inside.
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


Intervals = npt.NDArray[np.int64]
"""[n, 2]: start, stop in the corpus' stream. In order, none empty, no two touching."""


def split(blocks: npt.NDArray[np.int64], fraction: float, seed: int, least: int = 1) -> tuple[Intervals, Intervals]:
    """Intervals to train on and intervals to evaluate on: disjoint, and every token is in one of them.

    `blocks` says where the corpus' blocks begin, and where it ends; a block is one document unless there are very many.
    Whole blocks are held out, so that evaluation never asks for the rest of a text that was trained on, with one exception:
    of the last one drawn only the tail is, so that the fraction is met and even a single document can be split.
    `least`: tokens that are held out even where the fraction is less, if as many are left.
    """
    begins, ends = blocks[:-1], blocks[1:]
    cuts = ends.copy()  # where in each block the held-out part begins: at its end, for most
    total = int(blocks[-1])
    held_out = max(least if 2 * least <= total else 1, round(fraction * total)) if fraction > 0 else 0
    if held_out and len(begins):
        # A hash of each index, rather than a shuffle of all: adding documents hardly changes which others are drawn.
        order = np.argsort(mix(np.arange(len(begins), dtype=np.uint64) + np.uint64(key("held out", seed))))
        drawn = np.cumsum((ends - begins)[order])
        last = int(np.searchsorted(drawn, held_out))
        cuts[order[:last]] = begins[order[:last]]
        cuts[order[last]] = begins[order[last]] + drawn[last] - held_out
    return _merged(begins, cuts), _merged(cuts, ends)


def _merged(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Intervals:
    """Intervals without the empty ones, and with those made one that touch."""
    some = starts < stops
    starts, stops = starts[some], stops[some]
    apart = starts[1:] != stops[:-1]
    return np.stack([starts[np.append(True, apart)[: len(starts)]], stops[np.append(apart, True)[: len(stops)]]], axis=1)
