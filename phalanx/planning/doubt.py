"""How far a predicted step may be off: its parts' doubts by their shares of it, and more for devices that few have published about.

`planning/time` widens the interval of each job by it, `benchmarks/planner/validation` measures what the interval has to be.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phalanx.planning.job_table import Column

_COMPUTE = 0.07
_PARTS = {"data": 0.4, "launch": 0.2, "expert": 0.2, "tensor": 0.25, "bubble": 0.1}
"""Deviation of what is predicted for each part, as a part of it: products are alike everywhere, networks and hosts are not."""
_FAMILY = 1.0
"""Variance between publications about one family of devices, over that of rows within one."""


def unsure(parts: Mapping[str, Column], step: Column) -> Column:
    """How many times as far off as a step that only computes."""
    squares = sum((doubt / _COMPUTE * parts[name]) ** 2 for name, doubt in _PARTS.items())
    return np.sqrt(1 + squares / (step * step))


def unfamiliar(publications: Column) -> Column:
    """How many times as far off, by the number of publications that the constants of a family rest on."""
    return np.sqrt(1 + _FAMILY / np.maximum(publications, 0.5))
