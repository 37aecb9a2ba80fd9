from __future__ import annotations

import torch

from phalanx.kernels.scaled import scaled


def test_the_factor_keeps_its_precision() -> None:
    x, factor = torch.tensor([1.0, 3.0]), torch.tensor(1 / 3)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(scaled(x.to(dtype), factor), (x * factor).to(dtype))
    # In bf16, 1/3 is 0.3340, and 3 times that is no longer 1.
    assert scaled(x.bfloat16(), factor)[1] == 1.0 and (x.bfloat16() * factor)[1] != 1.0
    exact = torch.tensor([1.0 + 1e-12], dtype=torch.float64)
    assert torch.equal(scaled(exact, torch.tensor(1.0, dtype=torch.float64)), exact)
