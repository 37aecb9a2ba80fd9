"""This machine's cores as a cluster: a rank is a device with its share of cores and memory.

Unlike a GPU, a core is its own host: the time to start an operation adds to the time to compute it, and the cores that compute
also copy messages. `phalanx bench` measures the constants of catalogue/cpu.toml.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.planning.machines.catalogue import GpuEntry
from phalanx.planning.machines.cluster import Hardware, measured_constants
from phalanx.planning.machines.rates import constants
from phalanx.recovery.relayout import replicated_elsewhere
from phalanx.spec.plan import Machine, Plan
from phalanx.spec.run import Run

_CORE_FLOPS = 48e9
"""FLOP/s of a core whose clock or vector width cannot be read: AVX2 with two multiply-add units at 1.5 GHz."""
_SCALAR = 1 / 350
"""Fraction of that for a number format without vector instructions: 0.126e9 instead of 32e9 to 52e9 in fp32, measured on
Neoverse N1."""
_CORE_BANDWIDTH = 10e9
_COPY = 1.2e9
"""Bytes/s that one process sends to another on the same machine through sockets."""
_BUS = 10e9
"""Bytes/s that all processes send together."""
_NETWORK = 1.25e9
"""Bytes/s of a host's network interface: 10 Gbit/s."""
_STORAGE = 0.5e9
FIXED = 285 * 2**20
"""Bytes of an interpreter with torch imported, before there is a model."""
_MODEST = 0.2
"""Fraction of memory that in-memory checkpoints may take where nobody asked for them."""
_LOOSE = 0.35
"""Fraction of a step's temporary memory that malloc keeps in addition, in pieces too small to reuse, and of the memory from
building the state, up to _MOST_LOOSE."""
_MOST_LOOSE = 2.0**28
_AGREED = 12
"""Short messages of a step in which ranks agree on the loss, the norm and whether to continue."""
_THREADED = 0.75
"""Exponent of the speedup by threads: they have to be woken and waited for, and two are 1.7 times as fast."""


def of_cores(machine: Machine) -> dict[str, float]:
    """Constants of this machine's cores: measured here, else on similar machines."""
    table: dict[str, dict[str, float]] = constants("cpu")
    return table["core"] | (table["old-arm"] if machine.scalar else {}) | dict(measured_constants(machine, "cpu"))


def cpu_hardware(machine: Machine, ranks: int | None = None, threads: int | None = None) -> Hardware:
    """A cluster of `ranks` ranks with `threads` threads each; by default one rank per core."""
    cores = machine.cores
    ranks = ranks or cores
    threads = threads or max(1, cores // ranks)
    share = min(float(threads), cores / ranks)  # cores of a rank; less than one where several ranks take turns
    own = of_cores(machine)
    core = own.get("core_flops") or machine.core_flops or _CORE_FLOPS
    # Where threads share a rank's work, each operation waits for the slowest thread.
    worth = share if share < 1 else share**_THREADED
    peak = core * worth
    bandwidth = own.get("bandwidth", _CORE_BANDWIDTH) * worth
    link = min(own.get("island_bandwidth", _COPY) * min(1.0, share), own.get("bus", _BUS) / ranks)
    return Hardware(
        name="this machine" if machine.nodes == 1 else f"{machine.nodes} hosts",
        device="cpu",
        gpu=GpuEntry(
            key="cpu",
            match="(?!)",
            # Most CPUs compute 16-bit formats in fp32 units.
            peaks={form: peak * (_SCALAR if form in machine.scalar else 1.0) for form in ("fp32", "bf16", "fp16")},
            memory=machine.memory / ranks,
            bandwidth=bandwidth,
            source="read off this machine",
            name=machine.cpu,
            device="cpu",
            family="cpu",
        ),
        gpus=ranks,
        node=max(1, ranks // machine.nodes),
        island=max(1, ranks // machine.nodes),
        island_bandwidth=link,
        network=link if machine.nodes == 1 else min(link, _NETWORK * machine.nodes / ranks),
        rails=False,
        host_memory=machine.memory / machine.nodes,
        host_bandwidth=bandwidth,
        storage=own.get("storage", _STORAGE),
        power=None,
        price=None,
        failures=None,
        family="cpu",
        measured=tuple((own | _turns(own, share, ranks, threads)).items()),
        assumed=tuple(_assumed(machine)),
    )


def _turns(constants: dict[str, float], share: float, ranks: int, threads: int) -> dict[str, float]:
    """Costs of starting operations and messages where ranks share a core, or threads have to be woken."""
    waiting = 1 / min(1.0, share)
    woken = max(min(threads, share), 1.0) ** (1 - _THREADED)
    return {
        "launch": constants["launch"] * waiting * woken,
        "latency": constants["latency"] * waiting,
        "overhead": (constants["overhead"] + (_AGREED * constants["latency"] if ranks > 1 else 0.0)) * waiting,
    }


def unnamed(before: Mapping[str, float], latency: float, factor: float, ranks: int) -> float:
    """The constant "overhead" where a step has `factor` times as much time that no equation names. The agreement messages
    are part of it, and their latency is new."""
    messages = _AGREED if ranks > 1 else 0
    return max(factor * (before["overhead"] + messages * before["latency"]) - messages * latency, 1e-5)


def _assumed(machine: Machine) -> list[str]:
    if measured_constants(machine, "cpu"):
        return []
    bandwidth = of_cores(machine).get("bandwidth", _CORE_BANDWIDTH)
    sentences = [
        f"A core reads {bandwidth / 1e9:.0f} GB/s from memory, ranks exchange {_COPY / 1e9:.0f} GB/s: run `phalanx bench` to measure."
    ]
    if machine.core_flops is None:
        sentences.append(f"A core computes {_CORE_FLOPS / 1e9:.0f} GFLOP/s: its clock and vector width cannot be read.")
    return sentences


def resident(run: Run, plan: Plan, memory: dict[str, float], machine: Machine) -> dict[str, float]:
    """Resident bytes of a rank by component, from those of its tensors: with the interpreter, what malloc keeps, and the
    in-memory checkpoints that the launcher makes where no other rank has the state."""
    own = dict(measured_constants(machine, "cpu"))
    moving = sum(memory.get(name, 0.0) for name in ("activations", "logits", "gathered", "buffers"))
    layout = plan.layout
    part = 1 / (layout.pipeline * layout.shard * layout.tensor)  # of the model, that one rank saves
    copies = 2 * 12 * plan.parameters * part if _copied(run, plan, machine) else 0.0
    states = sum(memory.get(name, 0.0) for name in ("parameters", "gradients", "optimizer"))
    fixed = own.get("fixed_memory", FIXED) + _LOOSE * moving + min(_LOOSE * states, _MOST_LOOSE)
    return memory | {"buffers": memory.get("buffers", 0.0) + copies, "fixed": fixed}


def _copied(run: Run, plan: Plan, machine: Machine) -> bool:
    if run.checkpoint.memory_every is not None:
        return True
    modest = 2 * 12 * plan.parameters <= _MODEST * machine.memory
    reused = run.engine.name == "torch" and replicated_elsewhere(plan.layout, (0,) * plan.ranks)
    return modest and run.resilience.restarts > 0 and not reused
