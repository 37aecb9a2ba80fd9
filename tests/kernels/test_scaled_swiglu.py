"""silu(gate) · up · scale and its gradients against torch's own in fp64. `tests/gpu/test_kernels` runs the Triton kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.scaled_swiglu import scaled_swiglu


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(dtype: torch.dtype, scaled: bool) -> None:
    dice = torch.Generator().manual_seed(1)
    gate, up, gradient = (2 * torch.randn(13, 20, generator=dice).to(dtype) for _ in range(3))
    scales = torch.rand(13, generator=dice, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    given = [x.requires_grad_() for x in (gate, up, scales)[: 3 if scaled else 2]]
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = F.silu(exact[0]) * exact[1] * (exact[2][:, None] if scaled else 1)
    wanted.backward(gradient.double())
    found = scaled_swiglu(*given)
    found.backward(gradient)
    assert found.dtype == dtype
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)
    for ours, theirs in zip(given, exact, strict=True):
        assert ours.grad is not None and ours.grad.dtype == ours.dtype and theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=near, atol=10 * near)


def test_only_its_arguments_are_kept_for_the_backward() -> None:
    gate, up, scales = torch.randn(8, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True), torch.rand(8)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scaled_swiglu(gate, up, scales)
    assert set(kept) == {x.untyped_storage().data_ptr() for x in (gate, up, scales)}
