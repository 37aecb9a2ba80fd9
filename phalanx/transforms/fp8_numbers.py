"""Matrices in fp8: values of 8 bits and the factor that they were multiplied by. `transforms/fp8`, `transforms/fp8_experts` and
`parallel/fp8_gather` round with it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scaling = Literal["tensor", "row"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TINY = 2.0**-80
"""A tensor whose largest value is below this counts as zero: its scale would overflow fp32."""


class Rounded(NamedTuple):
    """A matrix in fp8."""

    values: Tensor
    scale: Tensor
    """The factor it was multiplied by: one number, or one per row, [rows, 1]."""

    def t(self) -> Rounded:
        """The transpose; only with one scale per tensor."""
        return Rounded(self.values.t(), self.scale)


def rounded(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Rounded:
    """A matrix in fp8, or several. A product sums along the rows, so that the scale of a row can be divided out afterwards."""
    largest = x.abs().amax() if scaling == "tensor" else x.abs().amax(dim=-1, keepdim=True)
    scale = scale_of(largest, dtype)
    return Rounded(scaled(x, scale, dtype), scale)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor for numbers whose largest absolute value is this."""
    ideal = torch.finfo(dtype).max / largest.float().clamp(min=_TINY)
    # Clearing the mantissa rounds down to a power of two; multiplying by it is exact.
    return (ideal.view(torch.int32) & 0x7F800000).view(torch.float32)


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale.to(x.dtype)).to(dtype)
