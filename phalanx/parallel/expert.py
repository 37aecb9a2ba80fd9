"""How many tokens went to each expert, over all micro-batches and ranks. `training/step` sums it along with a step's totals.

It knows no router: what it is given are the tensors that routers count in, one per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Loads:
    """The counts of all layers as one flat row, so that they travel with what the ranks sum anyway."""

    def __init__(self, counts: Sequence[Tensor] = ()):
        self._counts = list(counts)
        self._sizes = [count.numel() for count in self._counts]

    @property
    def size(self) -> int:
        """Experts of all layers together."""
        return sum(self._sizes)

    def reset(self) -> None:
        for count in self._counts:
            count.zero_()

    def put(self, row: Tensor) -> None:
        """Write this rank's counts into a row of `size` values. In fp64 their sum over the ranks is exact."""
        for count, place in zip(self._counts, row.split(self._sizes), strict=True):
            place.copy_(count)

    def split(self, row: Tensor) -> list[Tensor]:
        """The parts of such a row that belong to each layer."""
        return list(row.split(self._sizes)) if self._sizes else []


def imbalance(loads: Sequence[Tensor]) -> Tensor:
    """Load of the fullest expert over the mean, in the layer where that is worst; 1 is perfect balance."""
    return torch.stack([load.max() / load.mean().clamp(min=1e-9) for load in loads]).max()
