"""Numbers windows as samples, and decides which documents are held out for evaluation. The source of a sample, its window and the held-out
documents are computed from the seed and the global sample index, never stored: for the 10¹²-th sample as quickly as for the first."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.pack import Batch, DocumentSpan, Intervals, Packing

_BLOCK, _BLOCKS = 1024, 16
"""The order of samples is computed in blocks of 1024 neighbors; the last 16 blocks are cached."""

_ROUNDS = 8
"""Four rounds make a Feistel network with wide halves pseudo-random; small n has narrow halves and gets twice as many."""

_PERIOD = 1 << 20
"""Samples after which a weighted mixture repeats its pattern of sources; also the resolution of weights."""
_LONGEST = 1 << 31
"""Longest period: the product of two smaller numbers fits 64 bits."""

_I8 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of a sample."""

    source: str
    epoch: int
    window: int
    spans: tuple[DocumentSpan, ...]


class Samples:
    """The endless samples of one source: its windows, epoch after epoch, each epoch in an order of its own.

    A sample is a pure function of (seed, index). There is no state, so a run that starts at any index on any number of ranks
    reads the same samples as a run that never stopped.
    """

    def __init__(self, packing: Packing, seed: int, shuffle: bool, name: str = ""):
        """`name`: the name of the source."""
        self.packing = packing
        self.name = name
        self._shuffle = shuffle
        self._seed = seed
        self._block = functools.lru_cache(_BLOCKS)(self._permuted)

    @property
    def count(self) -> int:
        """Samples in one epoch."""
        return self.packing.count

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        return self.packing.batch(self.order(indices))._replace(samples=np.array(indices, dtype=np.int64))

    def trace(self, index: int) -> Trace:
        window = int(self.order(np.array([index]))[0])
        return Trace(self.name, index // self.count, window, self.packing.trace(window))

    def order(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The window number of each sample."""
        if indices.min() < 0:
            raise IndexError(f"sample {indices.min()}; samples are counted from 0")
        if not self._shuffle:
            return indices % self.count
        windows = np.empty(len(indices), dtype=np.int64)
        blocks = indices // self.count * self._blocks + indices % self.count // _BLOCK
        within = indices % self.count % _BLOCK
        for block in set(blocks.tolist()):
            now = blocks == block
            windows[now] = self._block(block)[within[now]]
        return windows

    @property
    def _blocks(self) -> int:
        return -(-self.count // _BLOCK)

    def _permuted(self, block: int) -> npt.NDArray[np.int64]:
        """One block of an epoch's order. Indices of a batch are neighbors, and a block costs little more than one index."""
        epoch, first = divmod(block, self._blocks)
        permutation = Permutation(self.count, key("epoch", self._seed, epoch))
        return permutation(np.arange(first * _BLOCK, min((first + 1) * _BLOCK, self.count)))


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


@dataclass(frozen=True, slots=True, eq=False)
class MixPhase:
    """A range of samples during which the same sources are active."""

    first: int
    """First sample of the phase."""
    sources: tuple[int, ...]
    quotas: tuple[int, ...]
    """Samples of each source in one period; their sum is the period."""
    before: tuple[int, ...]
    """Samples of each source in earlier phases."""

    @property
    def period(self) -> int:
        return sum(self.quotas)

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples of the phase come from each source."""
        periods, within = divmod(samples, self.period)
        counts, rest = [], self.period
        for quota in self.quotas:
            now = _spread(within, quota, rest)
            counts.append(periods * quota + now)
            within, rest = within - now, rest - quota
        return counts

    def until(self, which: int, wanted: int) -> int:
        """Number of samples of the phase that contain `wanted` samples of its `which`-th source."""
        low = (wanted - 1) // self.quotas[which] * self.period
        high = low + self.period
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[which] >= wanted else (middle, high)
        return high

    def choose(self, indices: _I8) -> tuple[_I8, _I8]:
        """The source of each sample of the phase, and its number within that source."""
        if len(self.sources) == 1:
            return np.full(len(indices), self.sources[0]), indices - self.first + self.before[0]
        periods, within = np.divmod(indices - self.first, self.period)
        source, number = np.empty_like(within), np.empty_like(within)
        left, rest = np.arange(len(within)), self.period
        for which, quota, before in zip(self.sources, self.quotas, self.before, strict=True):
            done = _spread(within, quota, rest)
            own = _spread(within + 1, quota, rest) > done
            source[left[own]] = which
            number[left[own]] = before + periods[left[own]] * quota + done[own]
            left, within, rest = left[~own], (within - done)[~own], rest - quota
        return source, number


def _spread(index: int | _I8, quota: int, period: int) -> Any:
    """How many of the first `index` samples of a period are chosen if `quota` of `period` are, spread as evenly as possible."""
    return (index * quota + period // 2) // period


class SourceOrder:
    """Maps a sample index to (source, number within the source). Some sources may end before others."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float] | None, caps: Sequence[int | None]):
        """`windows`: windows per source. `weights`: None means in proportion to the windows. `caps`: sample limits, None for no
        limit."""
        self.limit = sum(cap for cap in caps if cap is not None) if None not in caps else None
        """Number of samples; None: no limit."""
        self._phases: list[MixPhase] = []
        done, first = [0] * len(windows), 0
        while active := tuple(i for i, cap in enumerate(caps) if cap is None or done[i] < cap):
            shares = [Fraction(windows[i] if weights is None else weights[i]) for i in active]
            period = min(int(sum(shares)), _LONGEST) if weights is None else _PERIOD
            phase = MixPhase(first, active, quotas(shares, period), tuple(done[i] for i in active))
            self._phases.append(phase)
            lengths = [phase.until(k, cap - done[i]) for k, i in enumerate(active) if (cap := caps[i]) is not None]
            if not lengths:
                break
            first += min(lengths)
            for i, given in zip(active, phase.counts(min(lengths)), strict=True):
                done[i] += given
        self._firsts = np.array([phase.first for phase in self._phases])

    def __call__(self, indices: _I8) -> tuple[_I8, _I8]:
        if indices.min() < 0:
            raise IndexError(f"sample {indices.min()}; samples are counted from 0")
        if self.limit is not None and indices.max() >= self.limit:
            raise IndexError(f"sample {indices.max()} of {self.limit}: every source has reached its epochs")
        if len(self._phases) == 1:
            return self._phases[0].choose(indices)
        phases = self._firsts.searchsorted(indices, "right") - 1
        source, number = np.empty_like(phases), np.empty_like(phases)
        for phase in set(phases.tolist()):
            now = phases == phase
            source[now], number[now] = self._phases[phase].choose(indices[now])
        return source, number


def quotas(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Divides `period` in these proportions into whole numbers (largest remainder). None is zero: every named source is used."""
    exact = [share * period / sum(shares) for share in shares]
    whole = [max(1, math.floor(part)) for part in exact]
    spare = period - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: max(0, spare)]:
        whole[i] += 1
    for _ in range(-spare):  # the largest quotas pay for those that were raised to 1
        whole[whole.index(max(whole))] -= 1
    return tuple(whole)


def sample_limit(windows: int, epochs: float | None) -> int | None:
    """Number of samples in so many epochs; None: no limit."""
    # 0.1 epochs of ten windows are one sample, in spite of floating point.
    return None if epochs is None else math.floor(epochs * windows + 1e-9)


class Mixture:
    """The samples of a run."""

    def __init__(
        self, sources: Sequence[Samples], weights: Sequence[float] | None = None, epochs: Sequence[float | None] | None = None
    ):
        """`weights`: None means in proportion to the windows. `epochs`: the maximum of each source, None for no limit."""
        self.sources = tuple(sources)
        counts = [samples.count for samples in sources]
        self.count = sum(counts)
        """Windows of all sources: the samples of one epoch if there are no weights."""
        self._order = SourceOrder(counts, weights, list(map(sample_limit, counts, epochs or [None] * len(counts))))
        self.limit = self._order.limit
        """Number of samples in all; None: no limit."""

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        source, number = self._order(indices)
        present = sorted(set(source.tolist()))
        parts: list[Batch] = [self.sources[which].batch(number[source == which]) for which in present]
        if len(parts) > 1:
            # The target row of each row of the concatenated parts.
            back = np.argsort(np.concatenate([np.flatnonzero(source == which) for which in present]))
            parts = [Batch(*(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)))]
        return parts[0]._replace(samples=np.array(indices, dtype=np.int64))

    def trace(self, index: int) -> Trace:
        """The origin of a sample."""
        source, number = self._order(np.array([index]))
        return self.sources[int(source[0])].trace(int(number[0]))
