"""Whether a hand-written table AXES divides a module as its own graph allows. `worker/measure_process` asks before a run starts: a wrong name
would train another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from phalanx.spec.cut_plan import ParamCut
from phalanx.spec.errors import RunError
from phalanx.tracing import seams as seam_search
from phalanx.tracing.cut_search import Found
from phalanx.tracing.infer_cuts import search_of, traced


def wrong_cuts(model: nn.Module, ranks: int, cuts: Mapping[str, ParamCut]) -> list[str]:
    """A sentence for each parameter that `ranks` ranks cannot divide as `cuts` say; parameters that it lacks stay whole. Empty too if the module
    cannot be traced. The vocabulary is not looked at: lookups and losses divide it, however uneven, where the model has a seam for them."""
    checked = {
        name: cut
        for name, cut in cuts.items()
        if all(segment.role != "vocab" and segment.size % ranks == 0 for segment in cut.segments)
    }
    try:
        found_trace = traced(model)
    except RunError:
        return []
    some, graph = found_trace.sample, found_trace.graph
    search = search_of(model, found_trace, ranks, 0.0)
    for name, parameter in graph.parameters.items():
        kept = checked[name].dim if name in checked else None
        search.refused |= {(name, dim): "AXES keeps it whole" for dim in range(len(parameter.size)) if dim != kept}
    best = search.settle(())
    wrong: list[str] = []
    for name in graph.parameters:
        if name in checked:
            found = best.walk.known.get(name)
            sizes = None if found is None or found.dim != checked[name].dim else found.segments
            wrong += _problem(name, checked[name], sizes, best.reasons.get((name, checked[name].dim)))
    return wrong or list(_regions(best, some.model, checked))


def _regions(best: Found, model: nn.Module, cuts: Mapping[str, ParamCut]) -> Iterator[str]:
    """AXES enters a region at the module that holds a linear layer with divided inputs. That is wrong if this module also reads its input whole."""
    modules = dict(model.named_modules())
    tables = {path for path, module in modules.items() if isinstance(module, nn.Embedding)}
    attends = {path for path, module in modules.items() if hasattr(module, "attend")}
    seams = seam_search.find(best.walk, tables, attends, ())
    rows = [
        name for name, cut in cuts.items() if name in best.walk.graph.parameters and name.endswith(".weight") and cut.dim == 1
    ]
    for region in dict.fromkeys(name.rpartition(".")[0].rpartition(".")[0] for name in rows):
        if inner := next((seam.module for seam in seams.enters if seam.module.startswith(f"{region}.")), None):
            yield (
                f"AXES divides {inner}, but {region or 'the model'}, which holds it, also reads its input whole, in a residual connection or a "
                "norm: put the divided layers into a module of their own, or remove AXES, and the cuts are found out."
            )


def _problem(name: str, cut: ParamCut, sizes: tuple[int, ...] | None, reason: str | None) -> Iterator[str]:
    named = " | ".join(repr(segment.role) for segment in cut.segments)
    if sizes is None:
        why = reason or "nothing in the module's graph reads it so"
        yield (
            f"AXES names dimension {cut.dim} of {name} {named}, but it cannot be divided: {why}. Give it another name to keep it whole, or remove "
            "AXES, and what can be divided is found out."
        )
    elif sizes != cut.sizes:
        role = cut.segments[0].role
        pairs = ", ".join(f'("{role}", {size})' for size in sizes)
        yield (
            f"AXES names dimension {cut.dim} of {name} {named} with {' + '.join(map(str, cut.sizes))} elements, but the module reads "
            f"{' + '.join(map(str, sizes))}: name every segment, such as ({pairs}), or remove AXES, and the segments are found out."
        )
