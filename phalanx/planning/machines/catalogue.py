"""The catalogue of GPUs, TPUs, nodes, links, clusters and failure tables: one TOML file per entry, in a folder per kind."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

from phalanx.spec.errors import RunError, either, near, quote
from phalanx.spec.json_value import Json

KINDS = {"gpus": "a GPU", "nodes": "a node", "links": "a link", "clusters": "a cluster", "failures": "a table of failures"}
"""Folders of the catalogue, and what an entry of each is."""
_LIST = "`phalanx clusters`"


@cache
def entries(kind: str) -> Mapping[str, Mapping[str, Json]]:
    """All entries of a kind by name, in alphabetical order."""
    folder = files("phalanx.planning") / "catalogue" / kind
    names = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    read = {name: tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8")) for name in names}
    return MappingProxyType({name: MappingProxyType(values) for name, values in read.items()})


def entry(kind: str, name: str, asked_by: str) -> Mapping[str, Any]:
    """One entry. RunError that names `asked_by`, such as "cluster.gpu", where the catalogue has none of that name."""
    known = entries(kind)
    if name not in known:
        raise RunError(f"{asked_by} = {quote(name)} is not {KINDS[kind]} of the catalogue: {_remedy(name, known)}")
    return known[name]


def _remedy(name: str, known: Mapping[str, Any]) -> str:
    wanted = name.lower().replace("_", "-")
    begins = sorted((other for other in known if other.startswith(wanted) or wanted.startswith(other)), key=len)
    guesses = list(dict.fromkeys(begins + near(wanted, known, most=3)))[:4]
    return f"did you mean {either(guesses)}? {_LIST} lists them all." if guesses else f"{_LIST} lists them."


FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
"""Number formats with a peak."""
_NEEDED = ("name", "match", "family", "memory", "bandwidth", "node", "source")
"""Keys that every GPU of the catalogue has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuEntry:
    """A device as its vendor describes it, in FLOP/s, bytes and bytes per second."""

    key: str
    match: str
    """Regular expression searched in the driver's name; no name matches two entries."""
    peaks: dict[str, float]
    """Dense FLOP/s by number format: fp32, tf32, bf16, fp16, fp8, fp4. A format that the device lacks is absent."""
    memory: float
    """Bytes, as the driver counts them."""
    bandwidth: float
    source: str
    """The vendor's document."""
    name: str = ""
    """The common name."""
    device: Literal["cpu", "cuda", "tpu"] = "cuda"
    """The kind of device that programs address."""
    family: str = ""
    """Key of the fitted constants: devices of one family reach the same fraction of their peaks."""
    power: float | None = None
    """Watts, by the vendor's limit."""
    node: str = ""
    """Catalogue name of the node that it usually is in."""
    price: float | None = None
    """US dollars per hour, with host and network."""
    price_source: str = ""
    """Whose price, and when."""
    failures: str = ""
    """Catalogue name of the table of failure rates."""
    note: str = ""
    """What was derived instead of read."""

    def peak(self, compute: str) -> float | None:
        """Dense FLOP/s in a number format; fp32 means fp32, never tf32."""
        return self.peaks.get(compute)


@cache  # a cluster has thousands of one name
def find_gpu(name: str) -> GpuEntry | None:
    """The entry of a GPU that nvidia-smi, or the catalogue itself, calls `name`; or None."""
    if " MIG " in name:
        return None  # a slice of a GPU has a fraction of its peak, and the name does not tell which
    return next((entry for entry in gpus() if name == entry.name or re.search(entry.match, name)), None)


def gpus_of_type(text: str) -> list[GpuEntry]:
    """Entries that a scheduler may mean by a GPU type such as "h100", "A100-80G" or "nvidia_a100-sxm4-80gb", the likeliest first."""
    name = text.replace("_", " ")
    if exact := [entry for entry in gpus() if re.search(entry.match, name, re.IGNORECASE)]:
        return exact[:1]
    first, *others = re.split("[^a-z0-9]+", text.lower().removeprefix("nvidia").lstrip("_- "))
    found = [entry for entry in gpus() if entry.key.split("-")[0] == first and all(word in entry.key for word in others)]
    return sorted(found, key=lambda entry: ("sxm" not in entry.key, -entry.memory))


@cache
def gpus() -> tuple[GpuEntry, ...]:
    """All devices, by key."""
    return tuple(gpu_entry(key, values) for key, values in entries("gpus").items())


def named_gpu(key: str, asked_by: str) -> GpuEntry:
    """The entry of this key. RunError that names `asked_by` where there is none."""
    return gpu_entry(key, entry("gpus", key, asked_by))


def gpu_entry(key: str, values: Mapping[str, Any]) -> GpuEntry:
    """An entry of the catalogue in plain units. RunError where a key is missing."""
    if missing := [name for name in _NEEDED if name not in values]:
        raise RunError([f"catalogue/gpus/{key}.toml: {name} is missing: set it." for name in missing])
    fields = {name: value for name, value in values.items() if name not in FORMATS}
    fields |= {"memory": values["memory"] * 2**30, "bandwidth": values["bandwidth"] * 1e9}
    return GpuEntry(key=key, peaks={name: values[name] * 1e12 for name in FORMATS if name in values}, **fields)
