from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transforms.small import CPU, KINDS, made, trained

from phalanx.models.init import build
from phalanx.transforms import fp8
from phalanx.transforms.fp8 import Linear8, available, linear, multiply, product_of
from phalanx.transforms.fp8_numbers import E4M3, E5M2, Scaling, rounded
from phalanx.transforms.fp8_weight import Weight8


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """With rows of very different sizes, as gradients have."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=dice) * torch.exp(spread * torch.randn((*shape[:-1], 1), generator=dice))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_largest_powers_of_two_that_fit(dtype: torch.dtype, scaling: Scaling) -> None:
    x = numbers(40, 24, spread=3.0)
    found = rounded(x, dtype, scaling)
    largest = x.abs().amax() if scaling == "tensor" else x.abs().amax(1, keepdim=True)
    assert found.scale.shape == largest.shape
    assert torch.equal(torch.frexp(found.scale).mantissa, torch.full_like(found.scale, 0.5))
    room = torch.finfo(dtype).max / (largest * found.scale)
    assert bool(((room >= 1) & (room < 2)).all())
    error = (found.values.float() / found.scale - x).abs() / largest
    assert error.max() <= 2.0 ** (-4 if dtype == E4M3 else -3)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("sizes", [(32, 64, 48), (33, 40, 20), (1, 16, 16)])
def test_emulation_equals_the_kernel(sizes: tuple[int, int, int], scaling: Scaling) -> None:
    """torch has the kernel for CPUs too, in newer versions also for rows; odd sizes are filled up."""
    rows, inner, columns = sizes
    for dtype in (E4M3, E5M2):
        a, b = rounded(numbers(rows, inner), dtype, scaling), rounded(numbers(columns, inner, seed=1), E4M3, scaling)
        try:
            exact = fp8._by_kernel(a, b, fast=False)
        except RuntimeError as error:
            pytest.skip(f"this torch has no such kernel for CPUs: {str(error)[:60]}")
        found = multiply(a, b)
        assert found.shape == exact.shape == (rows, columns)
        # Both sum in fp32, in another order perhaps: a result on the edge between two bf16 numbers may fall to either side.
        torch.testing.assert_close(found, exact, rtol=2**-8, atol=1e-6)
        assert (found != exact).float().mean() < 0.02


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_gradients_are_those_of_the_rounded_numbers(scaling: Scaling) -> None:
    x, weight, bias = numbers(3, 11, 32), numbers(20, 32, seed=1, spread=0.3), numbers(20, 1, seed=2)[:, 0]
    given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    upstream = numbers(3, 11, 20, seed=3).to(torch.bfloat16)
    out = linear(*given, scaling=scaling)
    out.backward(upstream)

    def back(values: Tensor, dtype: torch.dtype) -> Tensor:
        part = rounded(values, dtype, scaling)
        return part.values.double() / part.scale

    g = upstream.flatten(0, 1)
    half = weight.to(torch.bfloat16)  # whatever a layout stores, weights are rounded from bf16
    x8, w8 = back(x.flatten(0, 1), E4M3), back(half, E4M3)
    g8 = back(g, E5M2 if scaling == "tensor" else E4M3)
    wanted_weight = g8.t() @ x8 if scaling == "tensor" else g.double().t() @ x.flatten(0, 1).to(torch.bfloat16).double()
    wanted = [(g8 @ back(half.t(), E4M3).t()).view(x.shape), wanted_weight, g.double().sum(0)]
    assert out.dtype == torch.bfloat16
    exact = (x8 @ w8.t() + bias).view(out.shape)
    assert (out - exact).norm() <= 4e-3 * exact.norm()  # bf16 rounds by at most 2^-9
    for tensor, exact in zip(given, wanted, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == torch.float32
        assert (tensor.grad - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_slices_are_rounded_like_the_whole(scaling: Scaling) -> None:
    """So that ranks that share a matrix compute what one rank does."""
    x = numbers(64, 64, spread=1.0)

    def value(part: Tensor) -> Tensor:
        found = rounded(part, E4M3, scaling)
        return found.values.float() / found.scale

    whole = value(x)
    for dim in (0, 1):
        sliced = torch.cat([value(part) for part in x.chunk(4, dim)], dim)
        assert (sliced - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_weight_that_is_stored_in_fp8_multiplies_like_one_in_bf16(compiled: bool) -> None:
    x, weight = numbers(3, 11, 32), numbers(20, 32, seed=1, spread=0.3).to(torch.bfloat16)
    stored = rounded(weight, E4M3, "tensor")
    found = []
    for parameter in (nn.Parameter(weight), nn.Parameter(Weight8(stored.values, stored.scale, torch.bfloat16))):
        layer = nn.Sequential(nn.Linear(32, 20, bias=False))
        model = nn.Module()
        model.blocks = nn.ModuleList([layer])
        fp8.apply([model], "tensor", CPU)
        layer[0]._parameters["weight"] = parameter  # as FSDP2 does
        given = x.clone().requires_grad_()
        with warnings.catch_warnings(action="ignore"):  # warnings of compilers are for their authors
            y = (torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)(given)
        y.backward(numbers(3, 11, 20, seed=3).to(torch.bfloat16))
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        found.append((y, given.grad, parameter.grad))
    assert all(map(torch.equal, *found))


def test_nothing_finite_comes_of_what_is_not() -> None:
    for bad in (torch.inf, torch.nan):
        x = torch.ones(4, 16)
        x[1, 2] = bad
        assert not torch.isfinite(linear(x, torch.ones(8, 16))).all()
    assert torch.equal(linear(torch.zeros(4, 16), torch.ones(8, 16)), torch.zeros(4, 8, dtype=torch.bfloat16))


def test_only_linear_layers_of_blocks_change_and_parameters_do_not() -> None:
    model = build(KINDS["mla"])
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    sentence = fp8.apply([model], "tensor", CPU)
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    changed = [name for name, module in model.named_modules() if isinstance(module, Linear8)]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".block" in f".{name}"]
    assert changed == linears and sentence.startswith(f"{len(changed)} linear layers of blocks.0 … mtp.0.block (4): ")
    assert type(model.head) is type(model.mtp[0].join) is nn.Linear  # type: ignore[index,union-attr]


def test_blocks_at_both_ends_may_stay_in_bf16() -> None:
    spec = KINDS["dense"]
    model = build(replace(spec, layers=4))
    sentence = fp8.apply([model], "tensor", CPU, range(1, 3))
    changed = {name.split(".")[1] for name, module in model.named_modules() if isinstance(module, Linear8)}
    assert changed == {"1", "2"}
    assert "linear layers of blocks.1 and blocks.2: " in sentence and "; blocks.0 and blocks.3, router" in sentence
    # A stage of a pipeline knows which blocks of the whole model it has.
    stage = build(replace(spec, layers=4)).part(3, 4)
    assert fp8.apply([stage], "tensor", CPU, range(1, 3)) == "none here: blocks.3 in bf16"


def test_whoever_takes_a_forward_over_asks_how_to_multiply() -> None:
    module = nn.Linear(16, 16)
    assert product_of(module) is F.linear
    model = nn.Module()
    model.blocks = nn.ModuleList([module])
    fp8.apply([model], "row", CPU)
    x = numbers(4, 16)
    assert torch.equal(product_of(module)(x, module.weight, None), linear(x, module.weight, scaling="row"))
    assert torch.equal(module(x), linear(x, module.weight, module.bias, scaling="row"))


@pytest.mark.slow
def test_training_reaches_nearly_the_same_loss() -> None:
    exact = trained(made(KINDS["dense"]), "fp32", 80)
    assert exact < 1.8  # from 5.5; no model can do better than the logarithm of 4, 1.39
    for name, changes in {
        "bf16": [],
        "fp16": [],
        "tensor": [lambda parts: fp8.apply(parts, "tensor", CPU)],
        "row": [lambda parts: fp8.apply(parts, "row", CPU)],
    }.items():
        found = trained(made(KINDS["dense"], *changes), name if name == "fp16" else "bf16", 80)
        assert found != exact
        assert abs(found / exact - 1) < 0.02, name


def test_gpus_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available(CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = available(torch.device("cuda:0"))
    assert reason == "NVIDIA A100 has compute capability 8.0; fp8 needs 8.9 (Ada, Hopper) or newer"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert available(torch.device("cuda:0")) is None
