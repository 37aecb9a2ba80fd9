"""Attention over a ring of devices that share every sequence, in JAX: keys and values travel, and each device combines what its queries see of
them as if the softmax were taken over all keys at once. Used by `xla/fused_attention`, inside shard_map.

Which keys a query sees is decided by positions, which travel too, so a device may hold any of them. The backward sends keys and values around
again, with their gradients; between the passes a device keeps its own part and one number per query.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

# Shapes: B sequences, S positions on a device, K heads of keys, G heads of queries for each, E and V widths of keys and values. The keys of a
# tile have T positions.


class Ring(NamedTuple):
    """The devices and the scores. Static."""

    axes: tuple[str, ...]
    devices: int
    scale: float
    cap: float | None
    """Soft cap of the scores; None: none."""
    window: int | None
    """The most keys that a query sees; None: no limit."""


class _Places(NamedTuple):
    """Where the rows of a device come from."""

    positions_S: Array
    documents_BS: Array | None

    def part(self, rows: slice) -> _Places:
        return _Places(self.positions_S[rows], None if self.documents_BS is None else self.documents_BS[:, rows])


class _Queries(NamedTuple):
    q_BKGSE: Array
    places: _Places


class _Keys(NamedTuple):
    k_BKTE: Array
    v_BKTV: Array
    places: _Places


_Tile = tuple[slice, slice, Array]
"""Queries, keys, and whether the former may see any of the latter."""


def ring_attention(qkv: tuple[Array, Array, Array], positions_S: Array, documents_BS: Array | None, ring: Ring) -> Array:
    """[B, H, S, V] of this device's queries. Differentiable in queries, keys and values."""
    q_BHSE, k_BKTE, v_BKTV = qkv
    q_BKGSE = q_BHSE.reshape(len(q_BHSE), k_BKTE.shape[1], -1, *q_BHSE.shape[2:])
    out_BKGSV = _ring(q_BKGSE, k_BKTE, v_BKTV, _Places(positions_S, documents_BS), ring)
    return out_BKGSV.reshape(*q_BHSE.shape[:3], v_BKTV.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q: Array, k: Array, v: Array, places: _Places, ring: Ring) -> Array:
    return _forward(q, k, v, places, ring)[0]


def _forward(q: Array, k: Array, v: Array, places: _Places, ring: Ring) -> tuple[Array, Any]:
    queries, own = _Queries(q, places), _Keys(k, v, places)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    start = jnp.zeros((*q.shape[:-1], v.shape[-1]), wide), jnp.full(q.shape[:-1], -jnp.inf, wide)

    def hop(state: tuple[_Keys, tuple[Array, Array]], _: None) -> tuple[Any, None]:
        keys = _to_next(state[0], ring)
        return (keys, _combine(state[1], queries, keys, ring)), None

    first = own, _combine(start, queries, own, ring)
    (_, (out, lse)), _ = lax.scan(hop, first, None, length=ring.devices - 1)
    result = out.astype(q.dtype)
    return result, (q, k, v, places, result, lse)


def _backward(ring: Ring, saved: Any, gradient: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, places, out, lse = saved
    queries, own = _Queries(q, places), _Keys(k, v, places)
    known = gradient, lse, (gradient.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)

    def hop(state: tuple[_Keys, Array, Array, Array], _: None) -> tuple[Any, None]:
        keys, dk, dv, dq = state
        keys, dk, dv = _to_next((keys, dk, dv), ring)
        dq, dk, dv = _add_gradients((dq, dk, dv), queries, keys, known, ring)
        return (keys, dk, dv, dq), None

    start = tuple(jnp.zeros(x.shape, lse.dtype) for x in (q, k, v))
    dq, dk, dv = _add_gradients(start, queries, own, known, ring)
    (_, dk, dv, dq), _ = lax.scan(hop, (own, dk, dv, dq), None, length=ring.devices - 1)
    dk, dv = _to_next((dk, dv), ring)  # the last hop brings them home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_forward, _backward)


def _to_next(values: Any, ring: Ring) -> Any:
    pairs = [(device, (device + 1) % ring.devices) for device in range(ring.devices)]
    return jax.tree.map(lambda value: lax.ppermute(value, ring.axes, pairs), values)


def _tiles(queries: _Places, keys: _Places, window: int | None) -> Iterator[_Tile]:
    """Products of halves: in zig-zag order a device has an early and a late piece, and sees a half of most others only."""

    def halves(length: int) -> list[slice]:
        cut = length if length % 2 else length // 2
        return [slice(first, first + cut) for first in range(0, length, cut)]

    for rows in halves(len(queries.positions_S)):
        for columns in halves(len(keys.positions_S)):
            here, there = queries.positions_S[rows], keys.positions_S[columns]
            seen = here.max() >= there.min()
            if window is not None:
                seen &= here.min() - there.max() < window
            yield rows, columns, seen


def _scores(q: Array, k: Array, visible: Array, ring: Ring) -> tuple[Array, Array | float]:
    """[B, K, G, S, T], -inf where a query sees no key; and the slope of the soft cap."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bkgse,bkte->bkgst", q, k, preferred_element_type=wide) * ring.scale
    slope: Array | float = 1.0
    if ring.cap is not None:
        bent = jnp.tanh(scores / ring.cap)
        scores, slope = ring.cap * bent, 1 - bent * bent
    return jnp.where(visible, scores, -jnp.inf), slope


def _visible(queries: _Places, keys: _Places, window: int | None) -> Array:
    """[B or 1, 1, 1, S, T], true where a query sees a key."""
    distance = queries.positions_S[:, None] - keys.positions_S
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if queries.documents_BS is None or keys.documents_BS is None:
        return visible[None, None, None]
    same = queries.documents_BS[:, :, None] == keys.documents_BS[:, None]
    return (visible & same)[:, None, None]


def _combine(state: tuple[Array, Array], queries: _Queries, keys: _Keys, ring: Ring) -> tuple[Array, Array]:
    """The result so far and its log of the sum of exponents, with these keys added."""
    out, lse = state
    for rows, columns, seen in _tiles(queries.places, keys.places, ring.window):

        def add(out: Array, lse: Array, rows: slice = rows, columns: slice = columns) -> tuple[Array, Array]:
            visible = _visible(queries.places.part(rows), keys.places.part(columns), ring.window)
            v = keys.v_BKTV[:, :, columns]
            scores, _ = _scores(queries.q_BKGSE[..., rows, :], keys.k_BKTE[:, :, columns], visible, ring)
            highest = jnp.maximum(lse, scores.max(-1))
            shift = jnp.where(jnp.isfinite(highest), highest, 0)  # a query that has seen no key yet
            weights = jnp.exp(scores - shift[..., None])
            before = jnp.exp(lse - shift)
            total = before + weights.sum(-1)
            more = jnp.einsum("bkgst,bktv->bkgsv", weights.astype(v.dtype), v, preferred_element_type=out.dtype)
            out = (out * before[..., None] + more) / jnp.where(total > 0, total, 1)[..., None]
            return out, shift + jnp.log(total)

        old = out[..., rows, :], lse[..., rows]
        new = lax.cond(seen, add, lambda out, lse: (out, lse), *old)
        out, lse = out.at[..., rows, :].set(new[0]), lse.at[..., rows].set(new[1])
    return out, lse


def _add_gradients(
    sums: tuple[Array, ...], queries: _Queries, keys: _Keys, known: tuple[Array, Array, Array], ring: Ring
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values so far, with what the products of these queries and keys add."""
    dq, dk, dv = sums
    for rows, columns, seen in _tiles(queries.places, keys.places, ring.window):

        def add(dq: Array, dk: Array, dv: Array, rows: slice = rows, columns: slice = columns) -> tuple[Array, Array, Array]:
            visible = _visible(queries.places.part(rows), keys.places.part(columns), ring.window)
            q, k, v = queries.q_BKGSE[..., rows, :], keys.k_BKTE[:, :, columns], keys.v_BKTV[:, :, columns]
            gradient, lse, inner = known[0][..., rows, :], known[1][..., rows], known[2][..., rows]
            product = partial(jnp.einsum, preferred_element_type=dq.dtype)
            scores, slope = _scores(q, k, visible, ring)
            weights = jnp.exp(scores - lse[..., None])
            dweights = product("bkgsv,bktv->bkgst", gradient, v)
            dscores = (weights * (dweights - inner[..., None]) * slope * ring.scale).astype(q.dtype)
            return (
                dq + product("bkgst,bkte->bkgse", dscores, k),
                dk + product("bkgst,bkgse->bkte", dscores, q),
                dv + product("bkgst,bkgsv->bktv", weights.astype(v.dtype), gradient),
            )

        old = dq[..., rows, :], dk[:, :, columns], dv[:, :, columns]
        new = lax.cond(seen, add, lambda *same: same, *old)
        dq, dk, dv = dq.at[..., rows, :].set(new[0]), dk.at[:, :, columns].set(new[1]), dv.at[:, :, columns].set(new[2])
    return dq, dk, dv
