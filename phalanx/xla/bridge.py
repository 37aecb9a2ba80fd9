"""torch modules as functions of JAX arrays: the one file that touches torchax, which traces them. `xla/forward` and `xla/model_seams` call it.

torchax 0.0.13 differs from torch in four ways, which this file mends: it names operators that torch 2.13 no longer has; it loses the
backward of an `autograd.Function` without a word; its autocast never reaches `F.linear`; and its autocast fails on `torch.cat`. `F.linear` itself is
that of `xla/wide_gradients` where devices add up gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn

from phalanx.models.moe import AttachLoss
from phalanx.spec.errors import RunFailed
from phalanx.xla.wide_gradients import linear

DTYPES = {
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.int64: jnp.int32,
    torch.int32: jnp.int32,
    torch.bool: jnp.bool_,
}
"""Formats of torch to those of JAX, whose integers have 32 bits."""


_WIDE_SUMS: ContextVar[bool] = ContextVar("_WIDE_SUMS", default=False)


@cache
def _torchax() -> Any:
    """torchax, imported although torch lacks some overloads that it names: they were those of named tensors, which nothing here calls."""
    packet: Any = torch._ops.OpOverloadPacket
    strict = packet.__getattr__

    def lenient(self: Any, key: str) -> Any:
        try:
            return strict(self, key)
        except AttributeError:
            if key.startswith("_"):
                raise
            return f"{self}.{key} is gone"

    packet.__getattr__ = lenient
    try:
        import torchax
        import torchax.amp
        import torchax.interop

        torchax.default_env()  # fills its tables
    finally:
        packet.__getattr__ = strict
    _mend_autocast(torchax.amp)
    plain = torchax.default_env()._ops[torch.nn.functional.linear].func

    def chosen(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        result: jax.Array = linear(x, weight, bias) if _WIDE_SUMS.get() else plain(x, weight, bias)
        return result

    torchax.default_env().override_op_definition(
        torch.nn.functional.linear, lambda *tensors, **named: call_jax(chosen, *tensors, *named.values())
    )
    return torchax


def _mend_autocast(amp: Any) -> None:
    """Its table is keyed by overloads, which `F.linear` never becomes; and its rule for mixed formats fails."""
    table, policy = amp.autocast_policy, amp.CastPolicy
    for operator in [operator for operator, rule in table.items() if rule is policy.PROMOTE]:
        del table[operator]
    for function in (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm):
        table[function] = policy.LOWER_PRECISION_FP


@jax.custom_vjp
def _attach_loss(x: jax.Array, loss: jax.Array, scale: jax.Array) -> jax.Array:
    return x


def _attach_forward(x: jax.Array, loss: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, scale


def _attach_backward(scale: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return gradient, scale, jnp.zeros_like(scale)


_attach_loss.defvjp(_attach_forward, _attach_backward)


def _attach(x: Tensor, loss: Tensor, scale: float) -> Tensor:
    result: Tensor = call_jax(lambda a, b: _attach_loss(a, b, jnp.float32(scale)), x, loss)
    return result


MAPPED: dict[type[torch.autograd.Function], Callable[..., Any]] = {AttachLoss: _attach}
"""Functions with a backward of their own, and what computes the same in JAX."""


def call_jax(function: Callable[..., Any], *tensors: Any) -> Any:
    """A function of arrays, called with tensors, or with lists and dicts of them, in a traced module."""
    return _torchax().interop.call_jax(function, *tensors)


def call_traced(function: Callable[..., Tensor], x: jax.Array, *rest: Any) -> jax.Array:
    """A part of a traced module, called with an array by a transformation of JAX. `rest`: what it gets as it is."""
    result: jax.Array = _torchax().interop.jax_view(function(_torchax().interop.torch_view(x), *rest))
    return result


def call_part(
    module: nn.Module, values: Mapping[str, jax.Array], x: jax.Array, rest: Sequence[Any], names: Sequence[str]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A part of a traced module, called by a transformation of JAX with an array and these parameters and buffers. `rest`: arguments that it gets as
    they are. Returns its output, and what the named buffers hold afterwards."""
    interop = _torchax().interop
    given = interop.torch_view(dict(values))
    output = torch.func.functional_call(module, given, (interop.torch_view(x), *rest))
    return interop.jax_view(output), {name: given[name].jax() for name in names}


def products_in() -> Any:
    """The format of products where this is called in a traced module; None: that of their operands."""
    dtype = _torchax().default_env().param.autocast_dtype
    return None if dtype is None else DTYPES[dtype]


def has_wide_sums() -> bool:
    """Whether devices add up gradients in fp32 where this is called in a traced module."""
    return _WIDE_SUMS.get()


def call_module(
    module: nn.Module,
    values: Mapping[str, jax.Array],
    inputs: Sequence[jax.Array | None],
    products: torch.dtype | None,
    names: Sequence[str] = (),
    *,
    wide_sums: bool = False,
) -> tuple[Any, dict[str, jax.Array]]:
    """The module with these parameters and buffers. Returns its output, and what the named buffers hold afterwards. `products`: the
    format of matrix products; None: that of the parameters. `wide_sums`: devices add up gradients in fp32, whatever that format is."""
    torchax = _torchax()
    given = torchax.interop.torch_view(dict(values))
    arguments = torchax.interop.torch_view(tuple(inputs))
    outer = _WIDE_SUMS.set(wide_sums)
    try:
        with _mapped_functions(), torchax.default_env(), torchax.default_env().override_property(autocast_dtype=products):
            output = torch.func.functional_call(module, given, arguments)
    finally:
        _WIDE_SUMS.reset(outer)
    return torchax.interop.jax_view(output), {name: given[name].jax() for name in names}


@contextmanager
def _mapped_functions() -> Iterator[None]:
    """Inside, an `autograd.Function` is what `MAPPED` says, or an error: torchax would differentiate its forward."""
    base: Any = torch.autograd.Function
    apply = base.__dict__["apply"]

    def mapped(cls: type[torch.autograd.Function], *args: Any, **more: Any) -> Any:
        if cls not in MAPPED:
            raise RunFailed(
                f"{cls.__module__}.{cls.__qualname__} has a backward of its own, which XLA would not see: map it in phalanx/xla/bridge.py, or "
                'set engine.name = "torch".'
            )
        return MAPPED[cls](*args, **more)

    base.apply = classmethod(mapped)
    try:
        yield
    finally:
        base.apply = apply
