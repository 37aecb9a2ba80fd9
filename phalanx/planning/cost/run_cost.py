"""How much of the time counts when devices fail and saving takes time: the closed form, the interval that is best, and what saving and
recovering cost in this very runtime. Numbers or columns, like `planning/cost/job_table`.

`planning/search/search` puts it into each option; simulations are held against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Column

DETECT = 10.0
"""Seconds until a failure is noticed: 2.5 without a heartbeat where a node is lost, longer where connections break and ranks only wait."""
START = 20.0
"""Seconds of starting processes anew, importing and building the model; a spare stands by with its processes started."""
CONNECT = 2e-3
"""Seconds for each rank of building process groups anew: 33 for 16,384, as careful set-ups report; careless ones take many minutes."""
PAUSE = 0.05
"""Seconds that ranks wait for each other around a save, whatever its size."""
_LEAST = 1e-9
"""Goodput of a cluster that fails faster than it starts: nothing, but days and dollars stay numbers."""
_COPIES = 2
"""Of a rank's state in host memory: its own, and one for a neighbouring node."""
_HOST_SHARE = 0.5
"""Of a host's memory that copies may fill; data, buffers and the system need the rest."""


def goodput(interval: Column, mtbf: Column, save: Column, restart: Column) -> Column:
    """Part of the time that becomes progress, when failures come at random with a mean of `mtbf` seconds between them.

    `interval`: seconds of training between two saves; `save`: seconds that training stands still for one; `restart`: seconds from a
    failure to training again. Failures strike during saves and restarts too, and what was trained since the last save is trained again.
    Where a save is written behind training and counts only then, the seconds of writing belong to `restart`: that much more is lost.
    """
    with np.errstate(over="ignore"):  # failures that leave nothing: the time they take is infinite
        spent = mtbf * np.expm1((interval + save) / mtbf) * np.exp(restart / mtbf)
    return interval / spent


def best_interval(mtbf: Column, save: Column) -> Column:
    """The interval with the best goodput, after Daly's expansion; saves that take longer than failures let them leave only the mtbf."""
    ratio = save / (2 * mtbf)
    good = np.sqrt(2 * save * mtbf) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - save
    return np.where(ratio < 1, good, mtbf) if np.ndim(ratio) else float(good if ratio < 1 else mtbf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkeep:
    """What failing and saving cost a run. Seconds, numbers or columns."""

    mtbf: Column
    """Between two interruptions of the whole job; infinite where nothing fails."""
    stall: Column
    """That training stands still for one copy of the state."""
    restart: Column
    """From a failure to training again."""
    save_every: Column | None
    """Between two copies; None: nothing fails."""
    goodput: Column
    in_memory: Column
    """Whether copies are kept in the hosts' memory, on two nodes each; else they go to storage."""


def upkeep(hardware: Hardware, *, state: Column, ranks: Column, step: Column) -> Upkeep:
    """Of a job whose ranks hold `state` bytes each that have to be saved, with steps of `step` seconds."""
    room = _HOST_SHARE * hardware.host_memory / hardware.node
    in_memory = (_COPIES * state <= room) & (hardware.node < ranks)  # a single node has no neighbour to keep a copy
    stall = PAUSE + state / hardware.host_bandwidth
    written = state * hardware.node / hardware.storage
    reload = _choose(in_memory, state / hardware.network, written)
    restart = DETECT + START + CONNECT * ranks + reload
    if hardware.failures is None or hardware.failures.rate == 0:
        return Upkeep(mtbf=np.inf, stall=stall, restart=restart, save_every=None, goodput=1.0, in_memory=in_memory)
    mtbf = 3600.0 / (hardware.failures.rate * ranks)
    # Not oftener than every step, and to storage not before the last save is written, as training goes on behind it.
    behind = _choose(in_memory, 0.0, written)
    every = np.maximum(best_interval(mtbf, stall), np.maximum(step, behind))
    return Upkeep(
        mtbf=mtbf,
        stall=stall,
        restart=restart,
        save_every=every,
        goodput=np.maximum(goodput(every, mtbf, stall, restart + behind), _LEAST),
        in_memory=in_memory,
    )


def assumptions(hardware: Hardware) -> list[str]:
    """What `upkeep` takes for granted, in sentences."""
    if hardware.failures is None:
        return ["Nothing fails: no rates are known for these machines."]
    days = 1 / hardware.failures.rate / 24
    return [
        f"A device interrupts a run once in {days:,.0f} days ({hardware.failures.source}).",
        f"A failure is noticed within {DETECT:.0f} s, spares stand by, and starting again takes {START:.0f} s and {CONNECT * 1000:.0f} ms per "
        "rank; states are copied into the memory of two nodes where it has room, else to storage.",
    ]


def _choose(which: Any, yes: Column, no: Column) -> Column:
    return np.where(which, yes, no) if np.ndim(which) else (yes if which else no)


_DAY = 86400.0
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of a whole run, what failures and saving waste included."""

    days: Column
    gpu_hours: Column
    dollars: Column | None
    """None: no price is known."""
    joules: Column | None
    """At the nodes' full power, without cooling and conversion; None: no power is known."""

    @property
    def kwh(self) -> Column | None:
        return None if self.joules is None else self.joules / _JOULES_PER_KWH


def cost(hardware: Hardware, *, step: Column, steps: Column, goodput: Column = 1.0, devices: Column | None = None) -> Cost:
    """Of `steps` steps of `step` seconds on `devices` of the cluster, left out: on all. `goodput`: part of the time that counts."""
    rented = hardware.gpus if devices is None else devices
    seconds = step * steps / goodput
    hours = rented * seconds / 3600
    return Cost(
        days=seconds / _DAY,
        gpu_hours=hours,
        dollars=None if hardware.price is None else hours * hardware.price,
        joules=None if hardware.power is None else rented * seconds * hardware.power,
    )
