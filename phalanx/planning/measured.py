"""Constants that were measured on a machine: `phalanx bench` and comparisons with runs keep them in a file, `host/probe` reads it into
the Machine, and plans for that machine take them from here.

A name is "cpu.launch", "cuda.bf16.gemm", "cuda.host_bandwidth": the device, where it matters the number format, and a constant of
`planning/rates` or a field of `planning/cluster`.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.planning.cluster import Hardware
from phalanx.spec.machine import Machine


def measured_constants(machine: Machine, device: str) -> tuple[tuple[str, float], ...]:
    """Those of one kind of device, without its name."""
    return tuple((name.partition(".")[2], value) for name, value in machine.measured if name.partition(".")[0] == device)


def with_measured(hardware: Hardware, machine: Machine) -> Hardware:
    """This machine's devices, with what was measured on it in place of what the catalogue says."""
    own = measured_constants(machine, hardware.device)
    if not own:
        return hardware
    known = dict(own)
    gpu = replace(hardware.gpu, bandwidth=known.get("bandwidth", hardware.gpu.bandwidth))
    return replace(
        hardware,
        gpu=gpu,
        island_bandwidth=known.get("island_bandwidth", hardware.island_bandwidth),
        host_bandwidth=known.get("host_bandwidth", hardware.host_bandwidth),
        storage=known.get("storage", hardware.storage),
        measured=(*hardware.measured, *own),
    )
