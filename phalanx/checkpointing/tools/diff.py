"""Two checkpoints compared, tensor by tensor, whatever layouts they were saved on; a block of each is in memory at a time.

Called by `phalanx checkpoint diff`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpointing.restore import CheckpointReader

BESIDE = ("step", "progress", "seed", "data", "replicas")
"""What is restored beside the tensors, and so belongs to the state. Who saved it and how it was laid out does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that is not the same in both."""

    name: str
    kind: str
    """only in A, only in B, shape, format or values."""
    a: str = ""
    """What A has, where it is not the values that differ."""
    b: str = ""
    unequal: int = 0
    """Values that differ in any bit."""
    values: int = 0
    """Of the whole tensor."""
    largest: float = 0.0
    """Largest absolute difference; infinite where only one of two values is a number."""
    relative: float = 0.0
    """Largest difference in relation to the larger of the two values."""


def compare(a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference | str]:
    """For each name in either: its difference, or just the name where the tensor is the same to the bit."""
    for name in sorted({*a.names, *b.names}):
        yield _compare(name, a, b) or name


def compare_metadata(a: CheckpointReader, b: CheckpointReader) -> dict[str, tuple[Any, Any]]:
    """What differs of the state that is not in tensors."""
    both = {key: (a.contents.get(key), b.contents.get(key)) for key in BESIDE}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def _compare(name: str, a: CheckpointReader, b: CheckpointReader) -> Difference | None:
    one, other = a.shape(name), b.shape(name)
    if one is None or other is None:
        return Difference(name=name, kind="only in B" if one is None else "only in A")
    if one != other:
        return Difference(name=name, kind="shape", a=str(list(one)), b=str(list(other)))
    formats = [str(saved.dtype(name)).removeprefix("torch.") for saved in (a, b)]
    unequal, largest, relative, values = 0, 0.0, 0.0, 0
    for first, last in a.parts(name):
        left, right = a.read(name, first, last), b.read(name, first, last)
        values += left.numel()
        count, absolute, in_relation = _differ(left, right)
        unequal += count
        largest, relative = max(largest, absolute), max(relative, in_relation)
    if not unequal and formats[0] == formats[1]:
        return None
    kind = "values" if formats[0] == formats[1] else "format"
    said = formats if kind == "format" else ["", ""]
    return Difference(
        name=name, kind=kind, a=said[0], b=said[1], unequal=unequal, values=values, largest=largest, relative=relative
    )


def _differ(a: Tensor, b: Tensor) -> tuple[int, float, float]:
    """How many values differ, and by how much at most, as such and in relation to the larger one."""
    if a.dtype == b.dtype:
        if torch.equal(_bits(a), _bits(b)):
            return 0, 0.0, 0.0
        differing = (_bits(a) != _bits(b)).view(a.numel(), -1).any(1)
    else:
        differing = a.double().view(-1) != b.double().view(-1)
    one, other = a.double().view(-1)[differing], b.double().view(-1)[differing]
    if not len(one):
        return 0, 0.0, 0.0
    apart = (one - other).abs()
    scale = torch.maximum(one.abs(), other.abs())
    apart[apart.isnan()] = torch.inf  # one of them is no number, or both are in different ways
    ratio = torch.where(apart == 0, 0.0, apart / scale)
    ratio[ratio.isnan()] = torch.inf
    return len(one), float(apart.max()), float(ratio.max())


def _bits(values: Tensor) -> Tensor:
    """A NaN is equal to itself as bits, and -0 is not 0."""
    return values.contiguous().view(-1).view(torch.uint8)
