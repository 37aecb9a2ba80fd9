"""Compares two checkpoints tensor by tensor, whatever layouts they were saved on, with one block of each in memory. Called by
`phalanx checkpoint diff`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.checkpointing.checkpoint_info import Difference
from phalanx.checkpointing.format import Marker
from phalanx.checkpointing.restore import CheckpointReader


def compare(a: CheckpointReader, b: CheckpointReader) -> Iterator[Difference | str]:
    """For each name in either: its difference, or only the name if the tensor is bitwise equal."""
    for name in sorted({*a.names, *b.names}):
        yield _compare(name, a, b) or name


def compare_metadata(a: CheckpointReader, b: CheckpointReader) -> dict[str, tuple[object, object]]:
    """What differs in the part of the state that is not in tensors. Version and layout of the run are not part of the state."""
    first, second = _state(a.marker), _state(b.marker)
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def _state(marker: Marker) -> dict[str, object]:
    run = marker.run
    return {"step": marker.step, "progress": run.progress, "seed": run.seed, "data": run.data, "replicas": run.replicas}


def _compare(name: str, a: CheckpointReader, b: CheckpointReader) -> Difference | None:
    shape_a, shape_b = a.shape(name), b.shape(name)
    if shape_a is None or shape_b is None:
        return Difference(name=name, kind="only in B" if shape_a is None else "only in A")
    if shape_a != shape_b:
        return Difference(name=name, kind="shape", a=str(list(shape_a)), b=str(list(shape_b)))
    formats = [str(reader.dtype(name)).removeprefix("torch.") for reader in (a, b)]
    unequal, largest, relative, values = 0, 0.0, 0.0, 0
    for first, last in a.row_ranges(name):
        left, right = a.read(name, first, last), b.read(name, first, last)
        values += left.numel()
        count, absolute, ratio = _differ(left, right)
        unequal += count
        largest, relative = max(largest, absolute), max(relative, ratio)
    same_format = formats[0] == formats[1]
    if not unequal and same_format:
        return None
    kind, (format_a, format_b) = ("values", ("", "")) if same_format else ("format", formats)
    return Difference(
        name=name, kind=kind, a=format_a, b=format_b, unequal=unequal, values=values, largest=largest, relative=relative
    )


def _differ(a: Tensor, b: Tensor) -> tuple[int, float, float]:
    """(number of values that differ, largest absolute difference, largest relative difference)."""
    if a.dtype == b.dtype:
        if torch.equal(_bits(a), _bits(b)):
            return 0, 0.0, 0.0
        differing = (_bits(a) != _bits(b)).view(a.numel(), -1).any(1)
    else:
        differing = a.double().view(-1) != b.double().view(-1)
    left, right = a.double().view(-1)[differing], b.double().view(-1)[differing]
    if not len(left):
        return 0, 0.0, 0.0
    apart = (left - right).abs()
    scale = torch.maximum(left.abs(), right.abs())
    apart[apart.isnan()] = torch.inf  # one is NaN, or both are NaN or infinite with different bits
    ratio = torch.where(apart == 0, 0.0, apart / scale)
    ratio[ratio.isnan()] = torch.inf
    return len(left), float(apart.max()), float(ratio.max())


def _bits(values: Tensor) -> Tensor:
    """As bits, a NaN equals itself, and -0 differs from 0."""
    return values.contiguous().view(-1).view(torch.uint8)
