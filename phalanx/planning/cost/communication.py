"""Time of messages: groups of ranks, the links they span, and the collectives on them. `cost/step_time` calls it.

Ranks are numbered with tensor groups innermost, then context, shard, data and pipeline; an island of fast links holds
neighboring ranks. Collectives are rings: an all-gather or a reduce-scatter of n bytes sends n·(size-1)/size bytes over each
rank's link, an all-reduce twice that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.machines.rates import Column, Rates

BUS = 64e9
"""Bytes/s in one direction below which devices share a bus instead of having links of their own."""


class Group(NamedTuple):
    """A group of ranks, as collectives see it."""

    per_byte: Column
    """Seconds of an all-gather or reduce-scatter per byte of the whole tensor."""
    latency: Column
    """Seconds of a collective besides its bytes."""
    nodes: Column
    """Islands that the group spans."""


def group(jobs: JobTable, rates: Rates, size: Column, stride: Column = 1) -> Group:
    """A group of `size` ranks, `stride` apart. Between islands every member uses a network card of its own, and rings use
    all of them."""
    if not np.any(np.asarray(size) > 1):
        return Group(0.0, 0.0, 1.0)
    inside = np.maximum(np.minimum(jobs.island / stride, size), 1.0)
    nodes = size / inside
    near = _near(jobs, rates)
    bandwidth = np.where(nodes > 1, np.minimum(near, inside * (jobs.network * rates.network)), near)
    latency = np.where(size > 1, (rates.latency - rates.far_latency) + rates.far_latency * nodes, 0.0)
    return Group((size - 1) / (size * bandwidth), latency, nodes)


def _near(jobs: JobTable, rates: Rates) -> Column:
    """Bytes/s of a rank inside its island."""
    shared = np.where(np.asarray(jobs.island_bandwidth) < BUS, rates.bus, 1.0)
    return jobs.island_bandwidth * rates.island * shared


def gather(wires: Group, size: Column) -> Column:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in total."""
    return size * wires.per_byte + wires.latency


def reduce(wires: Group, size: Column) -> Column:
    """Seconds of an all-reduce of `size` bytes."""
    return 2 * gather(wires, size)


def exchange(jobs: JobTable, rates: Rates, size: Column, copies: Column, stride: Column = 1) -> Column:
    """Seconds of an all-to-all over `size` ranks in which each rank sends `copies` bytes, evenly to all of them.

    Inside the island the fast links carry them; the rest leaves through the rank's network card. A token is sent to an
    island once, however many of its experts are there, and to at most `active_groups` islands.
    """
    inside = np.minimum(np.maximum(jobs.island / stride, 1.0), size)
    nodes = size / inside
    groups = np.where(np.asarray(jobs.active_groups) > 0, jobs.active_groups, 4)
    most = np.maximum(np.minimum(np.minimum(jobs.active, nodes), groups), 1)
    away = np.where(nodes > 1, copies * most / np.maximum(jobs.active, 1) * (1 - 1 / nodes), 0.0)
    near = copies * (1 - 1 / inside) / _near(jobs, rates)
    far = away / (jobs.network * rates.network)
    latency = np.where(size > 1, rates.latency + rates.far_latency * (nodes - 1), 0.0)
    return np.maximum(near, far) + latency


def hop(jobs: JobTable, rates: Rates, size: Column, stride: Column) -> Column:
    """Seconds of a message of `size` bytes to the rank `stride` away."""
    near = stride < jobs.island
    bandwidth = np.where(near, _near(jobs, rates), jobs.network * rates.network)
    return size / bandwidth + rates.latency
