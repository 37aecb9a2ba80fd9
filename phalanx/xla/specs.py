"""Where each parameter lies: names of dimensions (`AXES` of the model) to degrees of the layout, which `xla/device_mesh` makes axes of the mesh. ZeRO is
where gradients and moments lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    found = {}
    for name, shape in shapes.items():
        dims = dim_names(name, axes)
        if "expert" in dims:
            found[name] = _placement(shape, _expert_dims(dims, layout), layout, "expert_shard", layout.expert_shard)
        else:
            found[name] = _placement(shape, _tensor_dims(shape, dims, layout.tensor, spec), layout, "shard", layout.shard)
    return found


def cut_placements(shapes: Mapping[str, Sequence[int]], plan: CutPlan | None, layout: Layout) -> dict[str, Placement]:
    """The same for a module that was not written for it: the tensor axis divides what the inferred plan divides, where it divides evenly. Of
    a fused matrix every device has a run of rows, and not a part of each segment: the compiler moves what a slice needs."""
    found = {}
    for name, shape in shapes.items():
        cut = None if plan is None else plan.params.get(name)
        whole: list[str | None] = [None] * len(shape)
        if cut is not None and layout.tensor > 1 and shape[cut.dim] % layout.tensor == 0:
            whole[cut.dim] = "tensor"
        found[name] = _placement(shape, whole, layout, "shard", layout.shard)
    return found


def _placement(shape: Sequence[int], whole: Sequence[str | None], layout: Layout, degree: str, size: int) -> Placement:
    """`whole`: what divides the parameter itself; `degree` divides it once more by the stage of ZeRO."""
    sharded = _with_shard(shape, whole, degree, size)
    values, gradients = (P(*(sharded if layout.zero >= stage else whole)) for stage in (3, 2))
    return Placement(values, gradients, P(*sharded))


def gathered(dims: Iterable[str | None]) -> list[str | None]:
    """What divides a parameter while it computes: no longer `shard`. Left alone, the compiler may divide activations as the parameter is divided."""
    return [None if dim in ("shard", "expert_shard") else dim for dim in dims]


def _tensor_dims(shape: Sequence[int], dims: Sequence[object], tensor: int, spec: ModelSpec) -> list[str | None]:
    """The dimension that the tensor axis divides: the first whose name says so and whose length is a multiple; heads stay whole."""
    cut: list[str | None] = [None] * len(shape)
    if tensor == 1:
        return cut
    heads = {"heads": spec.heads, "kv_heads": spec.kv}
    for index, dim in enumerate(dims):
        if dim in _TENSOR and shape[index] % tensor == 0 and heads.get(str(dim), tensor) % tensor == 0:
            cut[index] = "tensor"
            break
    return cut


def _expert_dims(dims: Sequence[object], layout: Layout) -> list[str | None]:
    """Of a stack of matrices, one for each expert."""
    degrees = {"expert": layout.expert, "ffn": layout.expert_tensor}
    names = {"expert": "expert", "ffn": "expert_tensor"}
    return [names[str(dim)] if degrees.get(str(dim), 1) > 1 else None for dim in dims]


def _with_shard(shape: Sequence[int], cut: Sequence[str | None], degree: str, devices: int) -> list[str | None]:
    """One more dimension over these devices: the first that is still whole and divides; else all of them hold the whole."""
    sharded = list(cut)
    for index, length in enumerate(shape):
        if devices > 1 and sharded[index] is None and length and length % devices == 0:
            sharded[index] = degree
            break
    return sharded
