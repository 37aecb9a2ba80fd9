"""A plan in words: as a table `AXES` that Python reads, with a comment for each kind of layer. `phalanx models --axes` prints it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from phalanx.spec.cut_plan import CutPlan, DividedAttribute
from phalanx.tracing.layer_sample import pattern


def axes_text(plan: CutPlan, model: nn.Module) -> str:
    """Valid Python: names of dimensions by pattern, the first match counts."""
    lines = [*_words(plan, model), "", "AXES = {"]
    lines += [f"    {_quoted(name)}: {dims}," for name, dims in _table(plan, model).items()]
    return "\n".join([*lines, "}", ""])


def _table(plan: CutPlan, model: nn.Module) -> dict[str, str]:
    """By pattern where all layers have the same names, else by the parameter's own name; those first."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    width = _width(model)
    dims = {name: _dims(plan, name, shape, width) for name, shape in shapes.items()}
    kinds: dict[str, set[str]] = {}
    for name, text in dims.items():
        kinds.setdefault(pattern(name), set()).add(text)
    exact = {name: text for name, text in dims.items() if len(kinds[pattern(name)]) > 1}
    return exact | {pattern(name): text for name, text in dims.items() if name not in exact}


def _width(model: nn.Module) -> int:
    widths = Counter(module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding))
    return widths.most_common(1)[0][0] if widths else 0


def _dims(plan: CutPlan, name: str, shape: tuple[int, ...], width: int) -> str:
    cut = plan.params.get(name)
    found = []
    for dim, size in enumerate(shape):
        if cut is None or cut.dim != dim:
            found.append('"model"' if size == width else '"whole"')
        elif len(cut.segments) == 1:
            found.append(_quoted(cut.segments[0].role))
        else:
            found.append(f"({', '.join(f'({_quoted(s.role)}, {s.size})' for s in cut.segments)})")
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


def _words(plan: CutPlan, model: nn.Module) -> list[str]:
    """Comments: who is cut, where sums are, what stays whole and why, for each kind of layer."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in dict.fromkeys(["", *plan.sums]):
        groups.setdefault(tuple(_layer(plan, model, layer)), []).append(layer)
    lines = [f"# {type(model).__name__} over {plan.ranks} ranks."]
    if plan.uncompared:
        lines.append(
            f"# {plan.uncompared} choices were not compared, because there are too many: another division may communicate less."
        )
    for text, layers in groups.items():
        where = (
            "Outside of layers"
            if layers == [""]
            else layers[0]
            if len(layers) == 1
            else f"{layers[0]} … {layers[-1]} ({len(layers)})"
        )
        count = plan.sums.get(layers[0], 0)
        lines += ["#", f"# {where}: {count} {'sum' if count == 1 else 'sums'} over the ranks in a forward."]
        lines += [f"#   {line}" for line in text]
    return lines


def _layer(plan: CutPlan, model: nn.Module, layer: str) -> list[str]:
    others = [other for other in plan.sums if other]

    def own(name: str) -> bool:
        return name.startswith(f"{layer}.") if layer else not any(name.startswith(f"{other}.") for other in others)

    def short(name: str) -> str:
        return name[len(layer) + 1 :] if layer else name

    lines = []
    for name, cut in plan.params.items():
        if own(name):
            parts = " | ".join(f"{s.size} {s.role}" for s in cut.segments)
            lines.append(f"{short(name)}: dimension {cut.dim} is cut, {parts}")
    lines += [f"{short(seam.module)}: argument {seam.argument} enters" for seam in plan.enters if own(seam.module)]
    lines += [f"{short(seam.module)}: its result is summed" for seam in plan.leaves if own(seam.module)]
    lines += [f"{short(one.module)}: {one.attribute} = {one.value}{_last(one)}" for one in plan.divided if own(one.module)]
    lines += [f"{short(path)}: each rank selects keys and values" for path in plan.selects if own(path)]
    lines += [f"{short(path)}: each rank adds its share of the last bias" for path in plan.shares if own(path)]
    lines += [f"{short(path)}: its graph is rewritten" for path in plan.rewritten if own(path)]
    lines += [f"{short(name)}: whole, gradients are summed" for name in sorted(plan.partial) if own(name)]
    lines += [f"{short(name)}: whole; {_line(why)}" for name, why in plan.whole.items() if own(name)]
    return lines


def _last(one: DividedAttribute) -> str:
    return "" if one.last is None else f", on the last rank {one.last}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _quoted(value: Any) -> str:
    return f'"{value}"'
