"""How a cut dimension passes operations that only rearrange a value. Rules of `cut_walk`."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from phalanx.spec.cut_plan import UNEVEN
from phalanx.tracing.cut_values import Cut, Place, Refine, same_parts
from phalanx.tracing.module_graph import Op
from phalanx.tracing.view_shapes import ORDERS, order, product, reshaped
from phalanx.tracing.walk_state import WalkState


def view(walk: WalkState, op: Op, cut: Cut) -> Cut:
    old, new = op.args[0].size, op.size
    if op.kind == "movedim":
        walk.fail("dimensions are moved", cut)
    if op.kind in ORDERS:
        return replace(cut, dim=order(op, len(old)).index(cut.dim))
    if op.kind in ("unsqueeze", "squeeze", "select"):
        return _one(walk, op, cut)
    if op.kind in ("expand", "broadcast_to"):
        out = replace(cut, dim=cut.dim + len(new) - len(old))
    else:
        out = _reshape(walk, cut, old, new)
    walk.change.shape = out.dim, out.segments
    return walk.with_parts(out)


def _one(walk: WalkState, op: Op, cut: Cut) -> Cut:
    """A dimension of size one comes or goes, or one element is taken."""
    old, new = op.args[0].size, op.size
    if op.kind == "squeeze" and len(op.args) < 2:
        gone = [d for d, s in enumerate(old) if s == 1]
    elif op.kind == "unsqueeze":
        dim = op.args[1] % len(new)
        return replace(cut, dim=cut.dim + (dim <= cut.dim))
    else:
        dims = op.args[1] if isinstance(op.args[1], (list, tuple)) else [op.args[1]]
        gone = [d % len(old) for d in dims if op.kind == "select" or old[d] == 1]
    if cut.dim in gone:
        walk.fail("one element of a cut dimension is taken", cut)
    return replace(cut, dim=cut.dim - sum(d < cut.dim for d in gone))


def _reshape(walk: WalkState, cut: Cut, old: tuple[int, ...], new: tuple[int, ...]) -> Cut:
    before, after = reshaped(old, new, cut.dim)
    inner = product(old, range(cut.dim + 1, before.stop))
    flat = [size * inner for size in cut.segments] * product(old, range(before.start, cut.dim))
    uneven: tuple[tuple[int, ...], int] | None = None
    for to in after:
        repeats, rest = product(new, range(after.start, to)), product(new, range(to + 1, after.stop))
        base = flat[: max(1, len(flat) // repeats)]
        if base * repeats != flat or any(size % rest for size in base):
            continue
        units = tuple(size // rest for size in base)
        of_flat = cut.segments * product(old, range(before.start, cut.dim))
        if same_parts(of_flat, inner, units * repeats, rest, walk.ranks):
            break
        uneven = uneven or (units, rest)
    else:
        if uneven is not None:
            walk.fail(_uneven(*uneven, walk.ranks), cut)
        walk.fail(f"{_sizes(cut.segments)} × {inner} becomes {_sizes(new[after.start : after.stop])}", cut)
    place = cut.place
    if place is not None:
        first = cut.dim == before.start and to == after.start
        known = first and place.scale is not None and (place.scale * rest) % inner == 0
        scale = place.scale * rest // inner if known and place.scale is not None else None
        place = replace(place, scale=scale) if first else None
    return Cut(to, tuple(size // rest for size in base), cut.origins, place)


def _uneven(units: tuple[int, ...], width: int, ranks: int) -> str:
    """Heads cannot be divided, and which numbers of ranks could share them."""
    count = math.gcd(*units)
    fewer = max(n for n in range(1, ranks + 1) if count % n == 0)
    more = next((n for n in range(ranks, count + 1) if count % n == 0), None)
    near = " or ".join(str(n) for n in dict.fromkeys((fewer, more)) if n not in (None, 1))
    return f"{_sizes(units)} groups (heads) of {width} elements {UNEVEN} by {ranks}{near and f', only by {near}'}"


def pieces(walk: WalkState, op: Op, cut: Cut) -> Cut | list[Cut]:
    size = op.args[0].size
    if op.kind == "slice" and op.argument(4, "step", 1) not in (1, None):
        return _every(walk, op, cut) if op.argument(1, "dim", 0) % len(size) == cut.dim else cut
    dim = (op.argument(1, "dim", 0) if op.kind in ("slice", "unbind", "narrow") else op.argument(2, "dim", 0)) % len(size)
    if op.kind == "unbind":
        if dim == cut.dim:
            walk.fail("single elements of a cut dimension are taken", cut)
        return [replace(cut, dim=cut.dim - (dim < cut.dim))] * size[dim]
    one = op.kind in ("slice", "narrow")
    values = [op.value] if one else list(op.value)
    if dim != cut.dim or values[0].shape[dim] == size[dim]:
        return cut if one else [cut] * len(values)
    begin = min(max(op.args[2] or 0, -size[dim]), size[dim]) % size[dim] if one and len(op.args) > 2 else 0
    edges = [0, *itertools.accumulate(cut.segments)]
    out, local = [], []
    for first, stop in itertools.pairwise(itertools.accumulate([begin, *(int(value.shape[dim]) for value in values)])):
        if first not in edges or stop not in edges:
            _refine(walk, cut, first, stop)
        place = cut.place
        if place is not None:
            place = (
                None
                if place.scale is None
                else Place(place.parameter, place.dim, place.offset + first * place.scale, place.scale)
            )
        out.append(replace(cut, segments=cut.segments[edges.index(first) : edges.index(stop)], place=place))
        local.append((cut.segments[: edges.index(first)], out[-1].segments))
    walk.change.pieces = dim, tuple(local)
    return out[0] if one else out


def _every(walk: WalkState, op: Op, cut: Cut) -> Cut:
    """Every second element, as of a matrix in which gate and up alternate: a rank has whole pairs."""
    begin, stop, step = op.args[2] or 0, op.argument(3, "end"), op.argument(4, "step", 1)
    every = 0 <= begin < step and (stop is None or stop >= op.args[0].size[cut.dim])
    own = tuple(size // step for size in cut.segments)
    pairs = every and not any(size % step for size in cut.segments)
    if not pairs or not same_parts(cut.segments, 1, own, step, walk.ranks):
        walk.fail(f"one of every {step} elements of {_sizes(cut.segments)} is taken", cut)
    return replace(cut, segments=own, place=None)


def _refine(walk: WalkState, cut: Cut, first: int, stop: int) -> None:
    """A matrix that was not known to be fused."""
    place = cut.place
    if place is None or place.scale is None:
        walk.fail(f"[{first}:{stop}] of {_sizes(cut.segments)} is taken", cut)
    raise Refine(place.key, [place.offset + point * place.scale for point in (first, stop)])


def _sizes(sizes: tuple[int, ...]) -> str:
    return "[" + " | ".join(str(size) for size in sizes) + "]" if len(sizes) != 1 else str(math.prod(sizes))
