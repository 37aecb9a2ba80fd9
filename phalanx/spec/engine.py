"""The table [engine]: what computes the training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.spec.fields import within


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What computes the training step."""

    name: Literal["torch", "xla"] = "torch"
    """"torch": PyTorch, with a process per device. "xla": the same model compiled by XLA through JAX, with a process for several devices (needs the extra `xla`). Both read and write the same checkpoints, and a run may resume with the other one."""
    devices_per_process: int | None = field(default=None, metadata=within(1))
    """Of engine "xla": devices of each process. Default: all devices of a host, in one process."""
