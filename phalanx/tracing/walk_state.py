"""What a walk over the graph knows and records while the rules pass cuts on. Base of `cut_walk`; the rules are functions of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from phalanx.tracing import view_shapes
from phalanx.tracing.cut_values import Change, Conflict, Cut, Key, Place, Restart, has_parts, origins
from phalanx.tracing.module_graph import ModuleGraph, Op


@dataclass(frozen=True, slots=True)
class Limits:
    """What walks must keep to, learned from earlier ones."""

    ranks: int
    banned: frozenset[Key]
    segments: Mapping[Key, tuple[int, ...]]
    projects: bool
    """Whether the model multiplies by its embedding through a seam (`project`)."""
    shares: frozenset[str] = frozenset()
    """Modules that add a whole value to a part of a sum if asked to: each rank its share (`bias_share`)."""


class WalkState:
    """One walk. `known`: parameters, and operations cut by demand, that the walk before has cut."""

    def __init__(self, graph: ModuleGraph, limits: Limits, known: Mapping[Any, Cut], summed: frozenset[Op]):
        self.graph, self.limits, self.ranks = graph, limits, limits.ranks
        self.known, self.summed = dict(known), set(summed)
        self.cuts: dict[Op, Cut] = {}
        self.lists: dict[Op, list[Cut]] = {}
        self.parts: dict[Op, frozenset[Key]] = {}
        """Values that are a part of a sum on each rank, and where that comes from."""
        self.changes: dict[Op, Change] = {}
        self.roles: dict[tuple[str, int, int], str] = {}
        """By parameter, dimension and offset."""
        self.work = self.sent = 0.0
        self.entered: dict[Op, None] = {}
        self.results: dict[Op, set[str]] = {}
        for passed in graph.results:
            self.results.setdefault(passed.value, set()).add(passed.module)
        self.change = Change()
        self.op = graph.ops[0]

    def cut(self, op: Any) -> Cut | None:
        return self.cuts.get(op) if isinstance(op, Op) else None

    def fail(self, why: str, *cuts: Cut | None) -> NoReturn:
        raise Conflict(f"{why} at {self.op.kind} in {self.op.owner or 'the model'}", origins(*cuts))

    def with_parts(self, cut: Cut) -> Cut:
        if not has_parts(cut.segments, self.ranks):
            self.fail(f"{_words(cut.segments)} would leave one of {self.ranks} ranks without any", cut)
        return cut

    def enter(self, *operands: Any) -> None:
        """Whole operands of an operation of which each rank computes a part."""
        for op in operands:
            if isinstance(op, Op) and op.shape is not None and op not in self.cuts and op not in self.change.slices:
                self.change.enter[op] = None
                self.entered[op] = None

    def part_of_sum(self, op: Op, found: frozenset[Key]) -> None:
        """Each rank has a part of a sum: completed here if a module returns it or somebody needs it, else further on."""
        if op in self.summed or self.change.bias is not None or self.change.mean or self.results.get(op):
            self.change.leave = True
            self.sent += math.prod(op.size) * self.graph.weight(op)
        else:
            self.parts[op] = found

    def source(self, op: Any, dim: int) -> tuple[Key | None, list[tuple[Op, int]]]:
        """The parameter that an operand is a view of, and the views between."""
        chain = [(op, dim)]
        while isinstance(op, Op) and (step := view_shapes.back(op, dim)) is not None:
            op, dim = step
            chain.append(step)
        return ((op.name, dim), chain) if isinstance(op, Op) and op.kind == "parameter" else (None, chain)

    def want(self, op: Op, like: Cut, dim: int) -> None:
        """A whole operand must be cut like another: a parameter gets its part, anything else takes its slice."""
        found, chain = self.source(op, dim)
        if found is not None and found not in self.limits.banned:
            known = self.known.setdefault(
                found[0], replace(like, dim=found[1], origins=like.origins | {found}, place=Place(*found, 0, 1))
            )
            if (known.dim, known.segments) == (found[1], like.segments):
                for step, at in chain:
                    self.cuts[step] = replace(like, dim=at)
                return
        if op not in self.known and (demand := view_shapes.demand(op, dim)) is not None:
            self.known[demand[0]] = replace(like, dim=demand[1], place=None)
            raise Restart
        self.change.slices[op] = dim, like.segments
        self.entered[op] = None

    def demanded(self, op: Op) -> Cut:
        """A value that is the same along a dimension, made for a part of it."""
        cut = self.known[op]
        self.change.shape = cut.dim, cut.segments
        self.enter(*op.inputs)
        return cut

    def seed(self, op: Op, dim: int) -> Cut | None:
        """Cut a matrix's output, if it is a parameter's and may be cut."""
        found, _ = self.source(op, dim)
        if found is None or found in self.limits.banned or found[0] in self.known:
            return None
        segments = self.limits.segments.get(found, (op.size[dim],))
        if not has_parts(segments, self.ranks):
            return None
        self.want(op, Cut(dim, segments, frozenset([found]), Place(*found, 0, 1)), dim)
        return self.cut(op)


def _words(sizes: tuple[int, ...]) -> str:
    return " + ".join(str(size) for size in sizes)
