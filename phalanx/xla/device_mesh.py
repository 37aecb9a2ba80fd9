"""The devices of a run as a mesh of JAX: an axis for each degree of the layout, and further ones where experts regroup the devices. The devices of a
process are neighbors in it."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout

AXES = ("data", "shard", "context", "tensor")
"""Outermost first, as in a layout: devices of one tensor group are neighbors."""
SAMPLES = ("data", "shard")
"""Axes whose devices read other samples."""
POSITIONS = ("context", "tensor")
"""Axes that divide the positions of a sequence where nothing but single tokens is computed."""
_REGROUPED = ("expert_tensor", "expert")
"""Degrees that regroup devices, innermost first."""


def device_mesh(layout: Layout) -> Mesh:
    """The first devices of all processes, in the order of the layout. Raises RunError if there are too few."""
    devices = jax.devices()
    if len(devices) < layout.ranks:
        raise RunError(
            f"The layout has {layout.ranks} devices, but XLA sees {len(devices)} of kind {devices[0].platform}: lower layout.data, or "
            'set engine.name = "torch".'
        )
    sizes = axis_sizes(layout)
    return Mesh(np.array(devices[: layout.ranks]).reshape(tuple(sizes.values())), tuple(sizes))


def platform_of(mesh: Mesh) -> str:
    """ "cpu", "cuda" or "tpu"."""
    platform: str = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def axis_sizes(layout: Layout) -> dict[str, int]:
    """The axes of the mesh, outermost first. Where experts are divided among a part of a degree's devices, the degree has another axis for them:
    "shard_expert" of 2 is a half or all of `layout.shard`. Neighbors divide experts first, so that tokens do not travel far."""
    rest = dict(zip(AXES, (layout.data or 1, layout.shard, layout.context, layout.tensor), strict=True))
    inner: dict[str, dict[str, int]] = {axis: {} for axis in AXES}
    for kind in _REGROUPED:
        missing = getattr(layout, kind)
        for axis in reversed(AXES):
            if (size := gcd(missing, rest[axis])) > 1:
                rest[axis], missing = rest[axis] // size, missing // size
                inner[axis] = {f"{axis}_{kind}": size} | inner[axis]
    return {name: size for axis in AXES for name, size in ({axis: rest[axis]} | inner[axis]).items()}


def mesh_axes(mesh: Mesh, *degrees: str) -> tuple[str, ...]:
    """The axes of the mesh that these degrees of the layout consist of. "expert_shard": those that divide the state of experts once more."""
    return tuple(
        axis for degree in degrees for axis in (_expert_shard(mesh) if degree == "expert_shard" else _named(mesh, degree))
    )


def _named(mesh: Mesh, degree: str) -> list[str]:
    return [axis for axis in mesh.axis_names if degree in (axis.partition("_")[0], axis.partition("_")[2])]


def _expert_shard(mesh: Mesh) -> list[str]:
    """Axes that do not divide experts, as many devices as `Layout.expert_shard` where they make up such a number."""
    missing, found = gcd(mesh_size(mesh, "shard"), mesh.size // mesh_size(mesh, *_REGROUPED)), []
    for axis in ("shard", "data", "context", "tensor"):
        if mesh.shape[axis] > 1 and missing % mesh.shape[axis] == 0:
            found.append(axis)
            missing //= mesh.shape[axis]
    return found


def mesh_size(mesh: Mesh, *degrees: str) -> int:
    """Devices along these degrees of the layout."""
    return prod(mesh.shape[axis] for axis in mesh_axes(mesh, *degrees))


def spec(mesh: Mesh, *dims: str | tuple[str, ...] | None) -> P:
    """What divides each dimension of an array: degrees of the layout, as axes of the mesh."""
    found = [mesh_axes(mesh, *([dim] if isinstance(dim, str) else dim or ())) for dim in dims]
    return P(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in found))


def zigzag(length: int, devices: int) -> npt.NDArray[np.int32]:
    """The position of each row of a sequence that devices divide so that each has an early and a late piece."""
    whole = np.arange(length, dtype=np.int32)
    if length % (2 * devices):
        raise ValueError(f"{devices} devices cannot share {length} positions in {2 * devices} equal pieces.")
    pieces = whole.reshape(2 * devices, -1)
    return pieces[[piece for index in range(devices) for piece in (index, 2 * devices - 1 - index)]].reshape(-1)


def own_devices(mesh: Mesh) -> list[Any]:
    """The devices of this process, in the order of the mesh."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def sharding(mesh: Mesh, *dims: str | tuple[str, ...] | None) -> NamedSharding:
    """Of an array whose dimensions are divided over these degrees of the layout."""
    return NamedSharding(mesh, spec(mesh, *dims))


def gather(value: jax.Array, whole: NamedSharding, divided: NamedSharding) -> jax.Array:
    """The value as `whole` has it. Its gradient lies as `divided` has it: each device adds up its part, where the transpose of a plain constraint would
    add up the whole on every device."""

    @jax.custom_vjp
    def placed(value: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(value, whole)

    def placed_gradient(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.with_sharding_constraint(gradient, divided),)

    placed.defvjp(lambda value: (placed(value), None), placed_gradient)
    return placed(value)
