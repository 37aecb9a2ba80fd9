from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import InProcess

from phalanx.cli.list_cmd import clusters
from phalanx.planning.machines.catalogue import KINDS, entries
from phalanx.spec.errors import RunError


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


def test_clusters_show_prints_a_file_that_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Only TOML is on standard output, so that `phalanx clusters show NAME --toml > ours.toml` is a cluster of one's own."""
    clusters(kind="show", name="a100-384", toml=True)
    file = tmp_path / "ours.toml"
    file.write_text(capsys.readouterr().out)
    clusters(kind="show", name=str(file), json=True)
    *_, own = capsys.readouterr().out.splitlines()
    clusters(kind="show", name="a100-384", json=True)
    *_, known = capsys.readouterr().out.splitlines()
    told = json.loads(own)
    assert {key: told[key] for key in ("gpus", "nodes", "nics", "network", "gpu", "assumed")} == {
        key: json.loads(known)[key] for key in ("gpus", "nodes", "nics", "network", "gpu", "assumed")
    }
    assert (told["gpus"], told["nodes"], told["nics"]) == (384, 48, 4), "48 hosts with four Omni-Path ports each"


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"kind": "show"}, "needs a name"),
        ({"kind": "show", "name": "h100"}, "did you mean"),
        ({"kind": "show", "name": "ours.toml", "toml": True}, "remove --toml"),
        ({"kind": "nodes", "name": "dgx-h100"}, "clusters show NAME"),
    ],
)
def test_clusters_show_refuses_what_it_cannot_show(given: dict[str, Any], remedy: str) -> None:
    with pytest.raises(RunError, match=remedy):
        clusters(**given)
