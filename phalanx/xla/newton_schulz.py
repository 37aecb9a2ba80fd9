"""Muon's update of a matrix on the XLA engine: the arithmetic of `optim/muon`, on a matrix that the compiler divides. `xla/train_step` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import jax.numpy as jnp
from jax import Array

_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch.optim.Muon's defaults
_LAYERS = ("blocks.", "mtp.")  # not the embedding and the head, which are matrices too


def is_updated_by_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether it is a matrix of a block. Stacked experts have three dimensions, so that AdamW updates them."""
    return len(shape) == 2 and name.startswith(_LAYERS)


def orthogonalized(matrix_MN: Array) -> Array:
    """Newton–Schulz iterations in the format of the matrix, each of whose sums is rounded once."""
    a, b, c = _COEFFICIENTS
    wide, is_tall = jnp.promote_types(matrix_MN.dtype, jnp.float32), matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.T if is_tall else matrix_MN
    x = (x / jnp.maximum(jnp.sqrt(jnp.square(x.astype(wide)).sum()), _EPS)).astype(
        matrix_MN.dtype
    )  # no singular value is above 1
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        polynomial = b * gram.astype(wide) + c * jnp.matmul(gram, gram, preferred_element_type=wide)
        x = (a * x.astype(wide) + jnp.matmul(polynomial.astype(x.dtype), x, preferred_element_type=wide)).astype(x.dtype)
    return x.T if is_tall else x


def rate_factor(shape: Sequence[int]) -> float:
    """Both optimizers share one learning rate: this factor gives their updates the same root mean square."""
    return 0.2 * sqrt(max(shape))
