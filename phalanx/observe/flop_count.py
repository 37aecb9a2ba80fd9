"""How much a piece of work computes, and how much of that a second time: what recomputation costs. The account of a step reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Work(TorchDispatchMode):
    """While it is entered, counts the floating-point operations of matrix products and attention, backwards too."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.repeated = 0
        """Those of forwards that are repeated for their backward."""
        self.again = 0
        """How many repeated forwards are under way; whoever repeats them says so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flops_of(func, args, kwargs or {}, out):
            self.flops += count
            self.repeated += count if self.again else 0
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of one operation of torch; 0 for all but matrix products and attention."""
    formula = _FORMULAS.get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


@contextmanager
def counted(parts: Sequence[nn.Module]) -> Iterator[Work]:
    """Count what is computed, and what blocks that recompute compute again."""
    blocks = [module for part in parts for module in part.modules() if hasattr(module, "work")]
    work = Work()
    for block in blocks:
        block.work = work  # type: ignore[assignment]  # see `transforms/recompute`
    try:
        with work:
            yield work
    finally:
        for block in blocks:
            block.work = None  # type: ignore[assignment]


def _attention(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *rest: Any, **settings: Any) -> int:
    batch, heads, length, width = q_BHSE.shape
    return 2 * batch * heads * length * k_BKTE.shape[2] * (width + v_BKTE.shape[3])


def _attention_backward(gradient: Tensor, *rest: Any, **settings: Any) -> int:
    return 5 * _attention(*rest) // 2  # the scores again, and two products for each of the two


def _grouped(a: Tensor, b: Tensor, *rest: Any, **settings: Any) -> int:
    """Rows go through one matrix each; or, for weights, every row of one meets its own of the other."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # What torch's own table leaves out, or in older versions refuses: fewer heads for keys than for queries. Like it, attention is
    # counted as if every query saw every key.
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"): _attention for kernel in _KERNELS},
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward"): _attention_backward for kernel in _KERNELS},
    torch.ops.aten._grouped_mm: _grouped,
}
