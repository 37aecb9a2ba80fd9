from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from transforms.small import CPU, KINDS, differing, kept, learned, learned_plainly, loss, made

from phalanx.transforms import activations, fp8, recompute


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_counts_are_the_same_bits(kind: str, compute: str) -> None:
    moved = learned(made(KINDS[kind], lambda parts: activations.apply(parts, CPU)), compute)
    assert differing(learned_plainly(kind, compute), moved) == []


def test_together_with_recomputation_and_fp8() -> None:
    def low(parts: list) -> None:
        fp8.apply(parts, "tensor", CPU)

    def both(parts: list) -> None:
        recompute.apply(parts, "full", 2)
        activations.apply(parts, CPU)

    assert differing(learned(made(KINDS["moe"], low), "bf16"), learned(made(KINDS["moe"], low, both), "bf16")) == []


def test_they_really_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block saves is copied, and the original's memory is given back when the block is done."""
    originals: list[weakref.ref] = []
    sizes: list[int] = []
    like = activations._like

    def noted(tensor: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
        originals.append(weakref.ref(tensor.untyped_storage()))
        sizes.append(tensor.numel() * tensor.element_size())
        return like(tensor, device, pinned)

    monkeypatch.setattr(activations, "_like", noted)
    model = made(KINDS["dense"], lambda parts: activations.apply(parts, CPU))
    value, waiting = kept(lambda: loss(model))
    _, plain = kept(lambda: loss(made(KINDS["dense"])))
    assert sum(sizes) > 0.5 * plain  # the rest are logits, masks and what no block saves
    assert waiting < 1.1 * plain  # nothing waits twice
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(sizes) == len(originals) >= 2 * 12 and weights
    value.backward()


def test_parameters_and_small_tensors_stay() -> None:
    packer = activations._BlockForward(activations.Offloader(CPU, 4096), lambda: None, set())
    weight = torch.nn.Parameter(torch.ones(64, 64))
    for stays in (weight, weight.t(), weight.to(torch.bfloat16), weight.to(torch.bfloat16).t(), torch.ones(8)):
        assert packer.pack(stays) is stays
    indices = torch.ones(64, 64, dtype=torch.int64)
    assert packer.pack(indices) is indices
    x = torch.randn(64, 64)
    away = packer.pack(x)
    assert packer.pack(x) is away and isinstance(away, activations._Offloaded)
    back = away.restore()
    assert torch.equal(back, x) and back.data_ptr() != x.data_ptr()
    assert packer.pack(x.t()) is not away and away.restore().stride() == x.stride()


def test_what_is_said() -> None:
    said: list[str] = []
    made(KINDS["mla"], lambda parts: said.append(activations.apply(parts, CPU)))
    assert said == ["activations of blocks.0 … mtp.0.block (4) wait in host memory: copied, although it is the same memory"]
