"""Models of transformers, unmodified, on every kind of layout: each equals one process, or is refused before the start with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hf_families import COMMON, GPT, ONE_DOCUMENT, ROUTED, WIDE, WINDOW, spec
from ranks import tiny_run

from phalanx.models.init import build
from phalanx.spec import config_text
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool

pytest.importorskip("transformers", minversion="5")

FAMILIES = (
    "apertus", "bloom", "cohere", "deepseek_v3", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "glm4", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "granitemoe", "llama", "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "stablelm", "starcoder2",
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "tensor-zero3": {"tensor": 2, "shard": 2, "zero": 3},
    "expert": {"data": 2, "expert": 2},
    "sequence": {"tensor": 2, "sequence": True},
}
COMBINED: dict[str, dict[str, Any]] = {
    "sequence-zero3": {"tensor": 2, "sequence": True, "shard": 2, "zero": 3},
    "sequence-pipeline": {"tensor": 2, "sequence": True, "pipeline": 2},
    "sequence-context": {"tensor": 2, "sequence": True, "context": 2},
}
"""Layouts of some families only."""
EXPERTS = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
REFUSED = {
    ("bloom", "context"): "positions",
    ("falcon", "context"): "mixes positions|attention interface",
    ("opt", "sequence"): "add in model.decoder.layers.0 needs all positions",
}
"""What is said of those that cannot be divided so."""
QUICK = (
    ("phi3", "pipeline"), ("gemma2", "context"), ("gpt_oss", "context"), ("mixtral", "expert"), ("llama", "sequence"),
)  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


def cases() -> Iterator[Any]:
    for family in FAMILIES:
        for layout in LAYOUTS:
            if layout != "expert" or family in EXPERTS:
                marks = () if (family, layout) in QUICK else (pytest.mark.slow,)
                yield pytest.param(family, layout, marks=marks, id=f"{family}-{layout}")
    for family in ("llama", "phi3", "mixtral"):
        yield from (pytest.param(family, layout, marks=pytest.mark.slow, id=f"{family}-{layout}") for layout in COMBINED)


@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_a_family_on_a_layout_equals_one_process(family: str, layout: str, pool: RankPool) -> None:
    settings = ["train.sequence_length=32"] + (["data.document_mask=false"] if family in ONE_DOCUMENT else [])
    run = replace(tiny_run(*settings), model=spec(family), layout=Layout(**({"data": 1} | (LAYOUTS | COMBINED)[layout])))
    if (words := REFUSED.get((family, layout))) is not None:
        with pytest.raises(RunError, match=words):
            verify(run, steps=1, pool=pool)
        return
    report = verify(run, steps=2, pool=pool)
    assert report.passed, f"{report.failure} {[check for check in report.checks if not check.passed]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(data=1, context=2, context_method="gather"), Layout(data=1, context=2, context_method="ulysses"), Layout(data=1, tensor=2, context=2)],
    ids=["gather", "ulysses", "ring, tensor"],
)  # fmt: skip
def test_sinks_of_shared_sequences_equal_those_of_one_process(layout: Layout, pool: RankPool) -> None:
    """One of two layers has a window, and rows hold several documents."""
    report = verify(replace(tiny_run("train.sequence_length=32"), model=spec("gpt_oss"), layout=layout), steps=2, pool=pool)
    assert report.passed, f"{report.failure} {[check for check in report.checks if not check.passed]}"


TAUGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": ("Ministral3", WIDE),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        WIDE | WINDOW | ROUTED | {"v_head_dim": 12, "moe_intermediate_size": 36, "n_routed_experts": 6, "n_group": 2, "topk_group": 1},
    ),
    "openai_gpt": ("OpenAIGPT", GPT),
    "doge": ("Doge", WIDE),
    "bert": ("Bert", {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}),
}  # fmt: skip
"""Families that showed a mistake: an operation without a rule, documents behind an object in a rewritten layer, layers that return a list, attention
that reads its mask, and a model that sees later tokens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "words"),
    [
        ("ministral3", "context", None),
        ("mimo_v2_flash", "tensor", None),
        ("openai_gpt", "pipeline", None),
        ("doge", "tensor", None),
        ("doge", "context", "0 of its 2 layers compute attention by the attention interface"),
        ("bert", "tensor", "depend on later tokens.*is_decoder = true"),
    ],
)
def test_a_family_that_showed_a_mistake(family: str, layout: str, words: str | None, pool: RankPool) -> None:
    import transformers

    kind, sizes = TAUGHT[family]
    text = getattr(transformers, f"{kind}Config")(**COMMON | sizes).to_json_string(use_diff=False)
    model = config_text.spec_of(config_text.parse(text, family))
    settings = ["train.sequence_length=32"] + (["data.document_mask=false"] if family in ("openai_gpt", "doge") else [])
    run = replace(tiny_run(*settings), model=model, layout=Layout(**({"data": 1} | LAYOUTS[layout])))
    if words is not None:
        with pytest.raises(RunError, match=words):
            verify(run, steps=1, pool=pool)
        return
    report = verify(run, steps=2, pool=pool)
    assert report.passed, f"{report.failure} {[check for check in report.checks if not check.passed]}"


@pytest.mark.parametrize("name", ["Bamba", "NemotronH", "Gemma3nText"])
def test_configs_that_json_or_the_layers_write_differently(name: str) -> None:
    """An infinite number, a list of layers in place of their number, a size for each layer."""
    import transformers

    text = getattr(transformers, f"{name}Config")().to_json_string(use_diff=False)
    model = config_text.spec_of(config_text.parse(text, name))
    assert model.layers > 1
    build(model)
