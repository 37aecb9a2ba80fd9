"""Holds part of a corpus out for evaluation. `dataset` calls it; the intervals it gives are what windows are cut out of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.data.shuffle import key, mix

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
