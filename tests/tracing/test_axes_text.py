from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import hf_zoo
import pytest

from phalanx.spec.cut_plan import CutPlan
from phalanx.tracing.axes_text import axes_text
from phalanx.tracing.infer_cuts import infer


@pytest.fixture(scope="module")
def phi3() -> tuple[Any, CutPlan]:
    model = hf_zoo.make("phi3")
    return model, infer(model, 2)


def test_the_table_is_python_that_gives_the_plan_again(phi3: tuple[Any, CutPlan]) -> None:
    model, plan = phi3
    read: dict[str, Any] = {}
    exec(axes_text(plan, model), read)
    table = read["AXES"]
    assert table["model.model.layers.*.self_attn.qkv_proj.weight"] == (
        (("heads", 48), ("kv_heads", 24), ("kv_heads", 24)),
        "model",
    )
    assert infer(model, 2, given=table).params == plan.params


def test_the_table_says_what_is_done(phi3: tuple[Any, CutPlan]) -> None:
    model, plan = phi3
    text = axes_text(plan, model)
    assert "# model.model.layers.0 … model.model.layers.1 (2): 2 sums over the ranks in a forward." in text
    assert "#   self_attn.o_proj: its result is summed" in text
    assert "#   self_attn: config.num_attention_heads = 4" in text


def test_the_picture_of_a_layer_shows_the_cuts_of_its_plan(phi3: tuple[Any, CutPlan]) -> None:
    _, plan = phi3
    file = Path(__file__).parents[2] / "docs" / "make_cuts_picture.py"
    made = importlib.util.spec_from_file_location("make_cuts_picture", file)
    assert made is not None and made.loader is not None
    picture = importlib.util.module_from_spec(made)
    sys.modules["make_cuts_picture"] = picture  # its dataclasses look there
    made.loader.exec_module(picture)
    layer = "model.model.layers.0"
    drawn = {f"{layer}.{matrix.name}.weight": matrix for _, _, pair in picture.BLOCKS for matrix in pair}
    cuts = {name: cut for name, cut in plan.params.items() if name.startswith(layer)}
    assert {name: (cut.dim, len(cut.segments)) for name, cut in cuts.items()} == {
        name: (matrix.dim, len(matrix.segments)) for name, matrix in drawn.items()
    }
    first, last = ([f"{layer}.{pair[index].name}" for _, _, pair in picture.BLOCKS] for index in (0, 1))
    assert [seam.module for seam in plan.leaves if seam.module.startswith(layer)] == last
    entered = [seam.module for seam in plan.enters if seam.module.startswith(layer)]
    assert len(entered) == 2 and all(
        name.startswith(path) for name, path in zip(first, sorted(entered, reverse=True), strict=True)
    )
