from __future__ import annotations

import pytest
import typer
from commands import InProcess

from phalanx.cli.list_cmd import clusters
from phalanx.planning.machines.catalogue import KINDS, entries


def test_clusters_lists_the_catalogue(here: InProcess) -> None:
    ended = here("clusters", "--json")
    listed, shown = ended.json, ended.err.splitlines()
    assert listed.keys() == KINDS.keys()
    for kind in KINDS:
        assert listed[kind].keys() == entries(kind).keys()
        assert all(any(line.split()[:1] == [name] for line in shown) for name in entries(kind)), kind
    assert any(line.split()[:4] == ["h100-16384", "16,384", "h100-sxm", "grand-teton"] for line in shown)


def test_clusters_help_is_complete() -> None:
    """Words in square brackets are taken for markup where help is printed."""
    assert clusters.__doc__ is not None and "[" not in clusters.__doc__


def test_clusters_lists_one_kind(here: InProcess) -> None:
    out = here("clusters", "links").out
    assert "ib-ndr" in out and "h100-16384" not in out
    with pytest.raises(typer.BadParameter):
        clusters(kind="planets")
