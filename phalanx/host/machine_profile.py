"""The profile of this machine: constants measured by `phalanx bench` and by comparison with runs, in a file of the user's configuration
folder. `host/probe` reads it into the Machine, so that every plan for this machine uses it.

    processor = "…", cores = 8, gpus = ["…"]   the machine that the profile belongs to; ignored on others
    [cpu] and [cuda]                          planning constants by name; [cuda.bf16] those of one number format
    [[measured]]                              the measurements, as `phalanx bench` shows them
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.events.rundir import replace_file
from phalanx.host.env import config_folder
from phalanx.spec.errors import toml
from phalanx.spec.json_value import Json
from phalanx.spec.plan import Machine

Pairs = tuple[tuple[str, float], ...]

_DEVICES = ("cpu", "cuda")


def profile_file() -> Path:
    """Default path of the profile."""
    return config_folder() / "machine.toml"


def read_profile(machine: Machine, path: Path | None = None) -> Pairs:
    """Constants of the profile, such as ("cuda.bf16.gemm", 0.74); empty without a profile of this machine."""
    table = _table(path or profile_file())
    if not _matches(table, machine):
        return ()
    return tuple(pair for device in _DEVICES for pair in _flat(device, table.get(device, {})))


def write_profile(
    machine: Machine, constants: Mapping[str, float], rows: Sequence[Mapping[str, Json]] = (), path: Path | None = None
) -> Path:
    """Write constants atomically, keeping earlier ones that were not measured again."""
    path = path or profile_file()
    table = _table(path)
    same = _matches(table, machine)
    before = dict(read_profile(machine, path)) if same else {}
    measured = rows or (table.get("measured", []) if same else [])
    lines = [
        "# What was measured on this machine, by `phalanx bench`, `phalanx tune` and `phalanx plan --compare RUNDIR --refit`. Plans use it in place of",
        "# the catalogue's constants; without this file they use those again.",
        f"processor = {toml(machine.cpu)}",
        f"cores = {machine.cores}",
        f"gpus = {toml([gpu.name for gpu in machine.gpus])}",
    ]
    lines += _tables(before | dict(constants))
    for row in measured:
        lines += ["", "[[measured]]", *(f"{name} = {toml(value)}" for name, value in row.items() if value is not None)]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "\n".join(lines) + "\n")
    return path


def _tables(constants: Mapping[str, float]) -> Iterator[str]:
    """Constants as TOML tables, grouped by the prefix of their names."""
    header = None
    for name in sorted(constants, key=lambda name: (name.rpartition(".")[0], name)):
        of, _, own = name.rpartition(".")
        if of != header:
            yield from ("", f"[{of}]")
            header = of
        yield f"{own} = {toml(float(f'{constants[name]:.6g}'))}"


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # missing or unreadable: the same as none


def _matches(table: Mapping[str, Any], machine: Machine) -> bool:
    gpus = [gpu.name for gpu in machine.gpus]
    return (table.get("processor"), table.get("cores"), table.get("gpus")) == (machine.cpu, machine.cores, gpus)


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
