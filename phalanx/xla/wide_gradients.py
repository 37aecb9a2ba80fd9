"""Linear layers in 16 bits whose weights have gradients in fp32 until the devices have added them up. The compiler adds up a product's result as the product
gives it, so the product itself has to give fp32. Sums are then rounded once, where JAX's own derivative rounds what each device adds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, weight_OI: jax.Array, bias_O: jax.Array | None = None) -> jax.Array:
    """`F.linear`, in the format of its arguments."""
    y = _product(x, weight_OI)
    return y if bias_O is None else _sum(y, bias_O)


@jax.custom_vjp
def _product(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight_OI)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight_OI = kept
    wide_OI = jnp.einsum("...o,...i->oi", gradient, x, preferred_element_type=_wide(weight_OI))
    return jnp.einsum("...o,oi->...i", gradient, weight_OI), wide_OI.astype(weight_OI.dtype)


@jax.custom_vjp
def _sum(y: jax.Array, bias_O: jax.Array) -> jax.Array:
    return y + bias_O


def _sum_backward(bias_O: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    leading = tuple(range(gradient.ndim - 1))
    return gradient, gradient.sum(leading, dtype=_wide(bias_O)).astype(bias_O.dtype)


_product.defvjp(lambda x, weight_OI: (_product(x, weight_OI), (x, weight_OI)), _product_backward)
_sum.defvjp(lambda y, bias_O: (_sum(y, bias_O), bias_O), _sum_backward)


def _wide(value: jax.Array) -> Any:
    return jnp.promote_types(value.dtype, jnp.float32)
