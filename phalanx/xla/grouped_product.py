"""Sorted rows times the matrix of their group, in JAX, without a capacity limit. Used by `xla/experts`.

ragged      `jax.lax.ragged_dot`: a kernel of TPU and GPU. A CPU multiplies every row by every group's matrix with it
passes      one batched product of equal parts of all groups, repeated until the fullest group is done: once when groups are as
            large as expected, so that a CPU too does no more work than there is
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

# Shapes: R rows, D and F widths, L groups, C rows of each group in a pass.

Product = Literal["ragged", "passes"]


def grouped_product(x_RD: Array, weight_LDF: Array, counts_L: Array, expected: int, product: Product) -> Array:
    """[R, F]: the first counts[0] rows times the first matrix, and so on; zeros in the rows of no group. `expected`: rows of a group when all
    are equal. Differentiable in rows and matrices."""
    if product == "passes":
        return _in_passes(x_RD, weight_LDF, counts_L, max(expected, 1))
    # What kernels leave in the rows of no group may be anything; so may the gradient that they give them.
    used_R1 = (jnp.arange(len(x_RD)) < counts_L.sum())[:, None]
    return jnp.where(used_R1, lax.ragged_dot(jnp.where(used_R1, x_RD, 0), weight_LDF, counts_L), 0)


def pass_count(counts_L: Array, expected: int) -> Array:
    """Passes until the fullest group is done."""
    return -(-counts_L.max() // expected)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_passes(x_RD: Array, weight_LDF: Array, counts_L: Array, expected: int) -> Array:
    return _rows_product(x_RD, weight_LDF, counts_L, expected)


def _forward(x_RD: Array, weight_LDF: Array, counts_L: Array, expected: int) -> tuple[Array, Any]:
    return _rows_product(x_RD, weight_LDF, counts_L, expected), (x_RD, weight_LDF, counts_L)


def _backward(expected: int, saved: Any, gradient_RF: Array) -> tuple[Array, Array, None]:
    x_RD, weight_LDF, counts_L = saved
    dx_RD = _rows_product(gradient_RF, weight_LDF.swapaxes(1, 2), counts_L, expected)

    def add(places_LC: Array, sum_LDF: Array) -> Array:
        parts = (_part(rows, places_LC) for rows in (x_RD, gradient_RF))
        return sum_LDF + jnp.einsum("lcd,lcf->ldf", *parts, preferred_element_type=sum_LDF.dtype)

    wide = jnp.promote_types(weight_LDF.dtype, jnp.float32)
    dweight_LDF = _passes(add, jnp.zeros(weight_LDF.shape, wide), (len(x_RD), counts_L, expected))
    return dx_RD, dweight_LDF.astype(weight_LDF.dtype), None


_in_passes.defvjp(_forward, _backward)


def _rows_product(x_RD: Array, weight_LDF: Array, counts_L: Array, expected: int) -> Array:
    def write(places_LC: Array, y_RF: Array) -> Array:
        return y_RF.at[places_LC].set(jnp.einsum("lcd,ldf->lcf", _part(x_RD, places_LC), weight_LDF), mode="drop")

    return _passes(write, jnp.zeros((len(x_RD), weight_LDF.shape[-1]), x_RD.dtype), (len(x_RD), counts_L, expected))


def _passes(step: Callable[[Array, Array], Array], start: Array, groups: tuple[int, Array, int]) -> Array:
    """`step` with the places of each pass's rows, [L, C]; the place after the last row stands for none."""
    rows, counts_L, expected = groups
    starts_L = counts_L.cumsum() - counts_L

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, value = state
        within_1C = number * expected + jnp.arange(expected)[None]
        places_LC = jnp.where(within_1C < counts_L[:, None], starts_L[:, None] + within_1C, rows)
        return number + 1, step(places_LC, value)

    passes = pass_count(counts_L, expected)
    return lax.while_loop(lambda state: state[0] < passes, body, (jnp.zeros((), counts_L.dtype), start))[1]


def _part(rows: Array, places_LC: Array) -> Array:
    return rows.at[places_LC].get(mode="fill", fill_value=0)
