"""The devices of a run as a mesh of JAX: an axis for each degree of the layout. The devices of a process are neighbors in it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout

AXES = ("data", "shard", "context", "tensor")
"""Outermost first, as in a layout: devices of one tensor group are neighbors."""
SAMPLES = ("data", "shard")
"""Axes whose devices read other samples."""


def device_mesh(layout: Layout) -> Mesh:
    """The first devices of all processes, in the order of the layout. Raises RunError if there are too few."""
    devices = jax.devices()
    if len(devices) < layout.ranks:
        raise RunError(
            f"The layout has {layout.ranks} devices, but XLA sees {len(devices)} of kind {devices[0].platform}: lower layout.data, or "
            'set engine.name = "torch".'
        )
    shape = (layout.data or 1, layout.shard, layout.context, layout.tensor)
    return Mesh(np.array(devices[: layout.ranks]).reshape(shape), AXES)


def own_devices(mesh: Mesh) -> list[Any]:
    """The devices of this process, in the order of the mesh."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def sharding(mesh: Mesh, *dims: str | tuple[str, ...] | None) -> NamedSharding:
    """Of an array whose dimensions are divided over these axes."""
    return NamedSharding(mesh, P(*dims))
