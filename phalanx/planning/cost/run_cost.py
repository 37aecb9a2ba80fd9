"""Goodput, price and energy of a whole run: the cost of failures and saving in closed form, and the best checkpoint
interval. `search/candidate` adds the result to each candidate; tests compare
it with simulations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phalanx.planning.machines.cluster import Hardware
from phalanx.spec.layout import Layout

DETECT = 10.0
"""Seconds until a failure is detected: 2.5 by a lost node's missing heartbeat, longer where connections break."""
START = 20.0
"""Seconds to start processes, import and build the model. A spare node has its processes started."""
CONNECT = 2e-3
"""Seconds per rank to build the process groups: 33 for 16,384 ranks in careful setups; careless ones take many minutes."""
PAUSE = 0.05
"""Seconds that ranks wait for each other around a save, whatever its size."""
_LEAST = 1e-9
"""Goodput of a cluster that fails faster than it starts: almost zero, so that days and dollars stay finite."""
_COPIES = 2
"""Copies of a rank's state in host memory: its own, and one of a neighboring node."""
_HOST_SHARE = 0.5
"""Fraction of a host's memory that copies may fill; data, buffers and the system need the rest."""


def goodput(interval: float, mtbf: float, save: float, restart: float) -> float:
    """Fraction of the time that becomes progress, with random failures and a mean of `mtbf` seconds between them.

    `interval`: seconds of training between two saves; `save`: seconds that training stalls for one; `restart`: seconds from
    a failure to training again. Failures also hit saves and restarts, and everything since the last save is trained again.
    Where a save is written in the background and counts only when written, add the seconds of writing to `restart`.
    """
    with np.errstate(over="ignore"):  # failures that leave nothing: the time they take is infinite
        spent = mtbf * np.expm1((interval + save) / mtbf) * np.exp(restart / mtbf)
    return float(interval / spent)


def best_interval(mtbf: float, save: float) -> float:
    """The interval with the best goodput, by Daly's expansion; the mtbf where a save takes twice as long as that or longer."""
    ratio = save / (2 * mtbf)
    good = math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save
    return good if ratio < 1 else mtbf


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkeep:
    """What failures and saving cost a run, in seconds."""

    mtbf: float
    """Between two interruptions of the whole job; infinite where nothing fails."""
    stall: float
    """Training stalls this long for one copy of the state."""
    restart: float
    """From a failure to training again."""
    save_every: float | None
    """Between two copies; None: nothing fails, or nothing is saved."""
    goodput: float
    in_memory: bool
    """Whether copies are in host memory, on two nodes each; else they go to storage, if the run saves."""


def saved_bytes(parameters: int, layout: Layout) -> float:
    """Bytes that a rank saves, which only one replica does: its part of the weights and Adam's two moments, in fp32."""
    return 12.0 * parameters / (layout.pipeline * layout.tensor * layout.shard)


def upkeep(hardware: Hardware, *, state: float, ranks: int, step: float, unsaved: float | None = None) -> Upkeep:
    """Upkeep of a job whose ranks each have `state` bytes to save, with steps of `step` seconds.

    `unsaved`: of a run that saves no checkpoints, the seconds of training that a failure undoes at most where memory has no copies.
    """
    room = _HOST_SHARE * hardware.host_memory / hardware.node
    in_memory = _COPIES * state <= room and hardware.node < ranks  # a single node has no neighbour to keep a copy
    stall = PAUSE + state / hardware.host_bandwidth
    written = state * hardware.node / hardware.storage
    restart = DETECT + START + CONNECT * ranks + (state / hardware.network if in_memory else written)
    if hardware.failures is None or hardware.failures.rate == 0:
        return Upkeep(mtbf=math.inf, stall=stall, restart=restart, save_every=None, goodput=1.0, in_memory=in_memory)
    mtbf = 3600.0 / (hardware.failures.rate * ranks)
    # Not more often than every step, and to storage not before the last save is written in the background.
    behind = 0.0 if in_memory else written
    every = max(best_interval(mtbf, stall), step, behind)
    if unsaved is not None and not in_memory:
        every, stall, behind, restart = unsaved, 0.0, 0.0, restart - written
    return Upkeep(
        mtbf=mtbf,
        stall=stall,
        restart=restart,
        save_every=every if unsaved is None else None,
        goodput=max(goodput(every, mtbf, stall, restart + behind), _LEAST),
        in_memory=in_memory,
    )


def failure_assumptions(hardware: Hardware, *, saves: bool = True) -> list[str]:
    """Sentences on what `upkeep` assumes of a run that saves checkpoints, or of one that does not."""
    if hardware.failures is None:
        return ["Nothing fails: no rates are known for these machines."]
    return [
        hardware.failures.sentence,
        f"A failure is noticed within {DETECT:.0f} s, spares stand by, and starting again takes {START:.0f} s and {CONNECT * 1000:.0f} ms per "
        f"rank; states are copied into the memory of two nodes where it has room, else {'to storage' if saves else 'nowhere'}.",
    ]


def price_and_energy(hardware: Hardware, devices: int, seconds: float) -> tuple[float | None, float | None]:
    """US dollars of this many devices over this time, and joules at the nodes' full power, without cooling and conversion; None where no
    price or power is known."""
    price = None if hardware.price is None else devices * seconds / 3600 * hardware.price
    return price, None if hardware.power is None else devices * seconds * hardware.power
