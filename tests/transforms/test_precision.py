from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import ALONE, tiny_run, tiny_trainer
from torch import nn

from phalanx.models.init import build, materialize
from phalanx.spec.model import ModelSpec
from phalanx.transforms.precision import computing

CPU = torch.device("cpu")
SPEC = ModelSpec(vocab=40, dim=16, layers=2, heads=2, ffn=32, qk_norm=True)


def outputs(compute: str) -> tuple[dict[str, torch.dtype], torch.Tensor, nn.Module]:
    """The type that each linear layer gives, the logits, and the model after a backward."""
    model = materialize(build(SPEC), 0, CPU)
    types: dict[str, torch.dtype] = {}

    def note(name: str, kind: torch.dtype) -> None:
        types[name] = kind

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, inputs, output, name=name: note(name, output.dtype))
    tokens = torch.arange(20)[None] % 40
    with computing(compute, CPU):
        logits = model(tokens, torch.arange(20)[None])
    logits.float().logsumexp(-1).sum().backward()
    return types, logits, model


def test_bf16_multiplies_matrices_in_bf16_and_keeps_weights_and_gradients_in_fp32() -> None:
    types, logits, model = outputs("bf16")
    assert set(types.values()) == {torch.bfloat16}
    assert len(types) == 2 * 7 + 1
    assert logits.dtype == torch.bfloat16
    for p in model.parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert p.grad.abs().sum() > 0


def test_fp32_stays_fp32() -> None:
    types, logits, _ = outputs("fp32")
    assert {*types.values(), logits.dtype} == {torch.float32}


def test_bf16_is_close_to_fp32_and_not_the_same() -> None:
    low, exact = outputs("bf16")[1].float(), outputs("fp32")[1]
    difference = ((low - exact).norm() / exact.norm()).item()
    assert 1e-4 < difference < 2e-2


def test_nothing_of_it_remains_outside() -> None:
    with computing("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_trainer_computes_in_what_the_plan_says(compute: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(f"precision.compute={compute}"), tmp_path)
    seen = set()
    trainer.model.register_forward_hook(lambda module, inputs, logits: seen.add(logits.dtype))
    trainer.step()
    trainer.close()
    assert seen == {torch.bfloat16 if compute == "bf16" else torch.float32}
    assert {tensor.dtype for tensor in trainer.tensors().values()} == {torch.float32}
