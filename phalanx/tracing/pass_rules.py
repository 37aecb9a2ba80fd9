"""How a cut dimension passes operations element by element, along a dimension, and all others. Rules of `cut_walk`."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.tracing.cut_values import Cut, origins, same_parts
from phalanx.tracing.module_graph import Op
from phalanx.tracing.walk_state import WalkState

# fmt: off
ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "silu", "gelu", "tanh", "sigmoid", "relu", "relu6", "hardtanh", "leaky_relu", "elu",
    "mish", "to", "type_as", "dropout", "pow", "rsqrt", "sqrt", "exp", "log", "log1p", "expm1", "contiguous", "clone",
    "alias", "detach", "masked_fill", "where", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not", "logical_not",
    "logical_and", "logical_or", "copy", "rsub", "softplus", "clamp", "clamp_min", "clamp_max", "lift_fresh_copy", "abs",
    "square", "maximum", "minimum", "sin", "cos", "_to_copy", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "floor_divide",
    "reciprocal", "erf", "sign", "log_sigmoid", "logsigmoid", "zeros_like", "ones_like", "empty_like", "full_like", "isnan",
    "nan_to_num", "addcmul", "lerp", "hardswish", "hardsigmoid",
}
# fmt: on
ALONG = {"softmax", "_softmax", "log_softmax", "cumsum", "cumprod", "topk", "sort", "argsort", "flip", "roll", "logsumexp"}
"""Operations along one dimension, their second argument."""


def other(walk: WalkState, op: Op) -> Cut | list[Cut] | None:
    cuts = [cut for x in op.inputs if (cut := walk.cut(x)) is not None]
    pointwise = op.kind in ELEMENTWISE or torch.Tag.pointwise in getattr(op.target, "tags", ())
    if pointwise or (op.kind in ("max", "min") and len(op.args) > 1 and isinstance(op.args[1], Op)):
        return aligned(walk, op, [x for x in op.inputs if x.shape is not None])
    if op.kind in ("cat", "stack"):
        return _joined(walk, op)
    cut = walk.cut(op.args[0]) if op.args else None
    if cut is None:
        walk.fail("there is no rule", *cuts)
    size = op.args[0].size
    if op.kind in ("mean", "sum"):
        return _reduced(walk, op, cut)
    if op.kind in ("max", "min", "amax", "amin", "argmax") and len(op.args) > 1 and not isinstance(op.args[1], Op):
        return _extreme(walk, op, cut)
    if op.kind in ALONG and len(op.args) > 1:
        at = op.args[2] if op.kind == "topk" and len(op.args) > 2 else -1 if op.kind == "topk" else op.args[1]
        if isinstance(at, int) and at % len(size) != cut.dim:
            return [cut] * len(op.value) if isinstance(op.value, (tuple, list)) else cut
    if op.kind in ("layer_norm", "rms_norm") and cut.dim < len(size) - len(op.args[1]):
        walk.enter(*op.inputs[1:])
        return cut
    if (found := _moved(walk, op, cut)) is not None:
        return found
    walk.fail("there is no rule", *cuts)


def _moved(walk: WalkState, op: Op, cut: Cut) -> Cut | None:
    """Operations that leave the cut dimension as it is and change others."""
    size = op.args[0].size
    if op.kind in ("pad", "constant_pad_nd") and not any(op.args[1][2 * (len(size) - 1 - cut.dim) :][:2]):
        return cut
    if op.kind == "repeat_interleave" and isinstance(op.args[1], int):
        if op.argument(2, "dim") != cut.dim:
            return cut
        place, more = None if cut.place is None else replace(cut.place, scale=None), tuple(s * op.args[1] for s in cut.segments)
        return replace(cut, segments=more, place=place) if same_parts(cut.segments, op.args[1], more, 1, walk.ranks) else None
    if op.kind == "repeat":
        times, new = op.args[1], len(op.args[1]) - len(size)
        place = cut.place if times[cut.dim + new] == 1 else None
        return replace(cut, dim=cut.dim + new, segments=cut.segments * times[cut.dim + new], place=place)
    if op.kind == "index":
        indices = [i for i, x in enumerate(op.args[1]) if x is not None]
        if len(indices) == 1 and indices[0] != cut.dim:
            return replace(cut, dim=cut.dim + (len(op.args[1][indices[0]].size) - 1) * (indices[0] < cut.dim))
    if op.kind == "index_select" and op.args[1] % len(size) != cut.dim:
        return cut
    if op.kind in ("new_empty", "new_zeros", "new_ones", "new_full"):
        shape = op.args[1]
        if len(shape) == len(size) and shape[cut.dim] == size[cut.dim]:
            walk.change.shape = cut.dim, cut.segments
            return replace(cut, place=None)
    if op.kind == "tril" or op.kind == "triu":
        return cut if cut.dim < len(size) - 2 else None
    return None


def aligned(walk: WalkState, op: Op, operands: list[Op]) -> Cut:
    """Operands that broadcast: cut in the same dimension of the result."""
    rank = len(op.size)
    cuts = [cut for x in operands if (cut := walk.cut(x)) is not None]
    dims = {(cut.dim + rank - len(x.size), cut.segments) for x in operands if (cut := walk.cut(x)) is not None}
    if len(dims) != 1:
        walk.fail("operands are cut in different dimensions or segments", *cuts)
    ((dim, segments),) = dims
    places = {cut.place for cut in cuts}
    like = Cut(dim, segments, origins(*cuts), cuts[0].place if len(places) == 1 else None)  # [gate] × [up] is neither's
    for x in operands:
        own = dim - rank + len(x.size)
        if walk.cut(x) is None and own >= 0 and x.size[own] != 1:
            walk.want(x, like, own)
    walk.enter(*operands)
    return like


def _joined(walk: WalkState, op: Op) -> Cut:
    operands: list[Op] = list(op.args[0])
    dim = op.argument(1, "dim", 0) % len(op.size)
    own = [walk.cut(x) for x in operands]
    if op.kind == "cat" and any(cut is not None and cut.dim == dim for cut in own):
        if not all(cut is not None and cut.dim == dim for cut in own):
            walk.fail("a cut value is joined to a whole one", *own)
        return Cut(dim, sum((cut.segments for cut in own if cut is not None), ()), origins(*own))
    like = aligned(walk, operands[0], operands)
    return replace(like, dim=like.dim + (op.kind == "stack" and dim <= like.dim))


def _extreme(walk: WalkState, op: Op, cut: Cut) -> Cut | list[Cut]:
    size = op.args[0].size
    dims = [d % len(size) for d in (op.args[1] if isinstance(op.args[1], (list, tuple)) else [op.args[1]])]
    if cut.dim in dims:
        walk.fail("the largest of a cut dimension is taken", cut)
    out = cut if op.argument(2, "keepdim", False) else replace(cut, dim=cut.dim - sum(d < cut.dim for d in dims))
    return [out] * len(op.value) if isinstance(op.value, (tuple, list)) else out


def _reduced(walk: WalkState, op: Op, cut: Cut) -> Cut | None:
    size = op.args[0].size
    given = op.argument(1, "dim")
    dims = (
        list(range(len(size)))
        if not given
        else [d % len(size) for d in (given if isinstance(given, (list, tuple)) else [given])]
    )
    if cut.dim not in dims:
        keep = op.argument(2, "keepdim", False)
        return cut if keep else replace(cut, dim=cut.dim - sum(d < cut.dim for d in dims))
    walk.change.mean = cut.segments if op.kind == "mean" else ()
    walk.part_of_sum(op, cut.origins)
    return None
