"""Attention of a custom module that calls `F.scaled_dot_product_attention`: those calls take a way through an attribute `attend` of the layer, as
the attention of the built-in decoder does, so that context parallelism can replace it. The module's source does not change.

Only plain causal attention can be shared by ranks: a mask that the module has made knows the positions of one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from phalanx.models.attention import Scope, attend_locally
from phalanx.models.fake_forward import fake_forward

_SCOPE = Scope(None)
"""All earlier positions: a module that calls for causal attention without a mask does not keep documents apart."""


def install(model: nn.Module, attend: Callable[..., Any] = attend_locally) -> None:
    """Gives every layer its `attend`, and makes it call that, also when it is recomputed; without a list of layers, the module itself."""
    for module in _holders(model):
        module.attend = attend
        module.forward = partial(_forward, module, module.forward)


def _holders(model: Any) -> list[Any]:
    path: str | None = model.layers_path
    return [model] if path is None else list(model.get_submodule(path).children())


def context_problem(model: nn.Module) -> str | None:
    """Why the ranks of a context group cannot share the attention of the module; None: they can. Call it before `install`."""
    watch, inside = _Calls(), [0]
    handles: list[Any] = []
    for module in _holders(model):
        handles.append(module.register_forward_pre_hook(lambda *_: inside.append(1)))
        handles.append(module.register_forward_hook(lambda *_: inside.append(0)))
    watch.is_inside = lambda: bool(inside[-1])
    try:
        fake_forward(model, lambda parameters: watch)
    except Exception as error:  # custom code may raise anything
        return (
            f"its forward does not run on tensors without values ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        )
    finally:
        for handle in handles:
            handle.remove()
    if watch.problem is not None:
        return watch.problem
    return None if watch.count else "it calls no F.scaled_dot_product_attention, so how its positions meet is unknown"


def _forward(holder: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Redirected(holder):
        return own(*args, **kwargs)


class _Redirected(TorchFunctionMode):
    def __init__(self, holder: Any):
        super().__init__()
        self._holder = holder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        call = _call(args, kwargs)
        return self._holder.attend(call["query"], call["key"], call["value"], _SCOPE, call["scale"])


class _Calls(TorchFunctionMode):
    """Looks at every call in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.problem: str | None = None
        self.is_inside: Callable[[], bool] = lambda: True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.count += 1
            outside = None if self.is_inside() else "an attention of it is outside of its layers"
            self.problem = self.problem or outside or _problem(_call(args, kwargs))
        return func(*args, **(kwargs or {}))


_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _call(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a call of `F.scaled_dot_product_attention` by name."""
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return defaults | dict(zip(_POSITIONAL, args, strict=False)) | (kwargs or {})


def _problem(call: dict[str, Any]) -> str | None:
    if call["attn_mask"] is not None:
        return "an attention of it has a mask of its own, which knows the positions of one rank only; call F.scaled_dot_product_attention with is_causal=True"
    if not call["is_causal"]:
        return "an attention of it is not causal"
    if call["dropout_p"]:
        return "an attention of it has dropout"
    if call["query"].ndim != 4 or call["key"].shape[2] != call["query"].shape[2]:
        return "an attention of it has queries and keys of other shapes than [batch, heads, positions, width]"
    return None
