"""LoRA on one device: the product with an adapter, what is frozen, and the names of dimensions by which other techniques cut adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch import nn

from phalanx.models.decoder import AXES
from phalanx.models.init import ADAPTERS, build, fill, reset_buffers
from phalanx.spec.cut_plan import dim_names
from phalanx.spec.run import Lora
from phalanx.transforms import compile, fp8, lora, recompute
from phalanx.verification.cases import MODELS

ALL = ("query", "key", "value", "output", "gate", "up", "down")


def adapted(name: str, settings: Lora, *, zero: bool = False) -> tuple[nn.Module, lora.Adapters]:
    """A model with random weights and, unless `zero`, adapters that have left zero."""
    spec = MODELS[name]
    model = build(spec)
    adapters = lora.apply([model], settings, AXES)
    model.to_empty(device=torch.device("cpu"))
    reset_buffers(model)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path in adapters.names and not (zero and path.endswith("lora_b")):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=dice))
            elif path in adapters.names:
                parameter.zero_()
            else:
                fill(parameter, 0, path, spec)
    return model, adapters


def outputs(model: nn.Module, length: int = 12) -> torch.Tensor:
    tokens = torch.arange(2 * length).view(2, length) % 257
    return model(tokens, torch.arange(length).expand(2, length))


def merged(model: nn.Module, adapters: lora.Adapters, name: str) -> nn.Module:
    """A plain model whose weights are those of the LoRA paper: W + alpha / rank · B·A."""
    plain = build(MODELS[name]).to_empty(device=torch.device("cpu"))
    reset_buffers(plain)
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            stem = path.removesuffix("weight") if path.endswith(".weight") else f"{path}_"
            parameter.copy_(ours[path])
            if f"{stem}lora_a" in ours:
                parameter.add_(adapters.scale * torch.matmul(ours[f"{stem}lora_b"], ours[f"{stem}lora_a"]))
    return plain


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_adapters_is_the_merged_model(name: str) -> None:
    targets = (*ALL, "query_down", "query_up", "kv_down", "kv_up")
    model, adapters = adapted(name, Lora(rank=3, alpha=4.5, targets=targets))
    plain = merged(model, adapters, name)
    torch.testing.assert_close(outputs(model), outputs(plain), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_adapters_begin_as_nothing_and_can_be_switched_off(name: str) -> None:
    model, adapters = adapted(name, Lora(rank=3, targets=ALL), zero=True)
    with adapters.off():
        without = outputs(model)
    assert torch.equal(outputs(model), without)
    other, switched = adapted(name, Lora(rank=3, targets=ALL))
    assert not torch.allclose(outputs(other), without, atol=1e-2)
    with switched.off():
        assert torch.equal(outputs(other), without)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_only_adapters_have_gradients_and_recomputation_gives_the_same(mode: str) -> None:
    gradients = []
    for recomputes in (False, True):
        model, adapters = adapted("moe", Lora(rank=3, targets=ALL))
        if recomputes:
            recompute.apply([model], mode, 1, compiled=False)
        outputs(model).square().mean().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
        assert gradients[-1].keys() == adapters.names
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient)
        assert gradient.abs().max() > 0, path


def test_compiled_blocks_contain_their_adapters() -> None:
    """One graph per block, without a break at an adapter, and the same gradients."""
    gradients = []
    for backend in (None, "aot_eager"):
        model, _ = adapted("dense", Lora(rank=3))
        if backend is not None:
            torch._dynamo.utils.counters.clear()
            compile.apply([model], backend, pytest.fail)
        outputs(model).square().mean().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    assert not torch._dynamo.utils.counters["graph_break"]
    assert gradients[0].keys() == gradients[1].keys()
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient)


def test_dimensions_are_those_of_the_matrices() -> None:
    model = build(MODELS["moe"])
    axes = lora.apply([model], Lora(rank=3, targets=ALL), AXES).axes
    expected = {
        "blocks.1.attention.query.lora_a": ("rank", "model"),
        "blocks.1.attention.query.lora_b": ("heads", "rank"),
        "blocks.1.attention.output.lora_a": ("rank", "heads"),
        "blocks.1.mlp.shared.down.lora_a": ("rank", "ffn"),
        "blocks.1.mlp.experts.gate_lora_a": ("expert", "rank", "model"),
        "blocks.1.mlp.experts.gate_lora_b": ("expert", "ffn", "rank"),
        "blocks.1.mlp.experts.down_lora_a": ("expert", "rank", "ffn"),
    }
    assert {name: dim_names(name, axes) for name in expected} == expected
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert all(len(dim_names(name, axes)) == len(shape) for name, shape in shapes.items())
    assert dim_names("blocks.1.attention.query.weight", axes) == ("heads", "model")


def test_the_first_pattern_counts_for_adapters_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 6), "up": nn.Linear(4, 8)})])

    axes = {"*.up.weight": ("ffn", "model"), "*weight": ("other", "model"), "*": ("bias",)}
    table = lora.apply([Own()], Lora(rank=2), axes).axes
    assert dim_names("blocks.0.up.lora_b", table) == ("ffn", "rank")
    assert dim_names("blocks.0.a.lora_b", table) == ("other", "rank")
    assert dim_names("blocks.0.a.bias", table) == ("bias",)


def test_fp8_rounds_the_frozen_product_alone() -> None:
    model, adapters = adapted("dense", Lora(rank=3))
    fp8.apply([model], "row", torch.device("cpu"))
    layer = model.get_submodule("blocks.0.mlp.up")
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1))
    with adapters.off():
        rounded = layer(x)
    expected = rounded + adapters.scale * (x @ layer.lora_a.T) @ layer.lora_b.T
    torch.testing.assert_close(layer(x), expected.to(layer(x).dtype))


def test_initial_values_do_not_depend_on_the_layout() -> None:
    """A as torch initializes a linear layer of as many inputs, up to the kind of distribution; a slice of it is a slice of the whole."""
    from phalanx.spec.tensor_slice import TensorSlice

    spec, name = replace(MODELS["dense"], init_std=7.0), "blocks.0.mlp.up.lora_a"
    whole, part = torch.empty(64, 48), torch.empty(64, 16)
    fill(whole, 3, name, spec, initial=ADAPTERS)
    fill(part, 3, name, spec, TensorSlice.of((64, 48), (0, 16), (64, 16)), ADAPTERS)
    assert torch.equal(part, whole[:, 16:32])
    like = nn.Linear(48, 4096).weight.detach().std()
    assert whole.std() == pytest.approx(float(like), rel=0.05)
