"""Which number format the forward and backward compute in. Weights stay in fp32; training opens the context around a forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def computing(compute: str, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bf16, sums and norms in fp32; or everything in fp32."""
    if compute == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
