"""The catalogue of GPUs: what each can do at best, by the name its driver prints.

Planning takes peak FLOP/s from it, the doctor shows it beside what the machine has.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuEntry:
    """A GPU as its vendor describes it, in FLOP/s, bytes and bytes per second."""

    key: str
    match: str
    """Regular expression searched in the driver's name."""
    peaks: dict[str, float]
    """Dense FLOP/s by number format: fp32, tf32, bf16, fp16, fp8. A format the GPU lacks is absent."""
    memory: float
    bandwidth: float
    source: str
    """The vendor's document."""

    def peak(self, compute: str) -> float | None:
        """Dense FLOP/s in a number format; fp32 means fp32, never tf32."""
        return self.peaks.get(compute)


def find_gpu(name: str) -> GpuEntry | None:
    """The entry of a GPU called `name` by nvidia-smi, or None."""
    if " MIG " in name:
        return None  # a slice of a GPU has a fraction of its peak, and the name does not tell which
    return next((entry for entry in gpus() if re.search(entry.match, name)), None)


@cache
def gpus() -> tuple[GpuEntry, ...]:
    """All entries, in the order in which they are tried."""
    table = tomllib.loads((files("phalanx.planning") / "catalogue" / "gpus.toml").read_text(encoding="utf-8"))
    return tuple(_entry(key, values) for key, values in table.items())


def _entry(key: str, values: dict[str, Any]) -> GpuEntry:
    return GpuEntry(
        key=key,
        match=values["match"],
        peaks={name: values[name] * 1e12 for name in ("fp32", "tf32", "bf16", "fp16", "fp8") if name in values},
        memory=values["memory"] * 1e9,
        bandwidth=values["bandwidth"] * 1e9,
        source=values["source"],
    )
