"""A custom model, `[model] module = "package.module:Class"`: imports it, builds it on the meta device and checks that it can be
trained like the built-in decoder. `models/init` and `training/build` call it.

The class is called with the ModelSpec; `forward(tokens_BS, positions_BS, documents_BS=None)` returns logits [B, S, V]. Its Python
module optionally holds AXES (parameter-name pattern to dimension names), without which `phalanx/tracing` infers how ranks divide it, and
INITIAL (pattern to "ones", "zeros", "normal" or "residual").
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.models import decoder, hf_module
from phalanx.models.layer_list import layers_path
from phalanx.models.tied_weights import untie_names
from phalanx.spec.cut_plan import Axes, CutPlan
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.tracing.infer_cuts import infer, part_graphs

RULES = ("ones", "zeros", "normal", "residual")
_FORWARD = "forward(tokens_BS, positions_BS, documents_BS=None)"


def build(spec: ModelSpec, module: str) -> nn.Module:
    """The model on the meta device. Raises RunError with every reason why it cannot be trained."""
    kind = _class(module)
    try:
        with torch.device("meta"):
            model = kind(spec)
    except Exception as error:  # custom code may raise anything
        raise RunError(f"model.module = {module!r} could not be built: {type(error).__name__}: {error}.") from error
    if getattr(model, "spec", spec) is not spec:
        raise RunError(f"model.module = {module!r} has an attribute spec that is not its ModelSpec: store the ModelSpec there.")
    model.spec = spec  # type: ignore[assignment]  # torch's types allow tensors and modules only
    model.layers_path = layers_path(model)  # type: ignore[assignment]
    untie_names(model)
    problems = [f"model.module = {module!r}: {problem}" for problem in _problems(model, _import(module))]
    if problems:
        raise RunError(problems)
    return model


def axes_of(model: nn.Module) -> Axes:
    """The table of dimension names of a model that `models/init` has built; of a custom one without a table, whole dimensions and the vocabulary of
    the head."""
    spec = model.spec
    assert isinstance(spec, ModelSpec), "`models/init` sets the spec"
    if spec.config is not None:
        return hf_module.axes(model)
    if spec.module is None:
        return decoder.AXES
    return table if (table := written_axes(spec.module)) is not None else _default_axes(model, spec)


def cuts_of(model: nn.Module, ranks: int, sequence: bool = False) -> CutPlan | None:
    """How so many ranks divide a model that was not written for it; None: as its table AXES says. Depends on the model alone, so that every
    rank finds the same. Raises RunError with the reason if nothing can be divided. `sequence`: positions between regions too, for which a table
    AXES alone is not enough."""
    spec = model.spec
    assert isinstance(spec, ModelSpec), "`models/init` sets the spec"
    if spec.is_builtin:
        return None
    table = None if spec.module is None else written_axes(spec.module)
    if table is not None and not sequence:
        return None
    return _inferred(model, spec, ranks, sequence)


def rewritten_of(model: nn.Module, plan: CutPlan) -> dict[str, Callable[..., Callable[..., Any]]]:
    """What makes the forwards of the modules whose own code does not compute the right thing on a part, by name."""
    with _disable_current_modes():
        return {name: graph.forward for name, graph in part_graphs(model, plan).items()}


def _inferred(model: nn.Module, spec: ModelSpec, ranks: int, sequence: bool) -> CutPlan:
    key = (spec, ranks, sequence)
    if key not in _plans:
        table = None if spec.module is None else written_axes(spec.module)
        with _disable_current_modes():  # a trace in a rehearsal has fake tensors of its own
            plan = infer(model, ranks, given=table, sequence=sequence)
        if not plan.params:
            reasons = dict.fromkeys(plan.whole.values())
            raise RunError(
                f"layout.tensor = {ranks} has nothing to cut in {spec.custom_key}: {'; '.join(list(reasons)[:3]) or 'it has no matrix'}. "
                "Set layout.tensor = 1."
            )
        _plans[key] = plan
    return _plans[key]


_plans: dict[tuple[ModelSpec, int, bool], CutPlan] = {}
"""A process may build a model several times."""


def written_axes(module: str) -> Axes | None:
    """The table AXES next to the class, if there is one."""
    table: Axes | None = getattr(_import(module), "AXES", None)
    return table


def _default_axes(model: nn.Module, spec: ModelSpec) -> Axes:
    heads = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part.out_features == spec.rows]
    known = {f"{name}.weight": ("vocab", "model") for name in heads}
    return {name: known.get(name, ("inner",) * parameter.ndim) for name, parameter in model.named_parameters()}


def initial(model: nn.Module, module: str) -> Mapping[str, str]:
    """The table of initial values; parameters that it lacks are initialized by name and shape."""
    table = dict(getattr(_import(module), "INITIAL", {}))
    for name, parameter in model.named_parameters():
        if not any(fnmatchcase(name, pattern) for pattern in table):
            norm = parameter.ndim == 1 and "norm" in name
            table[name] = "zeros" if name.endswith("bias") else "ones" if norm else "normal"
    return table


def _import(module: str) -> ModuleType:
    """The Python module before the colon; also from the working directory."""
    name, _, member = module.partition(":")
    if not name or not member.isidentifier():
        raise RunError(f'model.module = {module!r} is not of the form "package.module:Class".')
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except Exception as error:  # custom code may raise anything
        raise RunError(
            f"model.module = {module!r}: {name} could not be imported ({type(error).__name__}: {error}); "
            f"Python searches its own path and the working directory {here}."
        ) from error


def _class(module: str) -> type[nn.Module]:
    python_module, name = _import(module), module.partition(":")[2]
    kind = getattr(python_module, name, None)
    if kind is None:
        classes = [
            key for key, value in vars(python_module).items() if isinstance(value, type) and issubclass(value, nn.Module)
        ]
        others = f"; its modules are {', '.join(classes)}" if classes else ""
        raise RunError(f"model.module = {module!r}: {python_module.__name__} has no class {name}{others}.")
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RunError(f"model.module = {module!r}: {name} is not a torch.nn.Module; derive it from that.")
    return kind


def _problems(model: nn.Module, python_module: ModuleType) -> Iterator[str]:
    if next(model.parameters(), None) is None:
        yield "it has no parameters, so there is nothing to train."
    yield from _forward_problems(model)
    table = getattr(python_module, "AXES", {})
    if not isinstance(table, Mapping):
        yield (
            f"AXES of {python_module.__name__} is no table; remove it, or write one such as "
            'AXES = {"embed.weight": ("vocab", "model"), "*.bias": ("model",)}.'
        )
    elif hasattr(python_module, "AXES"):
        yield from _axes_problems(model, table)
    rules = getattr(python_module, "INITIAL", {})
    for pattern, rule in rules.items() if isinstance(rules, Mapping) else [("", rules)]:
        if rule not in RULES:
            yield f"INITIAL has {rule!r} for {pattern!r}; choose {', '.join(RULES)}."
    for path, part in model.named_modules():
        names = [name for name, _ in part.named_buffers(recurse=False)]
        if names and not callable(getattr(part, "reset_buffers", None)):
            yield (
                f"{path or type(model).__name__} holds the buffer {names[0]}, but has no method reset_buffers() that sets its "
                "value; models are built without memory, so a value set in the constructor is lost."
            )


def _axes_problems(model: nn.Module, table: Mapping[str, Any]) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        match = next((pattern for pattern in table if fnmatchcase(name, pattern)), None)
        if match is None:
            yield f"no pattern of AXES matches the parameter {name} of shape {list(parameter.shape)}; add one."
        elif not _names(table[match], parameter.ndim):
            yield (
                f"AXES[{match!r}] = {table[match]!r} does not name the {parameter.ndim} dimensions of the parameter {name} "
                f"of shape {list(parameter.shape)}."
            )


def _names(entry: Any, dimensions: int) -> bool:
    """Whether an entry of AXES has one name per dimension, or the (name, size) of each segment of a fused one."""

    def fused(dim: Any) -> bool:
        pairs = isinstance(dim, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in dim)
        return pairs and all(isinstance(role, str) and isinstance(size, int) and size > 0 for role, size in dim)

    return (
        isinstance(entry, tuple | list)
        and len(entry) == dimensions
        and all(isinstance(dim, str) or fused(dim) for dim in entry)
    )


def _forward_problems(model: nn.Module) -> Iterator[str]:
    parameters = list(signature(model.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is Parameter.empty]
    open_ended = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    if (len(positional) < 3 and not open_ended) or len(required) > 3:
        yield f"its forward takes ({', '.join(p.name for p in parameters)}), but is called as {_FORWARD}."
