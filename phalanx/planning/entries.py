"""The catalogue's files: one TOML file per thing, in a folder per kind; a thing is called as its file. Adding one is adding a file.

`planning/devices` and `planning/hardware` read things through it, `phalanx clusters` lists them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.spec.errors import RunError
from phalanx.spec.nearest import near
from phalanx.spec.words import either, shown

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
        raise RunError([f"{asked_by} = {shown(name)} is not {KINDS[kind]} of the catalogue: {_remedy(name, known)}"])
    return known[name]


def own_file(path: str, asked_by: str) -> dict[str, Any]:
    """A TOML file of somebody's own, as the catalogue's are."""
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError([f"{asked_by} = {shown(path)} cannot be read ({error.strerror or error}): check the path."]) from error
    except ValueError as error:
        raise RunError([f"{asked_by} = {shown(path)} is not valid TOML ({error})."]) from error


def _remedy(name: str, known: Mapping[str, Any]) -> str:
    wanted = name.lower().replace("_", "-")
    begins = sorted((other for other in known if other.startswith(wanted) or wanted.startswith(other)), key=len)
    guesses = list(dict.fromkeys(begins + near(wanted, known, most=3)))[:4]
    return f"did you mean {either(guesses)}? {_LIST} lists them all." if guesses else f"{_LIST} lists them."
