"""The catalogue's files: one TOML file per thing, in a folder per kind; a thing is called as its file. Adding one is adding a file.

`planning/machines/catalogue` and `planning/machines/hardware` read things through it, `phalanx clusters` lists them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from phalanx.spec.errors import RunError, either, near, quote

KINDS = {
    "gpus": "a GPU",
    "nodes": "a node",
    "links": "a link",
    "clusters": "a cluster",
    "failures": "a table of failures",
}
"""Folders of the catalogue, and what each holds one of."""
_LIST = "`phalanx clusters`"


@cache
def entries(kind: str) -> Mapping[str, Mapping[str, Any]]:
    """Everything of a kind by name, in alphabetical order."""
    folder = files("phalanx.planning") / "catalogue" / kind
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    read = {name: tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8")) for name in names}
    return MappingProxyType({name: MappingProxyType(values) for name, values in read.items()})


def entry(kind: str, name: str, asked_by: str) -> Mapping[str, Any]:
    """One thing of the catalogue; RunError in the words of `asked_by`, such as "cluster.gpu", where there is none of that name."""
    known = entries(kind)
    if name not in known:
        raise RunError([f"{asked_by} = {quote(name)} is not {KINDS[kind]} of the catalogue: {_remedy(name, known)}"])
    return known[name]


def own_file(path: str, asked_by: str) -> dict[str, Any]:
    """A TOML file of somebody's own, as the catalogue's are."""
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError([f"{asked_by} = {quote(path)} cannot be read ({error.strerror or error}): check the path."]) from error
    except ValueError as error:
        raise RunError([f"{asked_by} = {quote(path)} is not valid TOML ({error})."]) from error


def _remedy(name: str, known: Mapping[str, Any]) -> str:
    wanted = name.lower().replace("_", "-")
    begins = sorted((other for other in known if other.startswith(wanted) or wanted.startswith(other)), key=len)
    guesses = list(dict.fromkeys(begins + near(wanted, known, most=3)))[:4]
    return f"did you mean {either(guesses)}? {_LIST} lists them all." if guesses else f"{_LIST} lists them."


FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
"""Number formats whose peaks are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuEntry:
    """A GPU as its vendor describes it, in FLOP/s, bytes and bytes per second."""

    key: str
    match: str
    """Regular expression searched in the driver's name; no name is matched by two entries."""
    peaks: dict[str, float]
    """Dense FLOP/s by number format: fp32, tf32, bf16, fp16, fp8, fp4. A format the GPU lacks is absent."""
    memory: float
    """Bytes, as the driver counts them."""
    bandwidth: float
    source: str
    """The vendor's document."""
    name: str = ""
    """As people call it."""
    device: Literal["cpu", "cuda", "tpu"] = "cuda"
    """What programs it."""
    family: str = ""
    """Key of the fitted constants: chips of one family reach the same part of their peaks."""
    power: float | None = None
    """Watts that the vendor allows it."""
    node: str = ""
    """Catalogue name of the node it usually sits in."""
    price: float | None = None
    """US dollars of an hour, host and network included."""
    price_source: str = ""
    """Whose price, when."""
    failures: str = ""
    """Catalogue name of the table that tells how often such a device interrupts a run."""
    note: str = ""
    """What was derived rather than read."""

    def peak(self, compute: str) -> float | None:
        """Dense FLOP/s in a number format; fp32 means fp32, never tf32."""
        return self.peaks.get(compute)


def find_gpu(name: str) -> GpuEntry | None:
    """The entry of a GPU called `name` by nvidia-smi, or None."""
    if " MIG " in name:
        return None  # a slice of a GPU has a fraction of its peak, and the name does not tell which
    return next((entry for entry in gpus() if re.search(entry.match, name)), None)


@cache
def gpus() -> tuple[GpuEntry, ...]:
    """All entries, by their keys."""
    return tuple(gpu_entry(key, values) for key, values in entries("gpus").items())


def named_gpu(key: str, asked_by: str) -> GpuEntry:
    """The entry that the catalogue calls `key`; RunError in the words of `asked_by` where it has none."""
    return gpu_entry(key, entry("gpus", key, asked_by))


def gpu_entry(key: str, values: Mapping[str, Any]) -> GpuEntry:
    """What a file of the catalogue says, in plain units."""
    return GpuEntry(
        key=key,
        match=values["match"],
        peaks={name: values[name] * 1e12 for name in FORMATS if name in values},
        memory=values["memory"] * 2**30,
        bandwidth=values["bandwidth"] * 1e9,
        source=values["source"],
        name=values["name"],
        device=values.get("device", "cuda"),
        family=values["family"],
        power=values.get("power"),
        node=values["node"],
        price=values.get("price"),
        price_source=values.get("price_source", ""),
        failures=values.get("failures", ""),
        note=values.get("note", ""),
    )
