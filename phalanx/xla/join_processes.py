"""Several processes as one system of JAX: where they meet, and which devices each of them brings. `worker/xla_rank` and `verification/xla_devices` call
it before anything else of JAX."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from phalanx.events import frames
from phalanx.events.frames import BlockingChannel
from phalanx.parallel.mesh import Mesh
from phalanx.spec.plan import Place, Plan

_MEETING_SECONDS = 300
"""Until all processes have come to the coordinator."""


def join(mesh: Mesh, plan: Plan) -> None:
    """All processes of `mesh` call it together, each once in its life: JAX cannot leave and join again. From then on each sees the devices of all.
    The coordinator is a thread of rank 0; its address travels through the store of the generation."""
    if mesh.ranks == 1:
        return
    first = mesh.place.local_rank * plan.devices_per_process
    # On CPUs the devices are virtual, and each process has its own.
    own = None if plan.device == "cpu" else list(range(first, first + plan.devices_per_process))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with _meeting_place(mesh) as address:
        jax.distributed.initialize(
            address,
            num_processes=mesh.ranks,
            process_id=mesh.rank,
            local_device_ids=own,
            cluster_detection_method="deactivate",  # the control plane has said everything
            coordinator_bind_address=address,
            initialization_timeout=_MEETING_SECONDS,
        )


def leave(mesh: Mesh) -> None:
    """Ends what `join` began, on all processes together: one that ends alone makes XLA abort the others."""
    if mesh.ranks > 1:
        jax.distributed.shutdown()


@contextmanager
def _meeting_place(mesh: Mesh) -> Iterator[str]:
    """The address of the coordinator, on every process: a free port of rank 0's host, by the address that the others reach. Rank 0 keeps it until the
    coordinator listens there, so that no other program gets it."""
    if mesh.rank:
        yield mesh.broadcast_object(None)
        return
    host, family = _own_host(mesh.place)
    with socket.socket(family) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the coordinator does
        kept.bind((host, 0))
        port = kept.getsockname()[1]
        yield mesh.broadcast_object(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _own_host(place: Place) -> tuple[str, int]:
    if place.token is None or place.store is None:  # all ranks are on this host
        return "127.0.0.1", socket.AF_INET
    channel = BlockingChannel((place.store[0], int(place.store[1])), place.token, frames.CONTROL)
    try:
        channel.send({"store": place.generation})
        return channel.own_host, channel.family
    finally:
        channel.close()
