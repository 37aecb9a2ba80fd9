"""Where each parameter lies: names of dimensions (`AXES` of the model) to axes of the device mesh. ZeRO is where gradients and moments lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from phalanx.spec.cut_plan import Axes, CutPlan, dim_names
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

_TENSOR = ("heads", "kv_heads", "ffn", "vocab")
"""Dimensions that the tensor axis divides."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How the arrays of one parameter are divided."""

    value: P
    gradient: P
    moments: P


def placements(shapes: Mapping[str, Sequence[int]], axes: Axes, layout: Layout, spec: ModelSpec) -> dict[str, Placement]:
    """Of every parameter. Moments are divided over `shard` in any case, gradients with ZeRO-2 and 3, values with ZeRO-3."""
    cuts = {name: _tensor_dims(shape, dim_names(name, axes), layout.tensor, spec) for name, shape in shapes.items()}
    return _placed(shapes, cuts, layout)


def cut_placements(shapes: Mapping[str, Sequence[int]], plan: CutPlan | None, layout: Layout) -> dict[str, Placement]:
    """The same for a module that was not written for it: the tensor axis divides what the inferred plan divides, where it divides evenly. Of
    a fused matrix every device has a run of rows, and not a part of each segment: the compiler moves what a slice needs."""
    cuts: dict[str, list[str | None]] = {}
    for name, shape in shapes.items():
        cut = None if plan is None else plan.params.get(name)
        cuts[name] = [None] * len(shape)
        if cut is not None and layout.tensor > 1 and shape[cut.dim] % layout.tensor == 0:
            cuts[name][cut.dim] = "tensor"
    return _placed(shapes, cuts, layout)


def _placed(
    shapes: Mapping[str, Sequence[int]], cuts: Mapping[str, Sequence[str | None]], layout: Layout
) -> dict[str, Placement]:
    """Every parameter with what the tensor axis divides of it, and `shard` by the stage of ZeRO."""
    found = {}
    for name, shape in shapes.items():
        sharded = _with_shard(shape, cuts[name], layout.shard)
        values, gradients = (P(*(sharded if layout.zero >= stage else cuts[name])) for stage in (3, 2))
        found[name] = Placement(values, gradients, P(*sharded))
    return found


def _tensor_dims(shape: Sequence[int], dims: Sequence[object], tensor: int, spec: ModelSpec) -> list[str | None]:
    """The dimension that the tensor axis divides: the first whose name says so and whose length is a multiple; heads stay whole."""
    cut: list[str | None] = [None] * len(shape)
    if tensor == 1 or "expert" in dims:
        return cut
    heads = {"heads": spec.heads, "kv_heads": spec.kv}
    for index, dim in enumerate(dims):
        if dim in _TENSOR and shape[index] % tensor == 0 and heads.get(str(dim), tensor) % tensor == 0:
            cut[index] = "tensor"
            break
    return cut


def _with_shard(shape: Sequence[int], cut: Sequence[str | None], shard: int) -> list[str | None]:
    """One more dimension over `shard`: the first that is still whole and divides; else all devices of the axis hold the whole."""
    sharded = list(cut)
    for index, length in enumerate(shape):
        if shard > 1 and sharded[index] is None and length and length % shard == 0:
            sharded[index] = "shard"
            break
    return sharded
