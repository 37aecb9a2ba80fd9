"""Attention by JAX's own operators, on every kind of device, with a mask of all pairs of positions."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which keys a query sees besides the causal mask, and what becomes of its scores."""

    window: int | None = None
    """The most keys that a query attends to: its own and those just before it; None: no limit."""
    scale: float | None = None
    """None: 1 / sqrt(width)."""
    cap: float | None = None
    """Soft cap of the scores; None: none."""


@jax.custom_vjp
def _products(q_BKGSE: jax.Array, k_BKTE: jax.Array) -> jax.Array:
    """Of every query with every key, in fp32. The products of its backward are in the format of queries and keys, as those of attention kernels."""
    return jnp.einsum("bkgse,bkte->bkgst", q_BKGSE, k_BKTE, preferred_element_type=jnp.float32)


def _products_forward(q_BKGSE: jax.Array, k_BKTE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _products(q_BKGSE, k_BKTE), (q_BKGSE, k_BKTE)


def _products_backward(kept: tuple[jax.Array, jax.Array], gradient_BKGST: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_BKGSE, k_BKTE = kept
    rounded_BKGST = gradient_BKGST.astype(q_BKGSE.dtype)
    query = jnp.einsum("bkgst,bkte->bkgse", rounded_BKGST, k_BKTE)
    return query, jnp.einsum("bkgst,bkgse->bkte", rounded_BKGST, q_BKGSE)


_products.defvjp(_products_forward, _products_backward)


def attend(
    q_BHSE: jax.Array, k_BKTE: jax.Array, v_BKTE: jax.Array, documents_BS: jax.Array | None, scoring: Scoring
) -> jax.Array:
    """Causal attention within documents and windows. Values may be narrower than keys; there may be fewer heads of keys than of queries."""
    heads, groups, width = q_BHSE.shape[1], k_BKTE.shape[1], q_BHSE.shape[-1]
    q_BKGSE = q_BHSE.reshape(len(q_BHSE), groups, heads // groups, *q_BHSE.shape[2:])
    scores_BKGST = _products(q_BKGSE, k_BKTE) * (width**-0.5 if scoring.scale is None else scoring.scale)
    if scoring.cap is not None:
        scores_BKGST = scoring.cap * jnp.tanh(scores_BKGST / scoring.cap)
    visible = _visible(q_BHSE.shape[2], documents_BS, scoring.window)
    weights_BKGST = jax.nn.softmax(jnp.where(visible, scores_BKGST, -jnp.inf), axis=-1).astype(v_BKTE.dtype)
    out_BKGSE = jnp.einsum("bkgst,bkte->bkgse", weights_BKGST, v_BKTE)
    return out_BKGSE.reshape(*q_BHSE.shape[:3], v_BKTE.shape[-1])


def _visible(length: int, documents_BS: jax.Array | None, window: int | None) -> jax.Array:
    """[B or 1, 1, 1, S, S]: which keys (columns) a query (row) may attend to."""
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None]
    visible = columns <= rows
    if window is not None:
        visible = visible & (columns > rows - window)
    visible = visible[None]
    if documents_BS is not None:
        visible = visible & (documents_BS[:, :, None] == documents_BS[:, None])
    return visible[:, None, None]
