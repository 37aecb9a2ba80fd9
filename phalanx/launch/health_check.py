"""The health check of `phalanx doctor`: what the machine has, what would stop a run, and what would slow one down."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx._version import __version__
from phalanx.checkpointing.replicas.shm_slots import free_memory
from phalanx.dashboard.numbers import flops, size
from phalanx.host.probe import driver_problem, gpu_links, write_speed
from phalanx.host.process_tree import ask_python
from phalanx.planning.machines.catalogue import find_gpu
from phalanx.spec.plan import Machine

_REQUIRED = ("torch", "numpy", "rich", "typer", "matplotlib", "tokenizers", "safetensors", "fsspec", "jinja2")
_EXTRAS = (
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "opentelemetry-sdk",
    "pyarrow",
    "zstandard",
    "datasets",
    "transformers",
    "lm_eval",
    "ray",
)
_Given = TypeVar("_Given")
_Answer = TypeVar("_Answer")
_GIB = 2**30
_TEST_BYTES = 64 * 2**20
_MIN_OPEN_FILES = 1024
_TORCH_TIMEOUT = 120.0

# In another process: importing torch takes seconds and may crash in native code.
_ASK_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "cuda_available": torch.accelerator.is_available(), "devices": torch.accelerator.device_count(),
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """The result."""

    machine: Machine
    python: str
    packages: dict[str, str | None]
    """Versions of required packages; None: not installed."""
    extras: dict[str, str | None]
    """Versions of optional packages; None: not installed."""
    torch: dict[str, Any]
    """Version and backends of torch, or {"error": reason}."""
    gpu_peaks: list[dict[str, float] | None]
    """Peak FLOPS of each GPU by number format; None: not in the catalogue."""
    links: dict[str, int]
    """Number of GPU pairs by kind of link, as `nvidia-smi topo` names it."""
    memory_available: int
    directory: str
    disk_free: int
    write_speed: float | None
    """Bytes per second to disk, with fsync; None: not writable."""
    shared_memory: int | None
    """Size of /dev/shm in bytes."""
    open_files: int
    """Limit of open files; negative: unlimited."""
    loopback: bool
    problems: list[str] = field(default_factory=list)
    """What would stop a run, with remedies."""
    warnings: list[str] = field(default_factory=list)
    """What would not stop a run but is worth knowing."""

    def to_json(self) -> dict[str, Any]:
        return {"phalanx": __version__} | asdict(self)

    def render(self, console: Console) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, Text(value))
        console.print(table)
        for word, style, sentences in (("problem", "bold red", self.problems), ("warning", "yellow", self.warnings)):
            for sentence in sentences:
                console.print(Text.assemble((f"{word}: ", style), sentence))
        if not self.problems:
            console.print(Text("nothing here would stop a run", style="bold green"))

    def _rows(self) -> Iterator[tuple[str, str]]:
        machine, torch = self.machine, self.torch
        yield "phalanx", f"{__version__}, Python {self.python}"
        yield "packages", ", ".join(f"{name} {number or 'missing'}" for name, number in self.packages.items())
        yield "extras", ", ".join(f"{name} {number or 'not installed'}" for name, number in self.extras.items())
        if "error" not in torch:
            devices = "1 device" if torch["devices"] == 1 else f"{torch['devices']} devices"
            cuda = f"CUDA {torch['cuda']}, {devices}" if torch["cuda"] else "no CUDA"
            backends = " and ".join(name for name in ("gloo", "nccl") if torch[name]) or "no process groups"
            yield "torch", f"imports; {cuda}; {backends}"
        yield "processor", f"{machine.cpu}, {machine.cores} cores, {flops(machine.core_flops)} each in fp32"
        yield "memory", f"{size(machine.memory)}, {size(self.memory_available)} available"
        kinds = Counter((gpu.name, gpu.memory) for gpu in machine.gpus)
        for (name, memory), many in kinds.items():
            entry = find_gpu(name)
            yield "GPUs", f"{many} × {name}, {size(memory)}, {flops(entry.peak('bf16')) if entry else 'unknown peak'} in bf16"
        if not kinds:
            yield "GPUs", "none"
        if self.links:
            yield "GPU pairs", ", ".join(f"{many} × {kind}" for kind, many in self.links.items())
        speed = "not writable" if self.write_speed is None else f"{size(self.write_speed)}/s written to disk"
        yield "directory", f"{self.directory}, {size(self.disk_free)} free, {speed}"
        bench = "by `phalanx bench` or a run: plans rely on it", "not yet: `phalanx bench` makes plans surer"
        yield "measured", bench[0] if machine.measured else bench[1]
        files = "unlimited" if self.open_files < 0 else self.open_files
        yield "limits", f"{files} open files, /dev/shm {size(self.shared_memory)}"


def examine(directory: Path, machine: Machine) -> HealthReport:
    """Check everything that a run in `directory` needs. Takes as long as importing torch and writing 64 MiB."""
    place = _existing(directory)
    free = shutil.disk_usage(place).free
    write_speed, write_error = _write_speed(place, free)
    shared, loopback = _attempt(shutil.disk_usage, "/dev/shm"), _attempt(socket.create_server, ("127.0.0.1", 0))
    if loopback is not None:
        loopback.close()
    report = HealthReport(
        machine=machine,
        python=platform.python_version(),
        packages={name: _attempt(version, name) for name in _REQUIRED},
        extras={name: _attempt(version, name) for name in _EXTRAS},
        torch=_ask_torch(),
        gpu_peaks=[entry.peaks if (entry := find_gpu(gpu.name)) else None for gpu in machine.gpus],
        links=_links(gpu_links() or "") if len(machine.gpus) > 1 else {},
        memory_available=min(machine.memory, free_memory()),
        directory=str(directory),
        disk_free=free,
        write_speed=write_speed,
        shared_memory=None if shared is None else shared.total,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        loopback=loopback is not None,
    )
    report.problems.extend(_problems(report, write_error))
    report.warnings.extend(_warnings(report))
    return report


def _problems(report: HealthReport, write_error: str | None) -> Iterator[str]:
    torch, gpus = report.torch, len(report.machine.gpus)
    for name, number in report.packages.items():
        if number is None:
            yield f"{name} is not installed, and phalanx needs it; run `pip install phalanx` in this environment."
    if "error" in torch and report.packages["torch"] is not None:
        yield f"torch {report.packages['torch']} does not import ({torch['error']}); reinstall it in this environment."
    if (driver := driver_problem()) is not None:
        yield driver
    if "error" not in torch:
        if gpus and not torch["devices"]:
            build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
            yield (
                f"nvidia-smi lists {gpus} GPU{'s' if gpus > 1 else ''} but torch {torch['version']} ({build}) sees none; "
                'install a torch built for a CUDA version the driver supports, or set cluster.device = "cpu".'
            )
        if not torch["gloo"] and not (gpus and torch["nccl"]):
            yield f"torch {torch['version']} has no gloo backend, so ranks cannot talk; install an official build of torch."
    if write_error is not None:
        yield f"{report.directory} cannot be written ({write_error}); choose another directory or fix its permissions."
    if report.disk_free < _GIB:
        yield f"{report.directory} has {size(report.disk_free)} free, under 1 GiB; free some or choose another disk."
    if report.memory_available < _GIB:
        yield (
            f"{size(report.memory_available)} of {size(report.machine.memory)} memory is available, under 1 GiB; "
            "end other programs or raise the container's limit."
        )
    if not report.loopback:
        yield "A socket cannot be bound to 127.0.0.1, where ranks meet; bring the loopback interface up (`ip link set lo up`)."
    if 0 <= report.open_files < _MIN_OPEN_FILES:
        yield f"A process may open {report.open_files} files, under {_MIN_OPEN_FILES}; run `ulimit -n 4096` first."


def _warnings(report: HealthReport) -> Iterator[str]:
    torch, gpus = report.torch, report.machine.gpus
    seen = torch.get("devices", 0)
    if 0 < seen < len(gpus):
        yield f"nvidia-smi lists {len(gpus)} GPUs but torch sees {seen}; check CUDA_VISIBLE_DEVICES."
    if len(gpus) > 1 and seen and not torch.get("nccl"):
        yield f"torch {torch['version']} has no NCCL, so {len(gpus)} GPUs cannot train together; install an official build."
    for name in dict.fromkeys(gpu.name for gpu in gpus if find_gpu(gpu.name) is None):
        yield f"{name} is not in the catalogue, so MFU will not be shown."
    if not gpus and report.machine.core_flops is None:
        yield f"The peak of this processor ({report.machine.cpu}) is unknown, so MFU will not be shown."
    if len(gpus) > 1 and report.shared_memory is not None and report.shared_memory < _GIB:
        yield f"/dev/shm has {size(report.shared_memory)}, under the 1 GiB NCCL may want; start the container with --shm-size=8g."
    if report.write_speed is not None and report.write_speed < 100e6:
        yield f"{report.directory} takes {size(report.write_speed)}/s, under 100 MB/s: checkpoints will be slow; use a local disk."


def _ask_torch() -> dict[str, Any]:
    try:
        return ask_python([sys.executable, "-P", "-c", _ASK_TORCH], _TORCH_TIMEOUT)
    except OSError as error:
        return {"error": str(error)}


def _links(matrix: str) -> dict[str, int]:
    """Number of GPU pairs by link, most frequent first, from the matrix above its diagonal."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()]
    rows = [row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = Counter(row[other] for place, row in enumerate(rows) for other in range(place + 1, len(rows)) if other < len(row))
    return dict(pairs.most_common())


def _existing(directory: Path) -> Path:
    """The directory, or its nearest existing parent: runs create what is missing."""
    return next(place for place in (directory.resolve(), *directory.resolve().parents) if place.exists())


def _write_speed(place: Path, free: int) -> tuple[float | None, str | None]:
    """Measure bytes per second; returns (speed, None) or (None, reason)."""
    if free < 2 * _TEST_BYTES:
        return None, None  # reported as too little disk space
    try:
        return write_speed(place, _TEST_BYTES), None
    except OSError as error:
        return None, error.strerror or str(error)


def _attempt(question: Callable[[_Given], _Answer], given: _Given) -> _Answer | None:
    """The answer; None where the machine has none."""
    try:
        return question(given)
    except (OSError, PackageNotFoundError):
        return None
