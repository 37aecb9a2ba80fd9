"""Entries of the catalogue as TOML files of a user's own, complete and with their units. `phalanx clusters show NAME --toml` prints them;
`machines/own_parts` reads them back to the same machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.planning.machines.catalogue import entries, entry
from phalanx.planning.machines.own_parts import KEYS, LINKS_OF_NODE
from phalanx.spec.errors import RunError, either, near, quote, toml

_HEADS = {
    "clusters": 'A cluster of your own: change what differs, save it as our-cluster.toml, and set cluster.name = "our-cluster.toml".',
    "gpus": 'A GPU of your own: change what differs, save it as our-gpu.toml, and set cluster.gpu = "our-gpu.toml".',
    "nodes": 'A node of your own: change what differs, save it as our-node.toml, and set cluster.node = "our-node.toml".',
    "links": 'A network of your own: change what differs, save it as our-network.toml, and set cluster.network = "our-network.toml".',
}


def kind_of(name: str, asked_by: str) -> str:
    """The kind of a catalogue entry; clusters first, because a cluster and a node may share a name."""
    for kind in _HEADS:
        if name in entries(kind):
            return kind
    known = [other for kind in _HEADS for other in entries(kind)]
    guesses = near(name.lower(), known, most=3)
    remedy = f"did you mean {either(guesses)}?" if guesses else "`phalanx clusters` lists them all."
    raise RunError(f"{asked_by} {quote(name)} is no cluster, node, GPU or link of the catalogue: {remedy}")


def template(kind: str, name: str) -> str:
    """An entry of the catalogue as a TOML file of a user's own, with everything that it refers to. It loads to the same machines."""
    values = dict(entry(kind, name, "name"))
    lines = [
        f"# {_HEADS[kind]}",
        '# A table may also be the name of a catalogue entry, such as link = "nvlink4", or another file.',
    ]
    if kind == "clusters":
        gpu, part = values.pop("gpu"), values.pop("node")
        node = dict(entry("nodes", part, "node"))
        node["network"] = values.pop("network", node["network"])
        lines += _lines("clusters", values)
        lines += ["", "[gpu]", *_lines("gpus", {"like": gpu} | dict(entry("gpus", gpu, "gpu")))]
        lines += ["", "[node]", *_node_lines(part, node, "node.")]
    elif kind == "nodes":
        lines += _node_lines(name, values, "")
    else:
        lines += _lines(kind, {"like": name} | values if kind == "gpus" else values)
    return "\n".join(lines) + "\n"


def _node_lines(name: str, values: Mapping[str, Any], table: str) -> list[str]:
    plain = {"like": name} | {key: value for key, value in values.items() if key not in LINKS_OF_NODE}
    lines = _lines("nodes", plain)
    for key in LINKS_OF_NODE:
        lines += [
            "",
            f"[{table}{key}]  # {KEYS['nodes'][key].about}: {values[key]}",
            *_lines("links", entry("links", values[key], key)),
        ]
    return lines


def _lines(kind: str, values: Mapping[str, Any]) -> list[str]:
    """Keys in the order of their table, each with its unit."""
    known = KEYS[kind]
    assert values.keys() <= known.keys(), values.keys() - known.keys()
    pairs = [(f"{name} = {toml(values[name])}", key.about) for name, key in known.items() if name in values]
    return [f"{pair:<24} # {about}" if about else pair for pair, about in pairs]
