"""Operations that only rearrange a value: which dimension becomes which. Used by the rules."""

from __future__ import annotations

import math

from phalanx.tracing.module_graph import Op

ORDERS = {"transpose", "permute", "numpy_T", "t", "mT", "swapaxes", "movedim"}
VIEWS = ORDERS | {
    "unsqueeze",
    "squeeze",
    "select",
    "expand",
    "broadcast_to",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "_unsafe_view",
}
PIECES = {"slice", "split_with_sizes", "split", "chunk", "unbind", "narrow"}
ATTENTIONS = {"scaled_dot_product_attention", "sink_attention"}
PRODUCTS = {"linear", "addmm", "matmul", "mm", "bmm", "baddbmm"}
SAME = {"to", "contiguous", "alias", "clone", "type_as", "dropout", "_to_copy"}
"""Operations whose result equals their first operand, formats aside."""
CONSTANT = {
    "zeros",
    "ones",
    "full",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
}


def order(op: Op, rank: int) -> list[int]:
    """Of a value's dimensions after an operation that changes their order."""
    dims = list(range(rank))
    if op.kind == "permute":
        return [d % rank for d in op.args[1]]
    if op.kind in ("transpose", "swapaxes"):
        a, b = (d % rank for d in op.args[1:3])
        dims[a], dims[b] = b, a
        return dims
    if op.kind == "mT":
        return [*dims[:-2], dims[-1], dims[-2]]
    return dims[::-1]


def back(op: Op, dim: int) -> tuple[Op, int] | None:
    """One view further towards a parameter: the operand and its dimension, or None where that cannot be told."""
    if op.kind in ORDERS and op.kind != "movedim":
        return op.args[0], order(op, len(op.size))[dim]
    if op.kind in SAME and op.kind != "dropout":
        return op.args[0], dim
    if op.kind == "index":  # the matrices of some experts
        indices = op.args[1]
        if dim >= 1 and len(indices) == 1 and indices[0] is not None and len(indices[0].size) == 1:
            return op.args[0], dim
    return None


def demand(op: Op, dim: int) -> tuple[Op, int] | None:
    """The operation that repeats one value along a dimension, behind views: it can be made for a part of that dimension."""
    while op.kind in SAME or op.kind in ORDERS:
        step = back(op, dim)
        if step is None:
            return None
        op, dim = step
    if op.kind in ("expand", "broadcast_to"):
        before = op.args[0].size
        own = dim - len(op.size) + len(before)
        return (op, dim) if own < 0 or before[own] == 1 else None
    return (op, dim) if op.kind in CONSTANT else None


def reshaped(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> tuple[range, range]:
    """Dimensions of the old shape that become dimensions of the new one, `dim` among them."""
    i = j = 0
    while True:
        ii, jj, a, b = i + 1, j + 1, old[i], new[j] if j < len(new) else 1
        while a != b:
            if a < b:
                a, ii = a * old[ii], ii + 1
            else:
                b, jj = b * new[jj], jj + 1
        while ii < len(old) and old[ii] == 1 and ii > dim:  # ones belong to either side
            ii += 1
        if dim < ii:
            return range(i, ii), range(j, jj)
        i, j = ii, jj


def product(sizes: tuple[int, ...], dims: range) -> int:
    return math.prod(sizes[dims.start : dims.stop])
