"""The tensor parallel plan of a module, inferred from its own graph. The entry of this room: `infer` and `part_graphs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from phalanx.spec.cut_plan import CutPlan, DividedAttribute, Enter, Leave, ParamCut, Segment
from phalanx.spec.errors import RunError
from phalanx.tracing import seams as seam_search
from phalanx.tracing.axes_check import agreed, restrict
from phalanx.tracing.cut_search import Found, Search
from phalanx.tracing.cut_values import Cut, Key, has_parts
from phalanx.tracing.layer_sample import Sample, sample
from phalanx.tracing.module_graph import ModuleGraph, check_functions, trace, within
from phalanx.tracing.part_graph import PartGraph, changes_in, part_graph
from phalanx.tracing.part_proof import Proof
from phalanx.tracing.seams import Seams
from phalanx.tracing.sequence_proof import check_forward
from phalanx.tracing.sequence_seams import SequenceSeams

LENGTH = 22
"""Positions in a trace, where nobody asks for another number: small, and no size of a model."""
_RATE = 2000.0
_WIDE = 4096
_ROUNDS = 12
"""Changes of a plan until its proof holds: each keeps something whole or rewrites a module."""


@dataclass(slots=True)
class Traced:
    """A model's sample and its graph."""

    sample: Sample
    graph: ModuleGraph
    trimmed: bool


def traced(model: nn.Module, length: int = LENGTH, dynamic: bool = False) -> Traced:
    """One layer of each kind; the whole model if its code cannot do without the others."""
    some = sample(model)
    check_functions(some.model, some.mode, length)
    try:
        return Traced(some, trace(some.model, some.mode, length, some.weights, dynamic=dynamic), True)
    except RunError:
        every = sample(model, trim=False)
        return Traced(every, trace(every.model, every.mode, length, every.weights, dynamic=dynamic), False)


def search_of(model: nn.Module, found: Traced, ranks: int, rate: float) -> Search:
    """With the seams that the model has."""
    shares = frozenset(path for path, module in found.sample.model.named_modules() if hasattr(module, "bias_share"))
    return Search(found.graph, ranks, rate, hasattr(model, "project"), shares)


def infer(
    model: nn.Module,
    ranks: int,
    length: int = LENGTH,
    given: Mapping[str, tuple[Any, ...]] | None = None,
    rate: float | None = None,
    sequence: bool = False,
) -> CutPlan:
    """How `ranks` ranks divide a module that lives on meta or has memory; nothing is allocated. `given`: a table of names of dimensions
    (AXES), checked against the trace. `rate`: FLOPs that one number sent is worth. `sequence`: with sequence parallelism."""
    found = traced(model, length)
    search = search_of(model, found, ranks, _rate(model) if rate is None else rate)
    if given is not None:
        restrict(search, given)
    for _ in range(_ROUNDS):
        best = search.best() if given is None else agreed(search, given)
        proven = _proven(model, found, search, best, length)
        if proven is not None:
            plan = replace(_expanded(found.sample, best, proven), uncompared=search.uncompared)
            return _with_sequence(model, plan, found.sample, proven) if sequence and plan.params else plan
    raise RunError(f"{type(model).__name__} could not be divided over {ranks} ranks: no plan of {_ROUNDS} could be proven.")


def part_graphs(model: nn.Module, plan: CutPlan, length: int = LENGTH) -> dict[str, PartGraph]:
    """The graphs of the modules in `plan.rewritten`, by path. The model is the whole one: call it before anything is cut."""
    if not plan.rewritten:
        return {}
    found = traced(model, length)
    search = search_of(model, found, plan.ranks, 0.0)
    for name, op in found.graph.parameters.items():
        kept = plan.params[name].dim if name in plan.params else None
        search.refused |= {(name, dim): "by the plan" for dim in range(len(op.size)) if dim != kept}
    best = search.settle(())
    cut = {name for name in best.walk.known if isinstance(name, str)}
    if cut != {name for name in plan.params if name in found.graph.parameters}:
        raise RunError(f"the plan is not one of this {type(model).__name__}: infer it again.")
    paths = {path for path, _ in found.sample.model.named_modules()} & set(plan.rewritten)
    graphs = _graphs(model, found, best, paths, length)
    if not isinstance(graphs, dict):
        raise RunError(f"{graphs[0]} cannot be rewritten: {graphs[1]}.")
    return {each: graph for path, graph in graphs.items() for each in found.sample.names(path)}


def _rate(model: nn.Module) -> float:
    """So that a tiny model is divided like a large one."""
    widths = [module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)]
    return _RATE * min(1.0, max(widths, default=_WIDE) / _WIDE)


@dataclass(frozen=True, slots=True)
class _Proven:
    """Where ranks communicate by a walk that a trace of a rank's part confirms."""

    seams: Seams
    divided: list[DividedAttribute]
    proof: Proof


def _proven(model: nn.Module, found: Traced, search: Search, best: Found, length: int) -> _Proven | None:
    """What makes a plan of a walk; None if the search must go on with what `search.refused` now says."""
    modules = dict(found.sample.model.named_modules())
    tables = {path for path, module in modules.items() if isinstance(module, nn.Embedding)}
    attends = {path for path, module in modules.items() if hasattr(module, "attend")}
    rewritten: set[str] = set()
    while True:
        seams = seam_search.find(best.walk, tables, attends, rewritten)
        if refused := _without_seam(search, seams):
            search.refused |= refused
            return None
        graphs = _graphs(model, found, best, seams.rewritten, length)
        if isinstance(graphs, dict):
            proof = Proof(model, best.walk, length, found.trimmed, frozenset(seams.selects), graphs)
            divided, wrong = proof.attributes()
            if wrong is None:
                return _Proven(seams, divided, proof)
            path = wrong.module
            while any(within(path, done) for done in seams.rewritten):
                path = path.rpartition(".")[0]
            if path != "":
                rewritten = seams.rewritten | {path}
                continue
            graphs = (path, wrong.what)
        path, why = graphs
        inside = path
        while not (refused := _of(best, inside, why, search.refused)) and inside:
            inside = inside.rpartition(".")[0]
        if not refused:
            raise RunError(
                f"{type(model).__name__} has no one graph: its {path or 'forward'} runs other operations when it is traced again, with whole parameters ({why}). "
                "Train it with layout.tensor = 1, or make its code build all that it needs in its constructor."
            )
        search.refused |= refused
        return None


def _of(best: Found, path: str, why: str, refused: Mapping[Key, str]) -> dict[Key, str]:
    """All cuts of the parameters of a module, none of which can stay; empty if none is cut."""
    keys = [(name, cut.dim) for name, cut in best.walk.known.items() if isinstance(name, str) and within(name, path)]
    return dict.fromkeys((key for key in keys if key not in refused), f"its module's code does not run on a part: {why}")


def _without_seam(search: Search, seams: Seams) -> dict[Key, str]:
    """Dimensions that nobody can divide; the logits are excepted if the model has a seam for them."""
    return {key: why for key, why in seams.refused.items() if not search.projects or key[1] != 0}


def _graphs(
    model: nn.Module, found: Traced, best: Found, paths: set[str], length: int
) -> dict[str, PartGraph] | tuple[str, str]:
    """Rewritten graphs by path, for any batch and length; or the module that has none, and why."""
    if not paths:
        return {}
    free = sample(model, found.trimmed)
    try:
        graph = trace(free.model, free.mode, length, free.weights, dynamic=True)
    except RunError as error:
        return min(paths), str(error)
    graphs: dict[str, PartGraph] = {}
    for path in sorted(paths):
        changes = changes_in(graph, best.walk, path)
        made = part_graph(graph, changes, path, best.walk.ranks) if changes else "its graph for any length differs"
        if isinstance(made, str):
            return path, made
        graphs[path] = made
    return graphs


def _with_sequence(model: nn.Module, plan: CutPlan, some: Sample, proven: _Proven) -> CutPlan:
    """The plan with sequence parallelism, proven by a trace with a part of the positions, and by a forward of all layers. RunError names what
    needs all of them."""
    proof = proven.proof
    for ends_whole in (False, True):
        proof.sequence = SequenceSeams(some, proof.walk, proven.seams, proof.length, ends_whole=ends_whole)
        if (wrong := proof.mismatch(proven.divided)) is None:
            plan = proof.sequence.expanded(plan)
            check_forward(sample(model, trim=False), plan, proof.length)
            return plan
    assert wrong is not None
    raise RunError(
        f"layout.sequence = true: the code of {wrong.module or 'the model'} does not compute the same from a part of the positions: "
        f"{wrong.what.partition('. ')[0]}. Remove layout.sequence."
    )


def _expanded(some: Sample, best: Found, proven: _Proven) -> CutPlan:
    """The plan of the traced layers, for all layers."""
    walk, seams = best.walk, proven.seams
    params: dict[str, ParamCut] = {}
    for name, cut in walk.known.items():
        if isinstance(name, str):
            for each in some.names(name):
                params[each] = ParamCut(cut.dim, segments_of(best, name, cut))
    sums: dict[str, int] = {}
    for op, change in walk.changes.items():
        if change.leave:
            layer = next((layer for layer in some.alike if op.owner == layer or op.owner.startswith(f"{layer}.")), "")
            for each in some.alike.get(layer, ("",)):
                sums[each] = sums.get(each, 0) + 1
    many = some.names
    return CutPlan(
        ranks=walk.ranks,
        params=dict(sorted(params.items())),
        partial=frozenset(each for name in seams.partial for each in many(name)),
        enters=tuple(Enter(each, seam.argument) for seam in seams.enters for each in many(seam.module)),
        leaves=tuple(Leave(each) for seam in seams.leaves for each in many(seam.module)),
        divided=tuple(replace(one, module=each) for one in proven.divided for each in many(one.module)),
        selects=tuple(each for path in sorted(seams.selects) for each in many(path)),
        shares=tuple(each for path in sorted(seams.shares) for each in many(path)),
        rewritten=tuple(each for path in sorted(seams.rewritten) for each in many(path)),
        whole=_whole(some, best),
        sums=sums,
    )


def segments_of(best: Found, name: str, cut: Cut) -> tuple[Segment, ...]:
    """With roles: of a matrix that reads a cut value, that of the matrix it came from."""
    walk, found, offset = best.walk, [], 0
    for size in cut.segments:
        role = walk.roles.get((name, cut.dim, offset))
        if role is None:
            other = {
                walk.roles[(*key, at)] for key in cut.origins for (n, d, at) in walk.roles if (n, d) == key and at == offset
            }
            first = {walk.roles[k] for k in walk.roles if k[:2] in cut.origins}
            named = other or first
            role = "heads" if "heads" in named else min(named) if named else "ffn"
        found.append(Segment(role, size))
        offset += size
    return tuple(found)


def _whole(some: Sample, best: Found) -> dict[str, str]:
    walk, ranks = best.walk, best.walk.ranks
    found: dict[str, str] = {}
    for name, op in walk.graph.parameters.items():
        if name in walk.known or len(op.size) < 2:
            continue
        reason = next((why for key, why in best.reasons.items() if key[0] == name), None)
        segments = best.limits.segments.get((name, 0), op.size[:1])
        if reason is None and not has_parts(segments, ranks):
            reason = f"its {' + '.join(map(str, segments))} rows would leave one of {ranks} ranks without any"
        for each in some.names(name):
            found[each] = reason or "nothing that is computed with it is divided"
    return found
