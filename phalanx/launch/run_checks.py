"""Whether a run's nodes can be what its run file says, seen before anything starts. Called by `launch/prepare`."""

from __future__ import annotations

import ipaddress
import socket

from phalanx.data.dataset import Dataset
from phalanx.spec.errors import toml
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.spec.sources import kind


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


_WORTH_SAYING = 0.001  # share of padding under which packing is as good as full


def too_little_data(run: Run, data: Dataset) -> list[str]:
    """Where epochs are limited, the text may end before the run does."""
    limit, need = data.train.limit, run.steps * run.batch
    if limit is None or limit >= need:
        return []
    # In a mixture the first source to run out ends it; which one that is follows from the weights.
    limited = [(f"data.mix.{source.name}.epochs", source.epochs) for source in run.data.mix if source.epochs is not None]
    keys = limited if run.data.mix else [("data.epochs", run.data.epochs or 1.0)]
    named = " and ".join(f"{key} = {epochs:g}" for key, epochs in keys)
    return [
        f"{named} of {sources(run)} gives {limit:,} sequences, but {run.steps:,} steps of {run.batch} need {need:,}: "
        f"set train.steps to at most {limit // run.batch}, allow more epochs, or give more text."
    ]


def data_notices(data: Dataset) -> list[str]:
    """Records that were left out, by source, and how full the windows are."""
    said: list[str] = []
    for name, reasons in data.skipped.items():
        if total := sum(reasons.values()):
            each = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
            said.append(f"{total:,} record{'s' if total > 1 else ''} of {name} {_were(total)} left out: {each}.")
    if data.padding_ratio > _WORTH_SAYING:
        said.append(f"Packing fills {100 * (1 - data.padding_ratio):.1f} % of the windows; the rest is padding.")
    return said


def sources(run: Run) -> str:
    """The run's text in words, as its table names it."""
    if run.data.mix:
        return ", ".join(f"[data.mix.{source.name}]" for source in run.data.mix)
    return f'data.source = "{kind(run.data)}"'


def _were(count: int) -> str:
    return "were" if count > 1 else "was"
