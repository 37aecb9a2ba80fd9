"""The best way to divide a module: walks with different parameters kept whole, and the cost of what each finds. Used by `infer_cuts`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from phalanx.spec.errors import RunError
from phalanx.tracing.cut_values import Conflict, Cut, Key, Refine, Restart
from phalanx.tracing.cut_walk import Walk
from phalanx.tracing.layer_sample import pattern
from phalanx.tracing.module_graph import ModuleGraph, Op
from phalanx.tracing.walk_state import Limits

_WALKS = 1000
"""More than any choice needs: a walk that never settles is a mistake in a rule."""
_TRIES = 1000
"""Choices that a search compares, at most: those of DeepSeek-V3 are 228; pairs of more matrices are too many."""
_OPERATIONS = 10_000_000
"""Operations that all walks of a search pass, at most, which takes 15 to 30 seconds: DeepSeek-V3's pass 0.7 million. Loops that a trace
unrolls make large graphs: four layers of DeepSeek-V4 have 2,753 operations, and all choices take 80 seconds."""


@dataclass(slots=True)
class Found:
    """A walk that holds, what it keeps to, and why parameters stay whole."""

    walk: Walk
    limits: Limits
    reasons: dict[Key, str]


@dataclass(slots=True)
class Search:
    graph: ModuleGraph
    ranks: int
    rate: float
    """FLOPs that one number sent to the other ranks is worth."""
    projects: bool
    shares: frozenset[str] = frozenset()
    refused: dict[Key, str] = field(default_factory=dict)
    """Dimensions that must stay whole, and why: from outside of the walks."""
    segments: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    seeds: set[Key] = field(default_factory=set)
    tried: int = 0
    passed: int = 0
    """Operations that walks passed."""
    uncompared: int = 0
    """Choices that were not compared, because there were too many."""

    def best(self) -> Found:
        """Hill climb over dimensions that stay whole by choice, one and two at a time. What a conflict keeps whole may be cut again: only
        choices are kept."""
        chosen: frozenset[Key] = frozenset()
        best = self.settle(chosen)
        # A table of tokens is always cut if it can be: that saves memory, of which the cost knows nothing.
        tables = {op.args[0].name for op in self.graph.ops if op.kind == "embedding"}
        while True:
            seeds = sorted({self._representative(key) for key in self.seeds if key[0] not in tables} - chosen)
            tries = [chosen | {key} for key in seeds]
            tries += [chosen | {a, b} for a, b in itertools.combinations(seeds, 2) if _near(a, b)]
            found = []
            for index, some in enumerate(tries):
                if self.tried >= _TRIES or self.passed >= _OPERATIONS:
                    self.uncompared = len(tries) - index
                    break
                self.tried += 1
                one = self.settle(some)
                found.append((self._cost(one), index, one, some))
            if not found or (least := min(found, key=lambda x: x[:2]))[0] >= self._cost(best):
                return best
            best, chosen = least[2], frozenset(least[3])

    def _cost(self, found: Found) -> float:
        return found.walk.work + self.rate * found.walk.sent

    def settle(self, chosen: Iterable[Key]) -> Found:
        """Walks until nothing changes: a parameter that is cut late is cut for all its readers."""
        banned = frozenset(self._alike([*chosen, *self.refused]))
        reasons = dict(self.refused) | {key: "dividing it costs more than it saves" for key in chosen}
        known: dict[Any, Cut] = {}
        summed: frozenset[Op] = frozenset()
        walks = 0
        while True:
            walks += 1
            if walks > _WALKS:
                raise RunError(
                    f"how {self.ranks} ranks could divide the model was not found after {_WALKS} walks over its graph, which contradict each other. Train it "
                    "with layout.tensor = 1; a module of your own may have a table AXES instead (docs/own-model.md)."
                )
            self.passed += len(self.graph.ops)
            limits = Limits(self.ranks, banned, self.segments, self.projects, self.shares)
            walk = Walk(self.graph, limits, known, summed)
            try:
                walk.run()
                self.seeds.update((name, cut.dim) for name, cut in walk.known.items() if isinstance(name, str))
                if _same(walk.known, known):
                    return Found(walk, limits, reasons)
                known = walk.known
            except Restart:
                known, summed = walk.known, frozenset(walk.summed)
            except Refine as refine:
                self._divide(refine)
                known, summed = {}, frozenset()
            except Conflict as conflict:
                # Where it is not known which parameters a cut came from, all that are cut stay whole.
                known_keys = [(name, cut.dim) for name, cut in walk.known.items() if isinstance(name, str)]
                new = (self._alike(conflict.origins) - banned) or (self._alike(known_keys) - banned)
                for key in sorted(new):
                    reasons.setdefault(key, conflict.why)
                self.seeds.update(conflict.origins)
                banned |= new
                known, summed = {}, frozenset()

    def _divide(self, refine: Refine) -> None:
        name, dim = refine.key
        size = self.graph.parameters[name].size[dim]
        edges = sorted({0, size, *refine.points, *itertools.accumulate(self.segments.get(refine.key, ()))})
        found = tuple(b - a for a, b in itertools.pairwise(edges))
        for key in self._alike([refine.key]):
            if self.graph.parameters[key[0]].size[dim] == size:
                self.segments[key] = found

    def _alike(self, keys: Iterable[Key]) -> set[Key]:
        """The same dimension of the same parameter in all layers."""
        wanted = {(pattern(name), dim) for name, dim in keys}
        return {(name, dim) for name in self.graph.parameters for what, dim in wanted if pattern(name) == what}

    def _representative(self, key: Key) -> Key:
        return min(self._alike([key]), default=key)


def _same(a: dict[Any, Cut], b: dict[Any, Cut]) -> bool:
    return {k: (c.dim, c.segments) for k, c in a.items()} == {k: (c.dim, c.segments) for k, c in b.items()}


def _near(a: Key, b: Key) -> bool:
    """Whether two matrices are used by one module: only then one choice bears on the other."""
    return pattern(a[0]).rsplit(".", 2)[0] == pattern(b[0]).rsplit(".", 2)[0]
