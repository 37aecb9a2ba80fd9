from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import ALONE, tiny_run, tiny_trainer
from torch import nn
from transforms.small import KINDS, learned, made

from phalanx.models.init import build, materialize
from phalanx.spec.model import ModelSpec
from phalanx.transforms.precision import LossScale, computing

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


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.bfloat16)])
def test_matrices_multiply_in_16_bits_and_weights_and_gradients_stay_in_fp32(compute: str, dtype: torch.dtype) -> None:
    types, logits, model = outputs(compute)
    assert set(types.values()) == {dtype}
    assert len(types) == 2 * 7
    assert logits.dtype == dtype
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
    assert {piece.tensor.dtype for piece in trainer.tensors().values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_fp16_reaches_every_gradient_of_every_kind_of_model(kind: str) -> None:
    """Attention, grouped products, norms and their backwards in fp16, on documents and whole windows."""
    exact, low = learned(made(KINDS[kind])), learned(made(KINDS[kind]), "fp16")
    assert all(torch.isfinite(gradient).all() for gradient in low.values())
    assert abs(low["loss"] / exact["loss"] - 1) < 1e-3


def test_a_loss_scale_halves_at_once_and_doubles_slowly() -> None:
    scale = LossScale.of("fp16", 1024.0, growth_after=3)
    values = []
    for good in (True, True, False, True, True, True, True, True, False, False):
        scale.update(good)
        values.append(scale.value)
    assert values == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 512, 256]


def test_a_loss_scale_keeps_within_what_fp16_can_use() -> None:
    scale = LossScale.of("fp16", 2.0**23, growth_after=1)
    for _ in range(5):
        scale.update(True)
    assert scale.value == 2.0**24
    for _ in range(60):
        scale.update(False)
    assert scale.value == 2.0**-14


def test_a_loss_scale_goes_on_from_a_checkpoint() -> None:
    scale, fresh = LossScale.of("fp16", 65536.0, growth_after=4), LossScale.of("fp16", 65536.0, growth_after=4)
    for good in (False, True, True, True):
        scale.update(good)
    fresh.restore(scale.state())
    assert fresh == scale
    fresh.update(True)
    assert fresh.value == 65536.0


def test_a_loss_scale_that_has_come_down_to_one_stays_there() -> None:
    scale, fresh = LossScale.of("fp16", 2.0), LossScale.of("fp16", 2.0)
    scale.update(False)
    fresh.restore(scale.state())
    assert fresh.value == scale.value == 1.0


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp8"])
def test_other_formats_need_no_scale(compute: str) -> None:
    scale = LossScale.of(compute, 65536.0, growth_after=1)
    for good in (True, False, True):
        scale.update(good)
    assert scale.value == 1.0
    scale.restore({"value": 4096.0, "good_steps": 3.0})  # of a run that was fp16 before
    assert scale.value == 1.0
    half = LossScale.of("fp16", 65536.0)
    half.restore(scale.state())
    assert half.value == 65536.0
