"""Which source each sample of a run comes from. `dataset` builds a Mixture of one source or many; the loader asks it for batches.

A sample is a pure function of its global index: which source, and the how-manieth sample of that source, are computed from
the index alone, in as many operations as there are sources, whether it is the first sample or the 10¹²-th.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.pack import Batch, Samples, Trace, Window

_PERIOD = 1 << 20
"""Samples after which a weighted mixture repeats its pattern of sources; weights are met to one part in so many."""
_LONGEST = 1 << 31
"""Longest period: products of two numbers below it fit 64 bits."""

_I8 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MixPhase:
    """A stretch of samples over which the same sources take part."""

    first: int
    """Its first sample."""
    sources: tuple[int, ...]
    quotas: tuple[int, ...]
    """Samples of each of them in one period; their sum is the period."""
    before: tuple[int, ...]
    """Samples each of them gave in earlier phases."""

    @property
    def period(self) -> int:
        return sum(self.quotas)

    def counts(self, samples: int) -> list[int]:
        """How many of the first so many samples of the phase come from each source."""
        periods, within = divmod(samples, self.period)
        found, rest = [], self.period
        for quota in self.quotas:
            now = _spread(within, quota, rest)
            found.append(periods * quota + now)
            within, rest = within - now, rest - quota
        return found

    def until(self, which: int, wanted: int) -> int:
        """Samples of the phase after which its `which`-th source has given `wanted`."""
        low = (wanted - 1) // self.quotas[which] * self.period
        high = low + self.period
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[which] >= wanted else (middle, high)
        return high

    def choose(self, indices: _I8) -> tuple[_I8, _I8]:
        """The source of each sample of the phase, and which of that source's samples it is."""
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
    """How many of the first `index` of a period are chosen where `quota` of them are, as evenly as whole numbers allow."""
    return (index * quota + period // 2) // period


class SourceOrder:
    """From sample index to (source, number within the source), for sources of which some may come to an end."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float] | None, caps: Sequence[int | None]):
        """`windows`: of each source. `weights`: left out, in proportion to the windows. `caps`: samples each gives at most."""
        self.limit = sum(cap for cap in caps if cap is not None) if None not in caps else None
        """Samples there are; None: without end."""
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
            raise IndexError(f"sample {indices.max()} of {self.limit}: every source has been gone through as often as it may")
        if len(self._phases) == 1:
            return self._phases[0].choose(indices)
        phases = self._firsts.searchsorted(indices, "right") - 1
        source, number = np.empty_like(phases), np.empty_like(phases)
        for phase in set(phases.tolist()):
            now = phases == phase
            source[now], number[now] = self._phases[phase].choose(indices[now])
        return source, number


def quotas(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """`period` divided in these proportions into whole numbers (largest remainder), none of them zero: a source that somebody
    named is seen."""
    exact = [share * period / sum(shares) for share in shares]
    whole = [max(1, math.floor(part)) for part in exact]
    spare = period - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: max(0, spare)]:
        whole[i] += 1
    for _ in range(-spare):  # what the smallest got too much is taken from the largest
        whole[whole.index(max(whole))] -= 1
    return tuple(whole)


@dataclass(frozen=True, slots=True, eq=False)
class MixedSamples:
    """One source of a mixture."""

    samples: Samples
    weight: float | None = None
    epochs: float | None = None
    """Most times its windows are gone through."""

    @property
    def cap(self) -> int | None:
        """Samples it gives at most; None: without end."""
        # A tenth of ten windows is one, whatever floating point makes of it.
        return None if self.epochs is None else math.floor(self.epochs * self.samples.count + 1e-9)


class Mixture:
    """The samples of a run."""

    def __init__(self, sources: Sequence[MixedSamples]):
        """Weights are given for all sources or for none, and every cap is at least 1."""
        self.sources = tuple(source.samples for source in sources)
        self.count = sum(samples.count for samples in self.sources)
        """Windows of all sources: the samples of one epoch where no weights are given."""
        weights = [source.weight for source in sources if source.weight is not None]
        assert len(weights) in (0, len(sources)), "checked when the run file is loaded"
        self._order = SourceOrder(
            [samples.count for samples in self.sources], weights or None, [source.cap for source in sources]
        )
        self.limit = self._order.limit
        """Samples there are in all; None: without end."""

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        source, number = self._order(indices)
        present = sorted(set(source.tolist()))
        parts: list[Window] = [self.sources[which].windows(number[source == which]) for which in present]
        if len(parts) == 1:
            return Batch(*parts[0], np.array(indices, dtype=np.int64))
        # Where each row of the parts laid one after the other has to go.
        back = np.argsort(np.concatenate([np.flatnonzero(source == which) for which in present]))
        tokens, targets, positions, documents = (np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True))
        return Batch(tokens, targets, positions, documents, np.array(indices, dtype=np.int64))

    def trace(self, index: int) -> Trace:
        """Where a sample comes from."""
        source, number = self._order(np.array([index]))
        return self.sources[int(source[0])].trace(int(number[0]))
