"""The machines a run is planned for, as a value. `planning/machines/hardware` makes it of [cluster] or of this very machine, and hands it on;
everything that predicts reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.planning.machines.catalogue import GpuEntry
from phalanx.spec.plan import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often a device's share of the cluster interrupts a run, in interruptions per device-hour, by component."""

    rates: tuple[tuple[str, float], ...]
    """(component, rate): gpu, memory, nic, switch, host, software, …"""
    source: str

    @property
    def rate(self) -> float:
        """Of all components together; one over the mean time between interruptions of one device."""
        return sum(rate for _, rate in self.rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A cluster of equal devices."""

    name: str
    device: Literal["cpu", "cuda", "tpu"]
    gpu: GpuEntry
    gpus: int
    """Devices of the whole cluster; on a CPU machine, its cores."""
    node: int
    """Devices of one host."""
    island: int
    """Devices that share the fast links: of a node (NVLink, PCIe), or of a rack or pod (NVL72, TPU)."""
    island_bandwidth: float
    """Bytes/s of a device in one direction inside the island."""
    network: float
    """Bytes/s of a device in one direction out of it; an island's worth of NICs divided by its devices."""
    rails: bool
    """NIC i of each node is on switch i, so that equal places of nodes reach each other in one hop."""
    host_memory: float
    """Bytes of one host."""
    host_bandwidth: float
    """Bytes/s between a device and its host's memory, one direction."""
    storage: float
    """Bytes/s that one host writes checkpoints with."""
    power: float | None
    """Watts of a device with its share of the host, at most."""
    price: float | None
    """US dollars of a device-hour."""
    failures: Failures | None
    family: str
    """Key of the fitted constants, such as "h100"."""
    measured: tuple[tuple[str, float], ...] = ()
    """Constants that `phalanx bench` or a comparison with a run measured on this very machine; they win over fitted ones."""
    sources: tuple[str, ...] = ()
    full_node: int | None = None
    """Devices of a host that is full, where these are fewer; None: `node` of them."""
    full_island: int | None = None
    assumed: tuple[str, ...] = ()
    """What neither the catalogue nor the machine says, in sentences."""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node)

    def sized(self, gpus: int) -> Hardware:
        """The same machines with so many devices in all: hosts and islands that were not full are filled up first."""
        here = min(self.full_node or self.node, gpus)
        return replace(
            self,
            gpus=gpus,
            node=here,
            island=min(self.full_island or self.island, gpus),
            host_memory=self.host_memory * here / self.node,
            full_node=self.full_node or self.node,
            full_island=self.full_island or self.island,
        )


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
