from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transforms.small import CPU, KINDS, learned, made, trained

from phalanx.models.init import build
from phalanx.models.moe import Experts, grouped_product
from phalanx.spec.errors import RunError
from phalanx.spec.model import Moe
from phalanx.transforms import fp8, fp8_experts, recompute
from phalanx.transforms.fp8_experts import multiply_experts
from phalanx.transforms.fp8_numbers import E4M3, rounded

COUNTS = [5, 0, 13, 1, 0, 33]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """With rows of very different sizes."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice) * torch.exp(torch.randn((*shape[:-1], 1), generator=dice))


def back(x: Tensor) -> Tensor:
    """What fp8 makes of the rows, in fp64."""
    part = rounded(x, E4M3, "row")
    return part.values.double() / part.scale


@pytest.mark.parametrize("counts", [COUNTS, [52, 0, 0, 0, 0, 0]])
def test_products_and_gradients_are_those_of_the_rounded_numbers(counts: list[int]) -> None:
    x = numbers(52, 24).requires_grad_()
    weight = numbers(6, 20, 24, seed=1).requires_grad_()
    upstream = numbers(52, 20, seed=2).to(torch.bfloat16)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    y = multiply_experts(x, weight, ends)
    y.backward(upstream)
    assert y.dtype == torch.bfloat16 and x.grad is not None and weight.grad is not None

    half = weight.detach().to(torch.bfloat16)
    expert = torch.arange(6).repeat_interleave(torch.tensor(counts))
    exact = torch.einsum("rk,rnk->rn", back(x.detach()), back(half)[expert])
    x_grad = torch.einsum("rn,rkn->rk", back(upstream), back(half.transpose(1, 2))[expert])
    outer = upstream.double()[:, :, None] * x.detach().to(torch.bfloat16).double()[:, None]
    weight_grad = torch.zeros(6, 20, 24, dtype=torch.float64).index_add_(0, expert, outer)
    for found, wanted in ((y, exact), (x.grad, x_grad), (weight.grad, weight_grad)):
        # Nothing but the rounding of a result to bf16, by at most 2^-9.
        assert ((found - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6 * wanted.abs().max()).all()
    assert not weight.grad[[index for index, count in enumerate(counts) if count == 0]].any()


def test_experts_in_fp8_are_near_those_in_bf16() -> None:
    found = []
    for multiply in (grouped_product, multiply_experts):
        experts = Experts(32, Moe(experts=6, active=2, ffn=48))
        experts.multiply = multiply
        with torch.no_grad():
            for number, weight in enumerate(experts.parameters()):
                weight.copy_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        x = torch.randn(52, 32, generator=torch.Generator().manual_seed(7)).requires_grad_()
        scales = torch.rand(52, generator=torch.Generator().manual_seed(8)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(x, torch.tensor(COUNTS), scales)
        y.float().square().sum().backward()
        found.append([y.float(), x.grad, scales.grad, *(weight.grad for weight in experts.parameters())])
    for in_16, in_8 in zip(*found, strict=True):
        assert in_16 is not None and in_8 is not None
        distance = (in_8 - in_16).norm() / in_16.norm()
        # e4m3 rounds a number by 2.6e-2 in the root mean square: a few such errors, one for each factor.
        assert 1e-3 < distance < 0.13


def test_no_rows_give_zeros_and_learn_zeros() -> None:
    experts = Experts(32, Moe(experts=6, active=2, ffn=48))
    experts.multiply = multiply_experts
    with torch.no_grad():
        for weight in experts.parameters():
            weight.fill_(1.0)
    x = torch.empty(0, 32, requires_grad=True)
    experts(x, torch.zeros(6, dtype=torch.int64)).sum().backward()
    for found in (x, *experts.parameters()):
        assert found.grad is not None and found.grad.shape == found.shape and not found.grad.any()


def test_only_experts_of_the_blocks_in_fp8_change() -> None:
    model = build(replace(KINDS["moe"], layers=4))
    sentence = fp8.apply([model], "tensor", CPU, range(1, 3), experts=True)
    changed = [
        name for name, module in model.named_modules() if isinstance(module, Experts) and module.multiply is multiply_experts
    ]
    assert changed == ["blocks.1.mlp.experts", "blocks.2.mlp.experts"]
    assert "routed experts of 2 layers: e4m3" in sentence and sentence.endswith("router, embedding and head in bf16")
    plain = build(KINDS["moe"])
    assert "routed experts, embedding" in fp8.apply([plain], "tensor", CPU)
    assert all(module.multiply is grouped_product for module in plain.modules() if isinstance(module, Experts))


def test_recomputed_blocks_give_the_same_bits() -> None:
    in_fp8 = lambda parts: fp8.apply(parts, "tensor", CPU, experts=True)  # noqa: E731
    plain = learned(made(KINDS["moe"], in_fp8), "bf16")
    for mode in ("full", "selective"):
        again = learned(made(KINDS["moe"], in_fp8, lambda parts, mode=mode: recompute.apply(parts, mode)), "bf16")
        assert all(torch.equal(again[name], plain[name]) for name in plain)
    rest = learned(made(KINDS["moe"], lambda parts: fp8.apply(parts, "tensor", CPU)), "bf16")
    assert any(not torch.equal(rest[name], plain[name]) for name in plain if "experts" in name)


def test_gpus_without_the_kernel_and_odd_widths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    blocks = dict(build(KINDS["moe"]).blocks.named_children())  # type: ignore[union-attr, operator]
    with pytest.raises(
        RunError, match=r"NVIDIA L40S has compute capability 8\.9; .* 9\.0 or 10\.0; remove precision\.fp8_experts"
    ):
        fp8_experts.apply(blocks, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8_experts.apply(blocks, gpu)
    spec = replace(KINDS["moe"], moe=Moe(experts=4, active=2, ffn=40))
    with pytest.raises(RunError, match=r"multiples of 16, but those of .* are \[40, "):
        fp8_experts.apply(dict(build(spec).blocks.named_children()), gpu)  # type: ignore[union-attr, operator]


@pytest.mark.slow
def test_training_reaches_nearly_the_same_loss() -> None:
    exact = trained(made(KINDS["moe"]), "bf16", 80)
    found = trained(made(KINDS["moe"], lambda parts: fp8.apply(parts, "tensor", CPU, experts=True)), "bf16", 80)
    assert found != exact and abs(found / exact - 1) < 0.02
