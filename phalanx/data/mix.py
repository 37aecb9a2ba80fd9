"""Decides which source each sample of a run comes from. The source of a sample and its number within that source are computed from the
global sample index alone, with as many operations as there are sources, for the first sample as for the 10¹²-th."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.pack import Batch, Samples, Trace

_PERIOD = 1 << 20
"""Samples after which a weighted mixture repeats its pattern of sources; also the resolution of weights."""
_LONGEST = 1 << 31
"""Longest period: the product of two smaller numbers fits 64 bits."""

_I8 = npt.NDArray[np.int64]


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
        parts = [self.sources[which].batch(number[source == which]) for which in present]
        # The target row of each row of the concatenated parts.
        back = np.argsort(np.concatenate([np.flatnonzero(source == which) for which in present]))
        joined = Batch(*(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)))
        return joined._replace(samples=np.array(indices, dtype=np.int64))

    def trace(self, index: int) -> Trace:
        """The origin of a sample."""
        source, number = self._order(np.array([index]))
        return self.sources[int(source[0])].trace(int(number[0]))
