"""The machines that a run is planned for, as a value. `machines/hardware` makes it from [cluster] or from this machine;
everything that predicts reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from phalanx.planning.machines.catalogue import GpuEntry
from phalanx.spec.plan import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often one device interrupts a run, in interruptions per device-hour, by component."""

    rates: tuple[tuple[str, float], ...]
    """(component, rate): gpu, memory, nic, switch, host, software, …"""
    source: str

    @property
    def rate(self) -> float:
        """All components together: one over the mean time between interruptions of one device."""
        return sum(rate for _, rate in self.rates)

    @property
    def sentence(self) -> str:
        return f"A device interrupts a run once in {1 / self.rate / 24:,.0f} days ({self.source})."


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
    """Devices that share the fast links: a node (NVLink, PCIe), or a rack or pod (NVL72, TPU)."""
    island_bandwidth: float
    """Bytes/s of a device in one direction inside the island."""
    network: float
    """Bytes/s of a device in one direction out of the island: the bandwidth of an island's NICs divided by its devices."""
    rails: bool
    """NIC i of each node is on switch i, so that devices at the same position of their nodes reach each other in one hop."""
    host_memory: float
    """Bytes of one host."""
    host_bandwidth: float
    """Bytes/s between a device and its host's memory, one direction."""
    storage: float
    """Bytes/s at which one host writes checkpoints."""
    power: float | None
    """Watts of a device with its share of the host, at most."""
    price: float | None
    """US dollars per device-hour."""
    failures: Failures | None
    family: str
    """Key of the fitted constants, such as "h100"."""
    measured: tuple[tuple[str, float], ...] = ()
    """Constants that `phalanx bench` or a comparison with a run measured on this machine; they override the fitted ones."""
    sources: tuple[str, ...] = ()
    full_node: int | None = None
    """Devices of a full host, where these hosts have fewer; None: `node`."""
    full_island: int | None = None
    nics: int | None = None
    """Network ports of one host; None: this machine, whose ports are not counted."""
    assumed: tuple[str, ...] = ()
    """Sentences on what neither the catalogue nor the machine says."""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node)

    def sized(self, gpus: int) -> Hardware:
        """The same machines with this many devices in total; hosts and islands that are not full are filled first."""
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
    """Constants measured on a machine for one kind of device, without its prefix. A full name is "cpu.launch",
    "cuda.bf16.gemm" or "cuda.host_bandwidth": the device, the number format where it matters, and a constant of
    `machines/rates` or a field of Hardware."""
    return tuple((name.partition(".")[2], value) for name, value in machine.measured if name.partition(".")[0] == device)


def with_measured(hardware: Hardware, machine: Machine) -> Hardware:
    """This machine's devices with measured values in place of the catalogue's."""
    known = dict(measured_constants(machine, hardware.device))
    links: dict[str, Any] = {name: known[name] for name in ("island_bandwidth", "host_bandwidth", "storage") if name in known}
    gpu = replace(hardware.gpu, bandwidth=known.get("bandwidth", hardware.gpu.bandwidth))
    return replace(hardware, gpu=gpu, measured=(*hardware.measured, *known.items()), **links)
