"""What a run costs: days, device-hours, dollars, energy. Numbers or columns, like `planning/job_table`. `planning/search` calls it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planning.cluster import Hardware
from phalanx.planning.job_table import Column

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
