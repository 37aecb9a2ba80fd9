"""AdamW on GPUs: one kernel for all parameters divides gradients, updates moments and master weights, and writes the model's weights in their
own format. It reads and writes each number once, whatever formats gradients, moments and weights have. The arithmetic is that of
torch.optim.AdamW. Used by `optim/adamw`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.kernels.triton_support import operation

_BLOCK = 4096  # elements of one program


@dataclass(frozen=True, slots=True)
class AdamWRow:
    """One parameter."""

    value: Tensor
    """The master weights, in fp32."""
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    """Number of steps, which counts the present one already: an fp32 scalar."""
    weight: Tensor | None
    """The model's parameter, where it is a copy of the value in another format."""


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Of one step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw_(rows: Sequence[AdamWRow], settings: AdamWSettings, divisor: Tensor, skip: Tensor) -> None:
    """Update parameters on a GPU. `divisor`: of every gradient. `skip`: 1 changes nothing. Both are fp32 scalars on the device."""
    kinds: dict[tuple[torch.dtype | None, ...], list[AdamWRow]] = {}
    for row in rows:
        weight = None if row.weight is None else row.weight.dtype
        kinds.setdefault((row.gradient.dtype, row.mean.dtype, weight), []).append(row)
    for alike in kinds.values():
        _adamw_(
            [row.value for row in alike],
            [row.gradient for row in alike],
            [row.mean for row in alike],
            [row.square for row in alike],
            [row.step for row in alike],
            [row.weight for row in alike if row.weight is not None],
            divisor,
            skip,
            settings.learning_rate,
            settings.beta1,
            settings.beta2,
            settings.eps,
            settings.weight_decay,
        )


@operation("adamw_", mutates=("values", "means", "squares", "weights"))
def _adamw_(
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    weights: list[Tensor],
    divisor: Tensor,
    skip: Tensor,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    from phalanx.kernels.fused_adamw_triton import ELEMENT, adamw_kernel

    device = values[0].device
    columns = [values, gradients, means, squares, weights or values]
    assert all(tensor.is_contiguous() for column in columns for tensor in column), "parameters and gradients are contiguous"
    pointers = torch.tensor([[tensor.data_ptr() for tensor in column] for column in columns], dtype=torch.int64)
    align = 16 if not (pointers % 16).any() else min(tensor.element_size() for column in columns for tensor in column[:1])
    blocks = _blocks(tuple(value.numel() for value in values), device)
    taken = _stacked(steps).double()
    adamw_kernel[(len(blocks),)](
        pointers.pin_memory().to(device, non_blocking=True),
        blocks,
        (learning_rate / (1 - beta1**taken)).float(),
        (1 - beta2**taken).sqrt().float(),
        divisor,
        skip,
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        eps,
        1 - learning_rate * weight_decay,
        len(values),
        GRADIENT=ELEMENT[gradients[0].dtype],
        MOMENT=ELEMENT[means[0].dtype],
        WEIGHT=ELEMENT[weights[0].dtype] if weights else None,
        ALIGN=align,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@_adamw_.register_fake
def _(values, gradients, means, squares, steps, weights, divisor, skip, learning_rate, beta1, beta2, eps, weight_decay):  # type: ignore[no-untyped-def]
    return None


def _stacked(scalars: Sequence[Tensor]) -> Tensor:
    """Scalars as one tensor; without a copy where they are neighbors in memory."""
    first, size = scalars[0], scalars[0].element_size()
    if all(scalar.data_ptr() == first.data_ptr() + index * size for index, scalar in enumerate(scalars)):
        return first.as_strided((len(scalars),), (1,))
    return torch.stack(list(scalars))


@lru_cache(maxsize=8)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each program: its parameter, the first of its elements, and the number of elements of the parameter."""
    counts = [-(-size // _BLOCK) for size in sizes]
    which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(counts))
    first = torch.cat([torch.arange(count) for count in counts]) * _BLOCK
    return torch.stack((which, first, torch.tensor(sizes)[which]), dim=1).to(device)
