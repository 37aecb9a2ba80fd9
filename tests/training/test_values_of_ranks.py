"""Ranks of a custom module compare what its forward reads besides tensors, before the first step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks, tiny_run, tiny_trainer

from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

MODEL = """\
from torch import nn

FACTOR = 1.0


class Model(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.embed, self.head = nn.Embedding(spec.rows, spec.dim), nn.Linear(spec.dim, spec.rows)

    def forward(self, tokens_BS, positions_BS, documents_BS=None):
        return self.head(self.embed(tokens_BS) * FACTOR)
"""


def build(mesh: Mesh, run: Run, folder: Path, differ: bool) -> str | None:
    import module_of_ranks  # type: ignore[import-not-found]

    module_of_ranks.FACTOR += mesh.rank if differ else 1.0
    try:
        tiny_trainer(mesh, run, folder).close()
    except RunError as error:
        return str(error)
    return None


def test_a_global_that_differs_between_ranks_is_refused_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_ranks.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "module_of_ranks", raising=False)
    run = tiny_run("data.document_mask=false")
    run = replace(run, model=replace(run.model, module="module_of_ranks:Model"), layout=Layout(data=2))
    assert run_ranks(build, 2, run, tmp_path / "same", False, layout=run.layout) == [None, None]
    said = run_ranks(build, 2, run, tmp_path / "other", True, layout=run.layout)
    assert said[0] == said[1] and "the global FACTOR of module_of_ranks is 1.0 on rank 0, but 2.0 on rank 1" in (said[0] or "")
