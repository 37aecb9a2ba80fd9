"""How cuts begin at matrices, meet in products and attention, and end in sums. Rules of `cut_walk`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phalanx.spec.cut_plan import UNEVEN
from phalanx.tracing.cut_values import Cut, Place, has_parts
from phalanx.tracing.module_graph import Op
from phalanx.tracing.view_shapes import SAME, VIEWS
from phalanx.tracing.walk_state import WalkState


def lookup(walk: WalkState, op: Op) -> Cut | None:
    """Rows of a table by index: cut by rows where tokens are looked up, else by columns if its columns are."""
    table, index = op.args[:2]
    of_tokens = _is_input(walk, index)
    key = (table.name, 0)
    if walk.cut(index) is not None:
        walk.fail("indices are cut", walk.cut(index))
    cut = walk.cut(table)
    if cut is None and of_tokens and table.kind == "parameter" and key not in walk.limits.banned:
        if not has_parts((table.size[0],), walk.ranks):
            return None
        cut = Cut(0, (table.size[0],), frozenset([key]), Place(*key, 0, 1))
        walk.known[table.name] = walk.cuts[table] = cut
    if cut is None:
        return None
    if cut.dim == 0:
        if not of_tokens or len(cut.segments) > 1:
            walk.fail("rows are looked up", cut)
        walk.roles[table.name, 0, 0] = "vocab"
        walk.change.lookup = True
        walk.part_of_sum(op, cut.origins)
        return None
    return replace(cut, dim=len(op.size) - 1)


def _is_input(walk: WalkState, index: Op) -> bool:
    """Whether these are the tokens of the model, each row with the number of one of them."""
    while index.kind in VIEWS or index.kind in SAME:
        index = index.args[0]
    return index is walk.graph.inputs[0]


def product(walk: WalkState, op: Op) -> Cut | None:
    bias, x, w = _operands(op)
    inner, outer = (1, 0) if op.kind == "linear" else (max(0, len(w.size) - 2), len(w.size) - 1)
    last = len(x.size) - 1
    cx, cw = walk.cut(x), walk.cut(w)
    if cx is None and cw is None:
        if op.kind == "bmm" and walk.source(x, 1)[0] is not None:
            cx = walk.seed(x, 1)
        else:
            cw = walk.seed(w, outer)
    ways = walk.ranks if cx is not None or cw is not None else 1
    walk.work += 2 * math.prod(op.size) * x.size[-1] * walk.graph.weight(op) / ways
    if cx is None and cw is None:
        return None
    if (cx is not None and cx.dim == last) or (cw is not None and cw.dim == inner and len(w.size) > 1):
        _contracted(walk, op, (bias, x, w), (last, inner))
        return None
    return _passed(walk, op, (bias, x, w), outer)


def _operands(op: Op) -> tuple[Any, Op, Op]:
    if op.kind == "linear":
        return op.argument(2, "bias"), op.args[0], op.args[1]
    return op.args[:3] if op.kind in ("addmm", "baddbmm") else (None, op.args[0], op.args[1])


def _contracted(walk: WalkState, op: Op, operands: tuple[Any, Op, Op], dims: tuple[int, int]) -> None:
    """Over a cut dimension: each rank has a part of the sum."""
    (bias, x, w), (last, inner) = operands, dims
    cx, cw = walk.cut(x), walk.cut(w)
    if cx is not None and cw is not None:
        if (cx.dim, cw.dim, cx.segments) != (last, inner, cw.segments):
            walk.fail("both factors are cut, and differently", cx, cw)
    elif cx is not None:
        walk.want(w, cx, inner)
    elif cw is not None:
        walk.want(x, cw, last)
    if isinstance(bias, Op):
        walk.change.bias = bias
    found = frozenset[Any]().union(*(c.origins for c in (cx, cw) if c is not None))
    walk.part_of_sum(op, found)


def _passed(walk: WalkState, op: Op, operands: tuple[Any, Op, Op], outer: int) -> Cut:
    """Over a whole dimension: the result is cut like the factor."""
    bias, x, w = operands
    cx, cw = walk.cut(x), walk.cut(w)
    rank, last = len(op.size), len(x.size) - 1
    batched = op.kind in ("bmm", "baddbmm", "matmul") and len(w.size) > 2
    if cx is not None and cw is not None:
        same = batched and (cx.dim, cx.segments) == (cw.dim, cw.segments) and cx.dim < last - 1
        if not same:
            walk.fail("both factors are cut", cx, cw)
    by_weight = cw is not None and (cx is None or cw.dim == outer)
    cut, other = (cw, x) if by_weight else (cx, w)
    assert cut is not None
    by_batch = batched and cut.dim < rank - 2
    if by_batch and walk.cut(other) is None:
        walk.want(other, cut, cut.dim)
    out = replace(cut, place=None) if by_batch else replace(cut, dim=rank - 1) if by_weight else cut
    if isinstance(bias, Op) and walk.cut(bias) is None:
        own = out.dim - rank + len(bias.size)
        if own >= 0 and bias.size[own] != 1:
            walk.want(bias, out, own)
    walk.enter(other, bias)
    return out


def attention(walk: WalkState, op: Op) -> Cut | list[Cut]:
    """By heads, sinks with them. Fewer keys and values than ranks stay whole, and a rank takes those that its queries read."""
    q, k, v = op.args[:3]
    cuts = [walk.cut(x) for x in (q, k, v)]
    sinks, mask = op.args[3:5] if op.kind == "sink_attention" else (None, op.argument(3, "attn_mask"))
    if other := [cut for cut in cuts if cut is not None and cut.dim != 1]:
        walk.fail("attention is not cut by heads", *other)
    cq, ck, cv = cuts
    if cq is None or (ck is None) != (cv is None):
        walk.fail("of queries, keys, values and a mask only some are cut", *cuts, walk.cut(mask))
    if uneven := [cut for cut in cuts if cut is not None and any(size % walk.ranks for size in cut.segments)]:
        walk.fail(f"{q.size[1]} heads for {k.size[1]} keys {UNEVEN} by {walk.ranks}", *uneven)
    heads, fewer = q.size[1], k.size[1]
    for x in (k, v):
        if walk.cut(x) is None and x.size[1] == heads:
            walk.want(x, cq, 1)
    if ck is None and fewer != heads and fewer != 1:
        if len(cq.segments) > 1:
            walk.fail("queries of several segments share keys", cq)
        walk.change.select = (k, v)
    if isinstance(mask, Op) and walk.cut(mask) is None and len(mask.size) == 4 and mask.size[1] != 1:
        walk.want(mask, cq, 1)
    if sinks is not None and walk.cut(sinks) is None:
        walk.want(sinks, cq, 0)
    _name(walk, (cq, ck, cv))
    walk.enter(q, k, v, mask, sinks)
    walk.work += attention_work(walk, op) / walk.ranks
    out = replace(cq, place=None)
    return out if sinks is None else [out, out]


def attention_work(walk: WalkState, op: Op) -> float:
    q, k = op.args[:2]
    return 4.0 * math.prod(q.size) * k.size[2] * walk.graph.weight(op)


def _name(walk: WalkState, cuts: tuple[Cut | None, ...]) -> None:
    """Queries are heads. What gives keys alone or values alone is kv_heads; what gives both has whole heads of its own."""
    queries, keys, values = (_places(walk, cut) for cut in cuts)
    for place in sorted(queries | keys | values):
        fewer = place not in queries and (place in keys) != (place in values)
        walk.roles.setdefault(place, "kv_heads" if fewer else "heads")


def _places(walk: WalkState, cut: Cut | None) -> set[tuple[str, int, int]]:
    """Parameter, dimension and offset of the segments that a value comes from."""
    if cut is None:
        return set()
    if cut.place is not None:
        return {(*cut.place.key, cut.place.offset)}
    return {(*key, 0) for key in cut.origins if len(walk.limits.segments.get(key, ())) <= 1}
