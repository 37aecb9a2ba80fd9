"""The head of models of transformers, opened for a loss in chunks: only where logits are what it returns."""

from __future__ import annotations

from typing import Any

import hf_families
import pytest
import torch
from hf_families import FAMILIES, marked
from torch import Tensor
from torch.nn.functional import linear

from phalanx.models import hf_module
from phalanx.models.fake_forward import fake_forward
from phalanx.models.init import build

pytest.importorskip("transformers")

CLOSED = {"cohere", "cohere2", "gemma2", "granite", "granitemoe", "gptj", "codegen"}
"""They scale or cap their logits, or their head has a bias."""


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # gpt_bigcode, when it is imported
@pytest.mark.parametrize("name", marked(FAMILIES))
def test_an_opened_head_gives_the_logits(name: str) -> None:
    model: Any = build(hf_families.spec(name))
    if not hf_module.open_head(model):
        assert not hasattr(model, "project")
        return
    assert name not in CLOSED
    made: list[Tensor] = []

    def project(x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        made.append(linear(x_BSD, weight_VD))
        return made[-1]

    model.project = project
    results: list[Any] = []
    model.register_forward_hook(lambda module, args, result: results.append(result))
    fake_forward(model, lambda parameters: torch.autograd.set_grad_enabled(False))
    assert len(made) == 1 and results[0] is made[0], "what the head returns is what the model returns"


def test_common_families_have_an_open_head() -> None:
    for name in ("llama", "qwen3", "phi3", "mixtral", "gpt2"):
        assert hf_module.open_head(build(hf_families.spec(name))), name
