"""Where ranks communicate, in terms of modules: before which an argument is entered, after which a result is summed, and which modules
cannot be divided so and run their rewritten graph. Used by `infer_cuts`.

A value that every rank has whole gets a whole gradient from a use that is not divided, and a part of its gradient from one that is. A value
with uses of both kinds needs an Enter between: at the largest module that takes it as an argument and inside of which all uses are divided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.spec.cut_plan import Enter, Leave
from phalanx.tracing.cut_values import Change, Key
from phalanx.tracing.cut_walk import Walk
from phalanx.tracing.module_graph import ModuleGraph, Op, Passed, within
from phalanx.tracing.view_shapes import PRODUCTS, SAME, VIEWS

WHOLE, PART, BOTH = "whole", "part", "both"


@dataclass(slots=True)
class Seams:
    enters: dict[Enter, None] = field(default_factory=dict)
    leaves: dict[Leave, None] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    selects: set[str] = field(default_factory=set)
    shares: set[str] = field(default_factory=set)
    rewritten: set[str] = field(default_factory=set)
    refused: dict[Key, str] = field(default_factory=dict)
    """Dimensions that cannot be cut, because nobody can step in where ranks would have to communicate."""


def find(walk: Walk, tables: set[str], attends: set[str], rewritten: Iterable[str]) -> Seams:
    """`tables`: embedding modules; `attends`: modules with an attribute `attend`; `rewritten`: modules that are so in any case."""
    seams = Seams(rewritten=set(rewritten))
    search = _Placing(walk, seams, tables, attends)
    while True:
        count = len(seams.rewritten)
        search.place()
        if len(seams.rewritten) == count or seams.refused:
            return seams


class _Placing:
    def __init__(self, walk: Walk, seams: Seams, tables: set[str], attends: set[str]):
        self.walk, self.seams, self.tables, self.attends = walk, seams, tables, attends
        self.graph: ModuleGraph = walk.graph
        self.returned: dict[Op, list[Passed]] = {}
        for passed in self.graph.results:
            self.returned.setdefault(passed.value, []).append(passed)
        self.entered: set[tuple[str, Op]] = set()
        self.known: dict[Op, str | None] = {}
        self.inside: dict[tuple[Op, str, bool], str | None] = {}

    def place(self) -> None:
        self.seams.enters.clear()
        self.seams.leaves.clear()
        self.seams.selects.clear()
        self.seams.shares.clear()
        self.entered.clear()
        for op, change in self.walk.changes.items():
            if not self._rewritten(op):
                self._leave(op, change)
        self._enter()
        self._check()

    def _rewritten(self, op: Op) -> bool:
        return any(within(op.owner, path) for path in self.seams.rewritten)

    def _rewrite(self, op: Op) -> None:
        """The module's own code cannot do it."""
        if op.owner != "":
            self.seams.rewritten.add(op.owner)
            return
        change = self.walk.changes.get(op, Change())
        keys = set(self.walk.cuts[op].origins) if op in self.walk.cuts else set()
        for source in [*op.inputs, *change.slices]:
            if source in self.walk.cuts:
                keys |= self.walk.cuts[source].origins
        why = f"the model itself computes {op.kind} with it, outside of any module at which ranks could communicate"
        self.seams.refused |= dict.fromkeys(sorted(keys), why)

    def _leave(self, op: Op, change: Change) -> None:
        if change.select is not None:
            if op.owner in self.attends:
                self.seams.selects.add(op.owner)
            else:
                self._rewrite(op)
        if change.shared:
            self.seams.shares.add(op.owner)
        scaled, loose = change.leave and change.mean, change.lookup and op.owner not in self.tables
        if change.slices or scaled or loose:
            self._rewrite(op)
        elif change.leave:
            if self._is_result(op):
                self.seams.leaves[Leave(op.owner)] = None
            else:
                self._rewrite(op)

    def _is_result(self, op: Op) -> bool:
        """Whether its module returns a value, or a view of it, and does nothing else with it."""
        while True:
            if any(passed.module == op.owner and passed.name == "" for passed in self.returned.get(op, [])):
                return True
            inside = [user for user in op.users if user.owner == op.owner]
            if len(inside) != 1 or inside[0].kind not in VIEWS | SAME or len(op.users) != 1:
                return False
            op = inside[0]

    # Gradients of whole values.

    def _use(self, value: Op, user: Op) -> str | None:
        """What gradient a use gives: whole, or a part of it."""
        if not user.grad:
            return None
        if self.walk.limits.projects and user.owner == "" and user.kind in PRODUCTS:
            return WHOLE  # entered by whoever replaces `project`
        if any((call, value) in self.entered for call in user.calls):
            return WHOLE
        if self._divided(value, user) is None:
            return self._status(user)
        if self._rewritten(user) and value.kind != "parameter":
            return WHOLE  # entered by the rewritten graph
        return PART

    def _status(self, value: Op) -> str | None:
        if value not in self.known:
            found = {status for user in value.users if (status := self._use(value, user))}
            if value in self.graph.outputs:
                found.add(PART if value in self.walk.cuts else WHOLE)
            self.known[value] = BOTH if len(found) > 1 or BOTH in found else next(iter(found), None)
        return self.known[value]

    def _inside(self, value: Op, call: str, is_argument: bool = True) -> str | None:
        """The same, of the uses in one call of a module; a derived value that leaves it has a whole gradient."""
        key = (value, call, is_argument)
        if key not in self.inside:
            found: set[str] = set()
            for user in value.users:
                if call in user.calls:
                    status = self._divided(value, user) or self._inside(user, call, False) if user.grad else None
                else:
                    status = None if is_argument else WHOLE
                found |= {status} if status else set()
            if not is_argument and value in self.graph.outputs:
                found.add(WHOLE)
            self.inside[key] = BOTH if len(found) > 1 else next(iter(found), None)
        return self.inside[key]

    def _divided(self, value: Op, user: Op) -> str | None:
        """PART if each rank computes a part of something from the value."""
        walk, change = self.walk, self.walk.changes.get(user, Change())
        divided = user in walk.cuts or user in walk.lists or user in walk.parts or change.leave
        return PART if divided and value is not change.bias else None

    def _enter(self) -> None:
        by_depth = sorted(self.graph.arguments, key=lambda passed: passed.module.count(".") if passed.module else -1)
        wanted: dict[Enter, list[Passed]] = {}
        calls: dict[Enter, int] = {}
        for passed in by_depth:
            name = int(passed.name) if passed.name.isdigit() else passed.name
            seam = Enter(passed.module, name)
            calls[seam] = calls.get(seam, 0) + 1
            if passed.module == "" or any(within(passed.module, path) for path in self.seams.rewritten):
                continue
            value = passed.value
            if not value.grad or value in self.walk.cuts or value in self.walk.parts or "." in passed.name:
                continue
            if self._covered(value, passed) or self._inside(value, passed.call) != PART:
                continue
            self.entered.add((passed.call, value))
            wanted.setdefault(seam, []).append(passed)
        for seam, found in wanted.items():
            if len(found) == calls[seam]:
                self.seams.enters[seam] = None
            else:  # a module that is called in different ways
                self.seams.rewritten.add(seam.module)

    def _covered(self, value: Op, passed: Passed) -> bool:
        """Whether the value, or all it depends on, was entered by a module around."""
        around = self._around(passed)
        seen: set[Op] = set()

        def reaches(op: Op) -> bool:
            if op in seen or not op.grad:
                return False
            seen.add(op)
            return any((call, op) in self.entered for call in around) or (
                bool(set(op.calls) & set(around)) and any(reaches(source) for source in op.inputs if source.kind != "parameter")
            )

        return reaches(value)

    def _around(self, passed: Passed) -> list[str]:
        return [call for call, _ in self.entered if call != passed.call and call in passed.calls]

    def _check(self) -> None:
        """No value has uses of both kinds, and no sum a partial gradient; else the graph of the module there is rewritten."""
        self.known.clear()
        for op in reversed(self.graph.ops):
            if op.grad:
                self._status(op)
        self.seams.partial = set()
        for op in self.graph.ops:
            if not op.grad or op in self.walk.cuts or op in self.walk.lists or op in self.walk.parts:
                continue
            status = self._status(op)
            change = self.walk.changes.get(op, Change())
            if op.kind == "parameter" and status == PART:
                self.seams.partial.add(op.name)
            elif status == BOTH or (change.leave and status == PART):
                self._mend(op)

    def _mend(self, value: Op) -> None:
        """Rewrite the modules that read a part of a value that others read whole."""
        for user in value.users:
            if self._use(value, user) == PART:
                target = user
                while not (target in self.walk.cuts or target in self.walk.parts or target in self.walk.lists) and target.users:
                    nearer = [u for u in target.users if self._use(target, u) == PART]
                    if not nearer or self.walk.changes.get(target, Change()).leave:
                        break
                    target = nearer[0]
                self._rewrite(target)
