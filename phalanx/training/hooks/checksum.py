"""Checksums of the bits of tensors, where the tensors are: one number for many of them, at the speed of reading them once.
`training/hooks/replica_check` compares them between ranks.

Bits are added as 64-bit integers, each column of 256 by itself, and every column of every tensor has an odd weight: one changed bit
always shows, and values that have changed places do, unless by whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_COLUMNS = 256
_SEED = 20_011  # any, as long as all ranks have the same


class Checksum:
    """Of tensors that stay where they are. Ranks that hold the same tensors in the same order get the same number."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._wide: list[Tensor] = []
        self._unaligned: list[Tensor] = []
        self._rest: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            each = max(8 // flat.element_size(), 1) * _COLUMNS
            whole = flat.numel() // each * each
            if whole:
                aligned = flat.storage_offset() * flat.element_size() % 8 == 0
                (self._wide if aligned else self._unaligned).append(_rows(flat[:whole]) if aligned else flat[:whole])
            if whole < flat.numel():
                self._rest.setdefault(flat.dtype, []).append(flat[whole:])
        for dtype, parts in self._rest.items():
            short = -sum(part.numel() for part in parts) % max(8 // dtype.itemsize, 1)
            parts.append(torch.zeros(short, dtype=dtype, device=parts[0].device))

    @torch.no_grad()
    def now(self) -> Tensor:
        """As the tensors are at this moment: an int64 scalar beside them. Overflows wrap around, everywhere alike."""
        terms = []
        if self._wide or self._unaligned:
            # No other way to see two numbers as one where the first of them has an odd place.
            sums = [rows.sum(0) for rows in self._wide] + [_rows(flat.clone()).sum(0) for flat in self._unaligned]
            terms.append(torch.stack(sums))
        terms += [torch.cat(parts).view(torch.int64) for parts in self._rest.values()]
        if not terms:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack([(term * _odd(tuple(term.shape), term.device)).sum() for term in terms]).sum()


def _rows(flat: Tensor) -> Tensor:
    return flat.view(torch.int64).view(-1, _COLUMNS)


@lru_cache(maxsize=64)
def _odd(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Weights: the same on every rank."""
    dice = torch.Generator().manual_seed(_SEED)
    return (torch.randint(-(1 << 62), 1 << 62, shape, generator=dice) | 1).to(device)
