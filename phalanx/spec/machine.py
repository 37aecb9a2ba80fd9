"""What a machine has, as a plain value: `host/probe` reads it off, `planning` lays a run out on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This computer."""

    host: str
    cpu: str
    cores: int
    """Cores this process may use."""
    memory: int
    """Bytes of main memory this process may use."""
    core_flops: float | None = None
    """Peak fp32 FLOP/s of one core from its clock and vector width; None where that cannot be told."""
    scalar: tuple[str, ...] = ()
    """Number formats that its cores have no vector instructions for, so that PyTorch multiplies them number by number."""
    gpus: tuple[Gpu, ...] = ()
    measured: tuple[tuple[str, float], ...] = ()
    """What `phalanx bench`, or a comparison with a run, measured here, by names such as "cpu.launch": plans rely on it."""
