"""What fails in a simulated run, what the live system makes of it, and how long it takes to be noticed. `planning/simulate/simulated_run` draws from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from phalanx.planning.machines.cluster import Failures
from phalanx.spec.run import Resilience

Kind = Literal["node", "worker", "connection", "corrupt"]
"""The event that a supervisor sees: a node is lost, a process died on a node that lives, connections broke, a replica differs."""

_WORDS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("corrupt", ("corrupt", "sdc", "silent")),
    ("worker", ("software", "bug", "collective", "dependency", "restart")),
    ("connection", ("switch", "cable", "network", "link", "fabric", "ici")),
)
"""Parts of a component's name; what none of them is in takes its node along, as a broken GPU does: the node is taken out and repaired."""

_SEEN = 0.1
"""Seconds until a supervisor knows that one of its processes is gone."""

_HANG_STEPS = 8
"""Steps that take so many times as long as usual are looked into, as the live overseer does."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure of a used device."""

    component: str
    kind: Kind
    device: int
    """Its place among the devices that are used: the rank that ran on it."""


def kind_of(component: str) -> Kind:
    """What becomes of a component's failure."""
    name = component.lower()
    return next((kind for kind, words in _WORDS if any(word in name for word in words)), "node")


def detection(kind: Kind, settings: Resilience, step: float) -> float:
    """Seconds until the supervisors know of it."""
    if kind == "connection":  # nobody is gone: everybody waits until the waiting is suspect
        return max(settings.hang, _HANG_STEPS * step)
    return {"node": settings.heartbeat, "worker": _SEEN, "corrupt": 0.0}[kind]


def mean_detection(failures: Failures, settings: Resilience, step: float) -> float:
    """Of one failure, by how often each component fails."""
    weighed = sum(rate * detection(kind_of(component), settings, step) for component, rate in failures.rates)
    return weighed / failures.rate if failures.rate else 0.0


class Dice:
    """Draws of one simulated run. When something fails has a stream of its own, so that runs that differ in their spares or in how
    often they save meet the same failures as far as they can."""

    def __init__(self, seed: int, trial: int):
        self._when, self._what = Random(f"{seed}/{trial}/when"), Random(f"{seed}/{trial}/what")

    def patience(self) -> float:
        """How much hazard is borne until the next failure."""
        return self._when.expovariate(1.0)

    def component(self, names: Sequence[str], weights: Sequence[float]) -> str:
        """`weights`: of all up to each."""
        return self._what.choices(names, cum_weights=weights)[0]

    def device(self, devices: int) -> int:
        return self._what.randrange(devices)

    def repair(self, mean: float) -> float:
        return self._what.expovariate(1.0 / mean) if mean > 0 else 0.0
