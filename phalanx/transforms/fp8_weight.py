"""A weight that is in fp8 in memory, with one scale: what a linear layer reads where a sharded weight was gathered in fp8. `parallel/fp8_gather`
makes it; `transforms/fp8` multiplies with it.

To autograd it is a parameter in bf16, whose gradient is in bf16. It has no values in bf16, so that nothing but a product in fp8 can read it.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from phalanx.spec.errors import RunFailed

_aten = torch.ops.aten
_VIEWS = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)
"""What autograd, torch.nn.Parameter and FSDP2 do to a parameter: the same to its values."""


class Weight8(Tensor):
    """numbers / scale, rounded to e4m3."""

    numbers: Tensor
    """In e4m3."""
    scale: Tensor
    """The factor that the weight was multiplied by; one number."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Weight8:
        """`dtype`, `device`: as which autograd sees it. Fake tensors, of a rehearsal, are on meta to it."""
        strides, offset, device = numbers.stride(), numbers.storage_offset(), device or numbers.device
        made: Any = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
        )
        made.numbers, made.scale = numbers, scale
        return cast(Weight8, made)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Weight8:
        return Weight8(inner["numbers"], inner["scale"], dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Weight8({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in _VIEWS:
            cls._refuse(func)
        weight: Weight8 = args[0]
        return Weight8(func(weight.numbers, *args[1:], **(kwargs or {})), weight.scale, weight.dtype, weight.device)

    @staticmethod
    def _refuse(func: Any) -> NoReturn:
        raise RunFailed(
            f"precision.fp8_gather gathers the weights of linear layers in fp8, but this model reads one outside of its layer ({func}): "
            "remove precision.fp8_gather."
        )
