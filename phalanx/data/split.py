"""Holds part of the documents out for evaluation. `dataset` calls it; the spans it gives are what `pack` cuts into windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.data.shuffle import key, mix

Spans = npt.NDArray[np.int64]
"""[n, 3]: document, start, stop. In the order of documents, none empty, a document at most once."""


def split(lengths: npt.NDArray[np.int64], fraction: float, seed: int) -> tuple[Spans, Spans]:
    """Spans to train on and spans to evaluate on: disjoint, and every token is in one of them.

    Whole documents are held out, so that evaluation never asks for the rest of a text that was trained on, with one exception:
    of the last one drawn only the tail is, so that the fraction is met and even a single document can be split.
    """
    cuts = lengths.astype(np.int64)  # where in each document the held-out part begins: at its end, for most
    held_out = max(1, round(fraction * int(lengths.sum()))) if fraction > 0 else 0
    if held_out:
        # A hash of each index, rather than a shuffle of all: adding documents hardly changes which others are drawn.
        order = np.argsort(mix(np.arange(len(lengths), dtype=np.uint64) + np.uint64(key("held out", seed))))
        drawn = np.cumsum(lengths[order])
        last = int(np.searchsorted(drawn, held_out))
        cuts[order[:last]] = 0
        cuts[order[last]] = drawn[last] - held_out
    documents = np.arange(len(lengths), dtype=np.int64)
    train = np.stack([documents, np.zeros_like(cuts), cuts], axis=1)
    evaluation = np.stack([documents, cuts, lengths], axis=1)
    return train[cuts > 0], evaluation[cuts < lengths]
