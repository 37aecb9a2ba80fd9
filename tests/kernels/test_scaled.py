from __future__ import annotations

import torch

from phalanx.kernels.scaled import scaled


def test_the_factor_keeps_its_precision() -> None:
    x, factor = torch.tensor([1.0, 3.0]), torch.tensor(1 / 3)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(scaled(x.to(dtype), factor), (x * factor).to(dtype))
    exact = torch.tensor([1.0 + 1e-12], dtype=torch.float64)
    assert torch.equal(scaled(exact, torch.tensor(1.0, dtype=torch.float64)), exact)
