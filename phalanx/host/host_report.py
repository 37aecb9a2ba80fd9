"""What a host says about itself before a run starts on it: its hardware, versions, clock, and what it sees of the run's files. Launchers ask
for it before they plan, controllers before the first generation; `host/host_check` compares.

    python -m phalanx.host.host_report      reads a `HostQuestion` from standard input and prints a `HostReport`, as lines of JSON

Never imports torch, which takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx._version import __version__
from phalanx.checkpointing.replicas.shm_slots import free_memory
from phalanx.events.rundir import RunDir
from phalanx.host.env import ssh_server_address
from phalanx.host.interfaces import addresses
from phalanx.host.probe import driver_version, this_machine
from phalanx.spec.plan import Gpu, Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class HostQuestion:
    """What a launcher or controller wants to know."""

    run_dir: str
    launch: str
    paths: tuple[str, ...] = ()
    """Files and folders that the run reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """The answer of one host."""

    machine: Machine
    versions: dict[str, str]
    """Of Phalanx, Python, torch and the NVIDIA driver; empty text: it has none."""
    code: str
    """Digest of Phalanx's source files."""
    clock: float
    """Seconds since 1970."""
    addresses: dict[str, str]
    """The interface of each of its addresses, loopback excluded."""
    reached_at: str | None
    """The one of them by which the launcher has reached it, if it knows."""
    sees_run_dir: bool
    missing: tuple[str, ...]
    """Paths of the question that do not exist there."""
    free_disk: int
    """Bytes, where the run directory is or would be."""
    free_memory: int
    files: str = ""
    """Digest of the run file and the plan that its agent has read; empty before it has."""

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> HostReport:
        machine = dict(table["machine"])
        machine["gpus"] = tuple(Gpu(**gpu) for gpu in machine["gpus"])
        machine["scalar"] = tuple(machine["scalar"])
        machine["measured"] = tuple((name, value) for name, value in machine["measured"])
        return cls(**{**table, "missing": tuple(table["missing"]), "machine": Machine(**machine)})


def report(question: HostQuestion) -> HostReport:
    """This host's answer."""
    rundir = RunDir(Path(question.run_dir))
    existing = next(path for path in (rundir.path, *rundir.path.parents) if path.exists())
    return HostReport(
        machine=this_machine(),
        versions={
            "phalanx": __version__,
            "python": platform.python_version(),
            "torch": _torch_version(),
            "NVIDIA driver": driver_version() or "",
        },
        code=code_digest(),
        clock=time.time(),
        addresses={
            str(address): interface
            for address, interface in addresses().items()
            if not address.is_loopback and not address.is_link_local
        },
        reached_at=ssh_server_address(),
        sees_run_dir=rundir.launch_id == question.launch,
        missing=tuple(path for path in question.paths if not os.path.exists(os.path.expanduser(path))),
        free_disk=shutil.disk_usage(existing).free,
        free_memory=free_memory(),
    )


def code_digest() -> str:
    """Digest of the source files of this package, by which a host with other code is recognized."""
    return digest_of(sorted(Path(__file__).parents[1].rglob("*.py")))


def digest_of(paths: Iterable[Path]) -> str:
    """Digest of the names and contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.parent.name}/{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def main() -> None:
    table = json.loads(sys.stdin.readline())
    question = HostQuestion(**{**table, "paths": tuple(table["paths"])})
    print(json.dumps(asdict(report(question))))


if __name__ == "__main__":
    main()
