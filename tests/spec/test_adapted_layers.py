"""LoRA in the run file: which layers have adapters and how many parameters they are, against the real modules; and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from phalanx.models.decoder import AXES
from phalanx.models.init import build
from phalanx.spec.adapted_layers import adapter_parameters, flops_per_token, linear_layers, trained_parameters
from phalanx.spec.check import check
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.model import PRESETS, ModelSpec
from phalanx.spec.run import Lora
from phalanx.transforms import lora
from phalanx.verification.cases import MODELS

SPECS = MODELS | {
    "mtp": replace(MODELS["mla"], mtp_depth=2),
    "qwen3-0.6b": PRESETS["qwen3-0.6b"],
    "gpt2-124m": PRESETS["gpt2-124m"],
}
RUN = """\
[model]
preset = "tiny-dense"
[train]
batch = 2
sequence_length = 32
steps = 2
"""


@pytest.mark.parametrize("name", SPECS)
def test_layers_are_those_of_the_module(name: str) -> None:
    model = build(SPECS[name])
    linear = {path: tuple(m.weight.shape) for path, m in model.named_modules() if isinstance(m, nn.Linear) and path != "head"}
    stacked = {path: tuple(p.shape) for path, p in model.named_parameters() if ".experts." in path}
    assert linear_layers(SPECS[name]) == linear | stacked


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("targets", [(), ("query", "kv_up", "experts.down"), ("*",)], ids=["all", "some", "everything"])
def test_count_of_adapters_is_that_of_the_module(name: str, targets: tuple[str, ...]) -> None:
    model, settings = build(SPECS[name]), Lora(rank=3, targets=targets)
    base = sum(parameter.numel() for parameter in model.parameters())
    lora.apply([model], settings, AXES)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained_parameters(SPECS[name], settings) == trained == adapter_parameters(SPECS[name], settings) > 0
    assert sum(parameter.numel() for parameter in model.parameters()) == base + trained


def test_without_a_rank_everything_is_trained() -> None:
    spec = PRESETS["qwen3-0.6b"]
    assert trained_parameters(spec, Lora()) == spec.parameters()
    assert flops_per_token(spec, Lora(), 128) == spec.flops_per_token(128)


def test_frozen_matrices_have_no_weight_gradients() -> None:
    """Of the 6 FLOPs of a weight, 4 remain; attention has no weights, and a small adapter adds little."""
    spec = ModelSpec(dim=512, layers=2, heads=8, vocab=1000)
    matrices, attention = spec.flops_per_token(0), spec.flops_per_token(64) - spec.flops_per_token(0)
    assert flops_per_token(spec, Lora(rank=1), 64) == pytest.approx(matrices * 2 / 3 + attention, rel=0.01)


def problems(*overrides: str) -> str:
    with pytest.raises(RunError) as refused:
        loads(RUN, overrides=list(overrides))
    return str(refused.value)


def test_unknown_targets_are_refused_with_the_names_there_are() -> None:
    message = problems("lora.rank=4", 'lora.targets=["query", "q_proj"]')
    assert '"q_proj" is no layer of this model' in message
    assert '"query" is no layer' not in message
    assert "query" in message and "down" in message and "blocks.0.attention.query" in message


def test_keys_of_adapters_need_a_rank() -> None:
    assert "lora.alpha = 16.0 describes adapters, but lora.rank is not given" in problems("lora.alpha=16")
    assert 'lora.base = "nf4" describes adapters, but lora.rank is not given' in problems("lora.base=nf4")
    assert "lora.dropout = 0.1 describes adapters, but lora.rank is not given" in problems("lora.dropout=0.1")


def test_dropout_is_refused_where_no_mask_is_known() -> None:
    moe = ("model.preset=tiny-moe", "lora.rank=4", "lora.dropout=0.1")
    assert "blocks.0.mlp.experts.up is added to its matrices" in problems(*moe, 'lora.targets=["experts.up"]')
    assert "lora.dropout = 0" in problems("model.mtp_depth=1", "lora.rank=4", "lora.dropout=0.1", 'lora.targets=["mtp.*"]')
    assert loads(RUN, overrides=moe).lora.dropout == 0.1  # experts are no targets


def test_a_rank_beyond_the_matrices_is_refused() -> None:
    assert "lora.rank = 100 exceeds 32" in problems("lora.rank=100")


def test_other_trainers_names_lead_here() -> None:
    assert "lora.targets" in problems("lora.rank=4", 'lora.target_modules=["query"]')


def test_scale_and_resumption() -> None:
    assert Lora(rank=8).scale == 2.0 and Lora(rank=8, alpha=4.0).scale == 0.5
    from phalanx.spec.dump import changed, dump

    run = loads(RUN, overrides=["lora.rank=4"])
    assert loads(dump(run)) == run and not check(run)
    assert changed(run, loads(RUN, overrides=["lora.rank=8"])) == ["lora.rank: 4 → 8"]
