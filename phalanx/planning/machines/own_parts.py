"""GPUs, nodes, links and clusters of a user's own, in TOML files with the keys of the catalogue. `machines/hardware` reads them
wherever a run file names a part of a cluster; `machines/part_template` writes an entry of the catalogue as such a file.

A part is the name of a catalogue entry, the path of a TOML file, or a table inside such a file. Paths inside a file are relative to
that file. Every problem names the file, the line, the key, the value and what is accepted."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.planning.machines.catalogue import FORMATS, GpuEntry, entry, gpu_entry
from phalanx.planning.machines.rates import NAMES
from phalanx.spec.draft import key_lines
from phalanx.spec.errors import RunError, either, near, noun, quote, toml

Part = Mapping[str, Any]
"""The complete values of one part, in the units of the catalogue."""

_DEVICES = ("cpu", "cuda", "tpu")
_LINK_KINDS = ("network", "island", "host")
_MOST_DEVICES = 10_000_000
_PART = "the name of a catalogue entry, a TOML file or a table"


class _Key(NamedTuple):
    """What a key of such a file accepts."""

    expected: str
    types: tuple[type, ...]
    about: str
    """The comment of a template."""
    most: float = math.inf
    choices: tuple[str, ...] = ()


def _text(about: str = "", *choices: str) -> _Key:
    return _Key("a string", (str,), about, choices=choices)


def _count(about: str, most: int = _MOST_DEVICES) -> _Key:
    return _Key("an integer", (int,), about, most)


def _number(about: str) -> _Key:
    return _Key("a number", (int, float), about)


def _part(about: str) -> _Key:
    return _Key(_PART, (str, dict), about)


_LIKE = _text("what is not given here is taken from this catalogue entry")
_ENDS = {"source": _text("where these values come from"), "note": _text("what was assumed")}
_CLUSTER = {
    "name": _text(),
    "gpu": _part("the device"),
    "gpus": _count("devices of all nodes together"),
    "nodes": _count("nodes, in place of gpus"),
    "node": _part("the host"),
    "network": _part("the network between nodes, in place of the node's"),
    "nics": _count("network ports of each node, in place of the node's", 1024),
    "rails": _Key("true or false", (bool,), "port i of each node is on switch i, in place of the node's"),
    "storage": _number("GB/s at which all hosts together write checkpoints"),
    "price": _number("US dollars per device-hour"),
    "failures": _text("table of failure rates: `phalanx clusters failures` lists them"),
    **_ENDS,
    "measured": _Key("a table", (dict,), "constants that override the fitted ones"),
}
_GPU = {
    "like": _LIKE,
    "name": _text(),
    "match": _text("regular expression searched in the driver's name of the device"),
    "device": _text("", *_DEVICES),
    "family": _text("the fitted constants to use"),
    **{form: _number("dense peak in TFLOP/s") for form in FORMATS},
    "memory": _number("GiB, as the driver counts them"),
    "bandwidth": _number("GB/s of the memory"),
    "power": _number("W"),
    "node": _text("the usual node"),
    "price": _number("US dollars per hour"),
    "price_source": _text(),
    "failures": _text("table of failure rates: `phalanx clusters failures` lists them"),
    **_ENDS,
}
_NODE = {
    "like": _LIKE,
    "name": _text(),
    "gpus": _count("devices of one host", 4096),
    "island": _count("devices that share the fast links: as many as the host has, or more in a rack or pod"),
    "nics": _count("network ports of one host", 1024),
    "rails": _Key("true or false", (bool,), "port i of each node is on switch i"),
    "host_memory": _number("GiB of one host"),
    "storage": _number("GB/s at which one host writes checkpoints"),
    "power": _number("W of one host at most, devices included"),
    "link": _part("inside the island"),
    "network": _part("one network port"),
    "host_link": _part("between a device and its host"),
    **_ENDS,
}
_LINK = {
    "name": _text(),
    "kind": _text("", *_LINK_KINDS),
    "bandwidth": _number("GB/s in one direction, of one device or of one network port"),
    "gbps": _number("Gbit/s, in place of bandwidth"),
    **_ENDS,
}
KEYS = {"clusters": _CLUSTER, "gpus": _GPU, "nodes": _NODE, "links": _LINK}
LINKS_OF_NODE = ("link", "network", "host_link")


def is_file(name: str) -> bool:
    """Whether a part is given as a file instead of by a name of the catalogue."""
    return name.endswith(".toml")


def cluster(path: str, asked_by: str) -> dict[str, Any]:
    """The checked contents of a user's cluster file: `gpu` as a GpuEntry, `node` and `network` as complete parts where they are given."""
    file = _File.read(path, asked_by)
    given = file.values
    _check("clusters", given, file, ())
    file.refuse()
    values = {"name": path, "source": path} | given
    values["gpu"] = _gpu(given["gpu"], file, ("gpu",))
    if "node" in given:
        values["node"] = _node(given["node"], file, ("node",), values["gpu"].node)
    elif not values["gpu"].node:
        file.problem(("gpu",), "gpu.node is missing: name the node that the device is in, or add a table [node].")
    if "network" in given:
        values["network"] = _link(given["network"], file, ("network",))
    if "failures" in given:
        entry("failures", given["failures"], file.asked(("failures",)))
    file.refuse()
    return values


def gpu(name: str, asked_by: str) -> GpuEntry:
    """A GPU of the catalogue, or of a user's file."""
    if not is_file(name):
        return gpu_entry(name, entry("gpus", name, asked_by))
    file = _File.read(name, asked_by)
    _check("gpus", file.values, file, ())
    file.refuse()
    made = _gpu(file.values, file, ())
    file.refuse()
    return made


def node(name: str, asked_by: str, usual: str) -> Part:
    """A node of the catalogue, or of a user's file that may be like the `usual` one of its GPU."""
    if not is_file(name):
        return entry("nodes", name, asked_by)
    file = _File.read(name, asked_by)
    _check("nodes", file.values, file, ())
    file.refuse()
    made = _node(file.values, file, (), usual)
    file.refuse()
    return made


def link(value: str | Part, asked_by: str) -> Part:
    """A link of the catalogue, of a user's file, or one that was read already."""
    if not isinstance(value, str):
        return value
    if not is_file(value):
        return entry("links", value, asked_by)
    file = _File.read(value, asked_by)
    _check("links", file.values, file, ())
    file.refuse()
    made = _link(file.values, file, ())
    file.refuse()
    return made


def resized(part: Part, gpus: int) -> Part:
    """A node with another number of devices: host memory and power are in proportion, the network ports stay."""
    island, scale = part["island"], gpus / part["gpus"]
    if island == part["gpus"]:
        island = gpus
    elif island < part["gpus"]:
        island = min(island, gpus)
    sizes = {"host_memory": part["host_memory"] * scale, "power": part["power"] * scale}
    return {**part, "gpus": gpus, "island": island, **sizes}


def with_ports(part: Part, nics: int) -> Part:
    """A node with another number of network ports, which are not known to be on rails."""
    return part if nics == part["nics"] else {**part, "nics": nics, "rails": False}


class _File:
    """A TOML file of a user's own, and its problems so far."""

    def __init__(self, path: str, folder: Path, values: dict[str, Any], lines: Mapping[tuple[str, ...], int]):
        self.path, self.folder, self.values, self._lines = path, folder, values, lines
        self._problems: list[str] = []

    @staticmethod
    def read(path: str, asked_by: str, folder: Path | None = None) -> _File:
        whole = (folder or Path()) / Path(path).expanduser()
        try:
            text = whole.read_text(encoding="utf-8").replace("\r\n", "\n")
            values, lines = tomllib.loads(text), key_lines(text)
        except OSError as error:
            near_by = sorted(str(file) for file in whole.parent.glob("*.toml")) if whole.parent.is_dir() else []
            guesses = near(str(whole), near_by)
            remedy = (
                f"did you mean {guesses[0]}?" if guesses else f"check the path, which is taken from {(folder or Path.cwd())}."
            )
            raise RunError(f"{asked_by} = {toml(path)} cannot be read ({error.strerror or error}): {remedy}") from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{asked_by} = {toml(path)} is not valid TOML: {error}.") from error
        return _File(str(whole), whole.parent, values, lines)

    def asked(self, key: tuple[str, ...]) -> str:
        """The beginning of a sentence about a key: file, line and key."""
        line = self._lines.get(key)
        return f"{self.path}{'' if line is None else f':{line}'}: {'.'.join(key)}"

    def problem(self, key: tuple[str, ...], sentence: str) -> None:
        line = next((self._lines[key[:size]] for size in range(len(key), 0, -1) if key[:size] in self._lines), None)
        self._problems.append(f"{self.path}{'' if line is None else f':{line}'}: {sentence}")

    def refuse(self) -> None:
        if self._problems:
            raise RunError(self._problems)

    def check_table(self, values: Mapping[str, Any], table: tuple[str, ...], known: Mapping[str, _Key]) -> None:
        """Record a problem for every key that is unknown, and for every value that its key does not accept."""
        for name, value in values.items():
            key, path = known.get(name), (*table, name)
            given = f"{'.'.join(path)} = {quote(value)}"
            if key is None:
                where = f"[{'.'.join(table)}]" if table else "such a file"
                guesses = near(name, known)
                remedy = f"did you mean {guesses[0]}?" if guesses else f"it takes {', '.join(known)}."
                self.problem(path, f"{'.'.join(path)} is not a key of {where}: {remedy}")
            elif type(value) not in key.types:  # not isinstance: true is no integer here
                self.problem(path, f"{given} is {noun(value)}, but {key.expected} is expected.")
            elif key.choices and value not in key.choices:
                self.problem(path, f"{given} is unknown: it must be {either(map(toml, key.choices))}.")
            elif type(value) in (int, float) and not (0 < value <= key.most and value < math.inf):
                limit = "finite" if key.most == math.inf else f"at most {key.most:,}"
                self.problem(path, f"{given} must be above 0 and {limit}.")


_PARTS = {
    "clusters": {"gpu": "gpus", "node": "nodes", "network": "links"},
    "nodes": dict.fromkeys(LINKS_OF_NODE, "links"),
}
"""Keys that are parts of their own, and the kind of each."""


def _check(kind: str, values: Mapping[str, Any], file: _File, table: tuple[str, ...]) -> None:
    """Record every problem of a table and of the tables in it."""
    file.check_table(values, table, KEYS[kind])
    for name, problem in _missing(kind, values):
        file.problem((*table, name) if name in values else table, f"{'.'.join((*table, name))} {problem}")
    for name, inner in _PARTS.get(kind, {}).items():
        if isinstance(values.get(name), dict):
            _check(inner, values[name], file, (*table, name))
    measured = values.get("measured") if kind == "clusters" else None
    if isinstance(measured, dict):
        file.check_table(measured, ("measured",), dict.fromkeys(NAMES, _number("")))


def _missing(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that a table lacks, or has besides another that says the same, and a sentence on each without the key."""
    if kind == "clusters":
        if "gpu" not in values:
            yield "gpu", f"is missing: set it to {_PART}."
        if "gpus" not in values and "nodes" not in values:
            yield "gpus", "is missing: set the number of all devices, or nodes."
        elif "gpus" in values and "nodes" in values:
            yield "nodes", f"= {quote(values['nodes'])} sets the number of devices, and gpus does too: keep one of them."
    if kind == "gpus" and "like" not in values:
        for name in ("memory", "bandwidth"):
            if name not in values:
                yield name, f"is missing: set it in {_GPU[name].about}, or set like to a GPU of the catalogue."
        if not any(form in values for form in FORMATS):
            yield "bf16", f"is missing, and the file gives no peak: set one of {', '.join(FORMATS)}, in TFLOP/s."
    if kind == "links" and "bandwidth" not in values and "gbps" not in values:
        yield "bandwidth", "is missing: set it in GB/s, or gbps in Gbit/s."
    elif kind == "links" and "bandwidth" in values and "gbps" in values:
        yield "gbps", f"= {quote(values['gbps'])} sets the speed, and bandwidth does too: keep one of them."


def _own(kind: str, value: Any, file: _File, key: tuple[str, ...]) -> tuple[Part, _File, tuple[str, ...]]:
    """The values of a part that is a table of a file or a file of its own, and the file and table in which they are."""
    if not isinstance(value, str):
        return value, file, key
    inner = _File.read(value, file.asked(key), file.folder)
    _check(kind, inner.values, inner, ())
    inner.refuse()
    return inner.values, inner, ()


def _gpu(value: Any, file: _File, key: tuple[str, ...]) -> GpuEntry:
    if isinstance(value, str) and not is_file(value):
        return gpu_entry(value, entry("gpus", value, file.asked(key)))
    values, file, key = _own("gpus", value, file, key)
    base: Part = entry("gpus", values["like"], file.asked((*key, "like"))) if "like" in values else {}
    for name, other in (("node", "nodes"), ("failures", "failures")):
        if name in values:
            entry(other, values[name], file.asked((*key, name)))
    unsaid = [name for name in base if name not in values and name in (*FORMATS, "memory", "bandwidth")]
    whole = (
        {"name": "own GPU", "match": "(?!)", "family": "unknown", "node": "", "source": file.path} | dict(base) | dict(values)
    )
    whole.pop("like", None)
    if unsaid:
        whole["note"] = _with_note(whole.get("note"), f"{', '.join(unsaid)} as of {base['name']}")
    return gpu_entry(values.get("like") or values.get("name", "own"), whole)


def _node(value: Any, file: _File, key: tuple[str, ...], usual: str) -> Part:
    if isinstance(value, str) and not is_file(value):
        return entry("nodes", value, file.asked(key))
    values, file, key = _own("nodes", value, file, key)
    needed = ("gpus", "nics", "host_memory", "storage", "power", *LINKS_OF_NODE)
    like = values.get("like", usual)
    if like:
        base = entry("nodes", like, file.asked((*key, "like")))
        base = with_ports(base, values.get("nics", base["nics"]))
        base = resized(base, values.get("gpus", base["gpus"]))
    else:
        for name in (name for name in needed if name not in values):
            remedy = "set it, or set like to a node of `phalanx clusters nodes`"
            file.problem(key, f"{'.'.join((*key, name))} is missing: {remedy}.")
        file.refuse()
        base = {"island": values["gpus"], "rails": False}
    whole = {**base, "name": "own node", "source": file.path} | dict(values)
    whole.pop("like", None)
    if whole["island"] < whole["gpus"] and whole["gpus"] % whole["island"]:
        given, remedy = (
            f"{'.'.join((*key, 'island'))} = {whole['island']}",
            f"set a divisor of {whole['gpus']}, or a multiple of it",
        )
        file.problem((*key, "island"), f"{given} does not divide the {whole['gpus']} devices of the host: {remedy}.")
        file.refuse()
    whole |= {name: _link(values[name], file, (*key, name)) for name in LINKS_OF_NODE if name in values}
    whole.pop("note", None)
    unsaid = [name for name in (*needed, "rails") if name not in values]
    note = _with_note(values.get("note"), f"{', '.join(unsaid)} as of {base['name']}" if like and unsaid else "")
    return whole | ({"note": note} if note else {})


def _link(value: Any, file: _File, key: tuple[str, ...]) -> Part:
    if isinstance(value, str) and not is_file(value):
        return entry("links", value, file.asked(key))
    values, file, key = _own("links", value, file, key)
    bandwidth = values["bandwidth"] if "bandwidth" in values else values["gbps"] / 8
    whole = {"name": f"a link of {8 * bandwidth:g} Gbit/s", "source": file.path} | dict(values) | {"bandwidth": bandwidth}
    whole.pop("gbps", None)
    return whole


def _with_note(first: str | None, second: str) -> str:
    return "; ".join(filter(None, (first, second)))
