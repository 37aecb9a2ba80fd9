"""Dropout of adapters' inputs: its rate and independence, that a slice of an input has the masks of the whole, and the product and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from phalanx.models.decoder import AXES
from phalanx.models.init import build, fill, reset_buffers
from phalanx.spec.run import Lora
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.transforms import compile, lora, recompute
from phalanx.transforms.dropout import DroppedProduct, dropped, layer_key, mask_keys
from phalanx.verification.cases import MODELS

CPU = torch.device("cpu")
KEYS = torch.from_numpy(mask_keys(3, np.arange(40, 48), np.arange(64)))


def zeros(name: str = "a", rate: float = 0.2, keys: Tensor = KEYS) -> Tensor:
    return (dropped(torch.ones(*keys.shape, 96), keys, layer_key(name, CPU), 0, rate) == 0).float()


def test_rate_and_scale() -> None:
    x = torch.full((8, 64, 96), 3.0)
    out = dropped(x, KEYS, layer_key("a", CPU), 0, 0.2)
    assert zeros().mean() == pytest.approx(0.2, abs=0.005)
    assert out.unique().tolist() == [0.0, pytest.approx(3.0 / 0.8)]


def test_layers_samples_positions_and_channels_are_independent() -> None:
    """Both of two are zero with the product of their probabilities: 0.04, with a standard deviation below 0.001."""
    first = zeros()
    others = {
        "layers": first * zeros("b"),
        "samples": first[1:] * first[:-1],
        "positions": first[:, 1:] * first[:, :-1],
        "channels": first[..., 1:] * first[..., :-1],
        "seeds": first * zeros(keys=torch.from_numpy(mask_keys(4, np.arange(40, 48), np.arange(64)))),
    }
    assert {name: round(float(both.mean()), 2) for name, both in others.items()} == dict.fromkeys(others, 0.04)


def test_parts_of_an_input_have_the_masks_of_the_whole() -> None:
    x = torch.randn(8, 64, 96, generator=torch.Generator().manual_seed(0))
    whole = dropped(x, KEYS, layer_key("a", CPU), 0, 0.3)
    assert torch.equal(dropped(x[..., 32:64], KEYS, layer_key("a", CPU), 32, 0.3), whole[..., 32:64])
    own = np.array([3, 4, 60])
    part = torch.from_numpy(mask_keys(3, np.arange(42, 45), own))
    assert torch.equal(dropped(x[2:5, own], part, layer_key("a", CPU), 0, 0.3), whole[2:5, own])


def test_the_product_and_its_gradients() -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, 96, generator=dice).requires_grad_()
    a = torch.randn(5, 96, generator=dice).requires_grad_()
    mask, gradient = (KEYS, layer_key("a", CPU)), torch.randn(8, 64, 5, generator=dice)
    expected = torch.autograd.grad((dropped(x, *mask, 0, 0.3) @ a.t() * gradient).sum(), (x, a))
    found = torch.autograd.grad((DroppedProduct.apply(x, a, *mask, (0, 0.3)) * gradient).sum(), (x, a))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def adapted(rate: float = 0.4) -> tuple[nn.Module, lora.Adapters]:
    spec = MODELS["dense"]
    model = build(spec)
    adapters = lora.apply([model], Lora(rank=3, dropout=rate), AXES)
    model.to_empty(device=CPU)
    reset_buffers(model)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapters.names:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=dice))
            else:
                fill(parameter, 0, name, spec)
    if adapters.dropout is not None:
        adapters.place_dropout([model], {name: TensorSlice.full(p.shape) for name, p in model.named_parameters()}, CPU)
    return model, adapters


def outputs(model: nn.Module, length: int = 12) -> Tensor:
    tokens = torch.arange(2 * length).view(2, length) % 257
    return model(tokens, torch.arange(length).expand(2, length))


def test_only_what_is_trained_is_dropped() -> None:
    model, adapters = adapted()
    assert adapters.dropout is not None
    whole = outputs(adapted(0.0)[0])
    adapters.dropout.keys = torch.from_numpy(mask_keys(3, np.arange(2), np.arange(12)))
    first = outputs(model)
    assert not torch.allclose(first, whole) and torch.equal(outputs(model), first)
    adapters.dropout.keys = torch.from_numpy(mask_keys(3, np.arange(2, 4), np.arange(12)))
    assert not torch.allclose(outputs(model), first)
    with torch.no_grad():
        assert torch.equal(outputs(model), whole)


@pytest.mark.parametrize("way", ["selective", "full", pytest.param("compiled", marks=pytest.mark.slow)])
def test_recomputed_and_compiled_blocks_repeat_the_masks(way: str) -> None:
    """Even if another micro-batch has begun before the backward, as in a pipeline."""
    gradients = []
    for changes in (False, True):
        model, adapters = adapted()
        assert adapters.dropout is not None
        if changes and way == "compiled":
            torch._dynamo.utils.counters.clear()
            compile.apply([model], "aot_eager", pytest.fail)
        elif changes:
            recompute.apply([model], way, 1, compiled=False)  # type: ignore[arg-type]
        adapters.dropout.keys = torch.from_numpy(mask_keys(3, np.arange(2), np.arange(12)))
        loss = outputs(model).square().mean()
        adapters.dropout.keys = torch.from_numpy(mask_keys(3, np.arange(2, 4), np.arange(12)))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert not torch._dynamo.utils.counters["graph_break"]
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
