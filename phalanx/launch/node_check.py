"""Whether a run's nodes can be what its run file says, seen before anything starts. Called by `launch/prepare`."""

from __future__ import annotations

import ipaddress
import socket

from phalanx.spec.dump import toml
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run


def address_problems(run: Run) -> list[str]:
    """Why the run's processes cannot listen at cluster.bind; nothing where they can, which has been tried."""
    bind, key = run.cluster.bind, f"cluster.bind = {toml(run.cluster.bind)}"
    remedy = 'name one that it has, such as "127.0.0.1", or leave it out.'
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return [f"{key} is no address: {remedy}"]
    if address.is_unspecified:
        return [f"{key} means every interface, and so everybody who reaches this machine: {remedy}"]
    if address.version == 6:
        return [f"{key} is an IPv6 address, and ranks meet by IPv4: {remedy}"]
    try:
        socket.create_server((bind, 0)).close()
    except OSError as error:
        return [f"{key} is not an address of this machine ({error.strerror}): {remedy}"]
    return []


def node_problems(run: Run, plan: Plan) -> list[str]:
    """Nodes that would have nothing to do, and were not said to be spare; and those of one machine that would share its GPUs."""
    nodes, spares = run.cluster.nodes, run.resilience.spares
    if nodes > 1 and plan.device == "cuda":
        return [
            f"cluster.nodes = {nodes} on this machine would give the same GPUs to several nodes: leave the key out, or set "
            'cluster.device = "cpu" to rehearse several nodes.'
        ]
    if nodes - spares <= plan.ranks:
        return []
    beside = f" - resilience.spares = {spares}" if spares else ""
    return [
        f"cluster.nodes = {nodes}{beside} are {nodes - spares} nodes to train on, but the layout has {plan.ranks} "
        f"rank{'s' if plan.ranks > 1 else ''}: set cluster.nodes to at most {plan.ranks + spares}, raise a degree of [layout] such as "
        f"layout.data, or keep more of them idle with resilience.spares = {nodes - plan.ranks}."
    ]
