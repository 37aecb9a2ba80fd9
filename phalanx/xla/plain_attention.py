"""Attention by JAX's own operators, on every kind of device, with a mask of all pairs of positions. `xla/fused_attention` calls it where no kernel fits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

# Shapes: B sequences, K heads of keys, G heads of queries for each, S positions of queries, T of keys, E width of queries and keys.


@jax.custom_vjp
def _products(q_BKGSE: Array, k_BKTE: Array) -> Array:
    """Of every query with every key, in fp32. The products of its backward are in the format of queries and keys, as those of attention kernels."""
    wide = jnp.promote_types(q_BKGSE.dtype, jnp.float32)
    return jnp.einsum("bkgse,bkte->bkgst", q_BKGSE, k_BKTE, preferred_element_type=wide)


def _products_forward(q_BKGSE: Array, k_BKTE: Array) -> tuple[Array, tuple[Array, Array]]:
    return _products(q_BKGSE, k_BKTE), (q_BKGSE, k_BKTE)


def _products_backward(kept: tuple[Array, Array], gradient_BKGST: Array) -> tuple[Array, Array]:
    q_BKGSE, k_BKTE = kept
    rounded_BKGST = gradient_BKGST.astype(q_BKGSE.dtype)
    query = jnp.einsum("bkgst,bkte->bkgse", rounded_BKGST, k_BKTE)
    return query, jnp.einsum("bkgst,bkgse->bkte", rounded_BKGST, q_BKGSE)


_products.defvjp(_products_forward, _products_backward)


def plain_attention(q_BHSE: Array, k_BKTE: Array, v_BKTE: Array, visible_B1ST: Array, scale: float, cap: float | None) -> Array:
    """All scores at once, in full precision. The compiler divides it as it divides the rest of a model."""
    q_BKGSE = q_BHSE.reshape(len(q_BHSE), k_BKTE.shape[1], -1, *q_BHSE.shape[2:])
    scores_BKGST = _products(q_BKGSE, k_BKTE) * scale
    if cap is not None:
        scores_BKGST = cap * jnp.tanh(scores_BKGST / cap)
    weights_BKGST = jax.nn.softmax(jnp.where(visible_B1ST[:, :, None], scores_BKGST, -jnp.inf), axis=-1)
    out_BKGSE = jnp.einsum("bkgst,bkte->bkgse", weights_BKGST.astype(v_BKTE.dtype), v_BKTE)
    return out_BKGSE.reshape(*q_BHSE.shape[:3], v_BKTE.shape[-1])
