"""The table [engine]: what computes the training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What computes the training step."""

    name: Literal["torch", "xla"] = "torch"
    """"torch": PyTorch, with a process per device. "xla": the same model compiled by XLA through JAX, with one process for all devices (needs the extra `xla`). Both read and write the same checkpoints, and a run may resume with the other one."""
