"""checkpoint.export_hf: what could never be exported is refused before the start."""

from __future__ import annotations

import pytest

from phalanx.spec.errors import RunError
from phalanx.spec.load import loads

BASE = """
[model]
dim = 32
layers = 2
heads = 4

[train]
batch = 8
steps = 2
"""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.module=mine:Model"], 'model.module = "mine:Model": a custom model has no counterpart in transformers'),
        (["model.positions=learned"], 'model.norm = "rms" with learned positions: Hugging Face\'s GPT-2'),
        (["model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32", "model.moe.shared=1"], "model.moe.shared = 1"),
        (["optimizer.sync_every=4", "layout.data=2"], "optimizer.sync_every = 4 each replica has its own"),
    ],
)
def test_refused(overrides: list[str], said: str) -> None:
    loads(BASE, overrides=overrides)
    with pytest.raises(RunError) as refused:
        loads(BASE, overrides=["checkpoint.export_hf=true", *overrides])
    assert any(said in problem and "remove checkpoint.export_hf" in problem for problem in refused.value.problems), (
        refused.value
    )


@pytest.mark.parametrize("overrides", [[], ["model.preset=gpt2-124m"], ["model.preset=tiny-mla"]])
def test_legal(overrides: list[str]) -> None:
    base = BASE if not overrides else BASE[BASE.index("[train]") :]
    assert loads(base, overrides=["checkpoint.export_hf=true", *overrides]).checkpoint.export_hf


def test_a_broken_model_is_told_once() -> None:
    with pytest.raises(RunError) as refused:
        loads(BASE, overrides=["checkpoint.export_hf=true", "model.heads=5", "model.positions=learned"])
    assert not any("export_hf" in problem for problem in refused.value.problems)
