"""The machine, the plan and a rank's place in the job, as plain values. `host/probe` reads the machine, the planner writes the
plan, and launcher, trainer and dashboard read both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from phalanx.spec.json_value import JsonObject
from phalanx.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This computer, or several alike as one."""

    host: str
    cpu: str
    cores: int
    """Cores this process may use."""
    memory: int
    """Bytes of main memory this process may use."""
    core_flops: float | None = None
    """Peak fp32 FLOP/s of one core from its clock and vector width; None: unknown."""
    scalar: tuple[str, ...] = ()
    """Number formats without vector instructions on this CPU; PyTorch multiplies them one number at a time."""
    gpus: tuple[Gpu, ...] = ()
    nodes: int = 1
    """Computers that cores, memory and GPUs are the sum of."""
    measured: tuple[tuple[str, float], ...] = ()
    """What `phalanx bench` or a comparison with a run measured here, by names such as "cpu.launch"; plans use it."""

    def times(self, count: int) -> Machine:
        """So many computers like this one, as one."""
        return replace(self, nodes=count, cores=self.cores * count, memory=self.memory * count, gpus=self.gpus * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's place in the job. `host/env` reads it from the environment, `parallel/mesh` connects by it."""

    rank: int = 0
    ranks: int = 1
    node: int = 0
    """Index of the rank's machine in the job."""
    local_rank: int = 0
    """Index of the rank's device on its machine."""
    store: tuple[str, int] | None = None
    """Host and port of the key-value store for rendezvous; None: a single rank, or torchrun has set torch's own variables."""
    token: str | None = field(default=None, repr=False)
    """The run's secret, for a store that an agent serves; None: the store is torch's own."""
    replica_folder: str | None = None
    """Folder of the replica server of this machine, which keeps in-memory copies of the state; None: there is none."""
    generation: int = 0
    """Counts rebuilt process groups. Each generation uses its own keys in the store, so that stale addresses are never read."""
    copy_every: int | None = None
    """Copy the state into host memory every N steps; None: only if the run file asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a model, counted from its shape or, for a custom module, from the module itself."""

    parameters: int
    active: int
    """Parameters that one token passes through; fewer than all in a mixture of experts."""
    flops_per_token: float
    """FLOPs of the forward and backward of one token."""
    width: int = 0
    """Of a custom module: the width of its embedding; 0: unknown, as in everything below."""
    blocks: int = 0
    """Layers that it holds in `blocks`; 0: none."""
    rank_parameters: int | None = None
    """Parameters of one of the run's tensor ranks, before sharding; None: not traced, as in everything below."""
    traced_flops_per_token: float | None = None
    """FLOPs of one token's forward and backward on one device, as traced: `flops_per_token`, which MFU is computed with, is 6 per weight."""
    rank_flops_per_token: float | None = None
    """The same of such a rank."""
    activations: float | None = None
    """Bytes by which the memory of such a rank grows with each token of a micro-batch, in the run's number format."""
    recomputed_activations: float | None = None
    """The same with all blocks recomputed; None: it has no blocks."""
    untraced: str | None = None
    """Why its step could not be traced."""
    trained: int | None = None
    """Parameters that a step updates; None: all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What the plan expects of the run; the summary compares it with the measured values."""

    seconds: float
    """Seconds per step."""
    low: float
    """P10 of the seconds per step."""
    high: float
    """P90 of the seconds per step."""
    tokens_per_second: float
    memory: dict[str, float]
    """Bytes of the rank that needs most memory, by component."""
    total_memory: float
    """Bytes of that rank in total."""
    mfu: float | None = None
    days: float | None = None
    """Duration of the whole run without failures."""
    price: float | None = None
    """Price of the whole run in US dollars; None: unknown."""
    split: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by cause, such as "compute", "data", "bubble"."""

    @staticmethod
    def from_saved(table: JsonObject | None) -> Promise | None:
        """The promise in a plan or an event, of this or an earlier version."""
        names = {field.name for field in fields(Promise)}
        return None if table is None else Promise(**{name: value for name, value in table.items() if name in names})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run resolved for a machine: every choice that the run file leaves open, made."""

    layout: Layout
    device: Literal["cpu", "cuda"]
    threads: int
    """CPU threads of each rank."""
    micro_batch: int
    """Sequences of one forward and backward on one rank."""
    accumulation: int
    """Micro-batches of one rank in one step (gradient accumulation)."""
    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    parameters: int
    flops_per_token: float
    peak_flops: float | None
    """Peak FLOP/s of all ranks together in the compute precision; None: unknown device, so that MFU cannot be computed."""
    active: int | None = None
    """Parameters that one token passes through; None: all of them (plans of versions without experts)."""
    trained: int | None = None
    """Parameters that a step updates, and a checkpoint holds: those of LoRA adapters. None: all of them."""
    host_link: float | None = None
    """Bytes/s between two hosts that the plan assumes; None: all ranks are on one host, or the plan is of an older version."""
    machine: str | None = None
    """The machine it was made for, in words. A run with an open layout keeps the plan when it resumes on the same machine."""
    promise: Promise | None = field(default=None, hash=False)
    """None: nothing is promised, as for a custom module, whose shape the cost model does not know."""
    devices_per_process: int = 1
    """Devices, which are the ranks of the layout, of each process. More than one only with the XLA engine."""
    placement: JsonObject | None = field(default=None, hash=False)
    """Which ranks share a node, a rail, a pipeline; `planning/placement` writes it. None in plans of older versions."""

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def processes(self) -> int:
        """Processes of the run: what a cluster starts, watches and restarts."""
        return self.ranks // self.devices_per_process

    @property
    def process_layout(self) -> Layout:
        """The layout as the control plane sees it, whose ranks are processes: of processes with several devices it knows only how many there are."""
        return self.layout if self.devices_per_process == 1 else Layout(data=self.processes)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"ranks": self.ranks}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        table: dict[str, Any] = json.loads(text)
        table["layout"] = Layout.from_saved(table["layout"])
        table["promise"] = Promise.from_saved(table.get("promise"))
        return Plan(**{f.name: table[f.name] for f in fields(Plan) if f.name in table})

    def explain(self) -> str:
        """The plan in a sentence or two."""
        ranks = f"{self.ranks} {'GPU' if self.device == 'cuda' else 'CPU'} rank{'s' if self.ranks > 1 else ''}"
        work = f"{self.accumulation} × micro-batch of {self.micro_batch}"
        sparse = self.active is not None and self.active < self.parameters
        active = f" ({(self.active or 0) / 1e6:,.2f} M active)" if sparse else ""
        if self.trained is not None:
            active += f" and {self.trained / 1e6:,.2f} M of LoRA adapters"
        return f"{self.parameters / 1e6:,.2f} M parameters{active} on {ranks}, {work} per rank and step, {self.compute}"
