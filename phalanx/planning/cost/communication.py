"""What messages cost: a group of ranks, the links it spans, and the collectives on them. `planning/cost/step_time` calls it.

Ranks are numbered with tensor groups innermost, then context, shard, data, and pipeline stages the farthest apart; an island of fast
links holds neighbouring ranks. Rings: an all-gather or a reduce-scatter of n bytes passes n·(size-1)/size bytes through each rank's
link, an all-reduce twice that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.machines.rates import Column, Rates

BUS = 64e9
"""Bytes/s of one direction below which devices share a bus and its switches, instead of having links of their own."""


class Group(NamedTuple):
    """Ranks that talk: what a gathered byte costs each of them, and what a collective costs however short it is."""

    per_byte: Column
    """Seconds of an all-gather or reduce-scatter per byte of the whole."""
    latency: Column
    """Seconds of one, before the first byte."""
    nodes: Column
    """Islands that the group spans."""


def group(work: JobTable, rates: Rates, size: Column, stride: Column = 1) -> Group:
    """`size` ranks, `stride` apart. Out of an island each of its members drives a network card of its own: rings use them all."""
    if not np.any(np.asarray(size) > 1):
        return Group(0.0, 0.0, 1.0)
    inside = np.maximum(np.minimum(work.island / stride, size), 1.0)
    nodes = size / inside
    near = _near(work, rates)
    bandwidth = np.where(nodes > 1, np.minimum(near, inside * (work.network * rates.network)), near)
    latency = np.where(size > 1, (rates.latency - rates.far_latency) + rates.far_latency * nodes, 0.0)
    return Group((size - 1) / (size * bandwidth), latency, nodes)


def _near(work: JobTable, rates: Rates) -> Column:
    """Bytes/s of a rank inside its island."""
    shared = np.where(np.asarray(work.island_bandwidth) < BUS, rates.bus, 1.0)
    return work.island_bandwidth * rates.island * shared


def gather(wires: Group, size: Column) -> Column:
    """Seconds of an all-gather of `size` bytes in all, or of a reduce-scatter of them."""
    return size * wires.per_byte + wires.latency


def reduce(wires: Group, size: Column) -> Column:
    """Seconds of an all-reduce of `size` bytes."""
    return 2 * gather(wires, size)


def exchange(work: JobTable, rates: Rates, size: Column, copies: Column, stride: Column = 1) -> Column:
    """Seconds of an all-to-all over `size` ranks in which each rank sends `copies` bytes, evenly to all of them.

    Inside the island its links carry them; what leaves goes through the rank's own card. A token goes to an island once, however
    many of its experts live there, and at most to `active_groups` of them.
    """
    inside = np.minimum(np.maximum(work.island / stride, 1.0), size)
    nodes = size / inside
    groups = np.where(np.asarray(work.active_groups) > 0, work.active_groups, 4)
    most = np.maximum(np.minimum(np.minimum(work.active, nodes), groups), 1)
    away = np.where(nodes > 1, copies * most / np.maximum(work.active, 1) * (1 - 1 / nodes), 0.0)
    near = copies * (1 - 1 / inside) / _near(work, rates)
    far = away / (work.network * rates.network)
    latency = np.where(size > 1, rates.latency + rates.far_latency * (nodes - 1), 0.0)
    return np.maximum(near, far) + latency


def hop(work: JobTable, rates: Rates, size: Column, stride: Column) -> Column:
    """Seconds of a message of `size` bytes to the rank `stride` further."""
    near = stride < work.island
    bandwidth = np.where(near, _near(work, rates), work.network * rates.network)
    return size / bandwidth + rates.latency
