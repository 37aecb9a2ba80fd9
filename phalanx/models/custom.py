"""A custom model, `[model] module = "package.module:Class"`: imports it, builds it on the meta device and checks that it can be
trained like the built-in decoder. `models/init` and `training/build` call it.

The class is called with the ModelSpec; `forward(tokens_BS, positions_BS, documents_BS=None)` returns logits [B, S, V]. Its Python
module holds AXES (parameter-name pattern to dimension names) and optionally INITIAL (pattern to "ones", "zeros", "normal" or
"residual").
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from phalanx.models import decoder
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

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
    problems = [f"model.module = {module!r}: {problem}" for problem in _problems(model, _import(module))]
    if problems:
        raise RunError(problems)
    return model


def axes(module: str | None) -> Mapping[str, tuple[str, ...]]:
    """The table of dimension names of `model.module`; None: of the built-in decoder."""
    return decoder.AXES if module is None else _import(module).AXES


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
    table = getattr(python_module, "AXES", None)
    if not isinstance(table, Mapping):
        yield (
            f"{python_module.__name__} has no table AXES; add one next to the class, such as "
            'AXES = {"embed.weight": ("vocab", "model"), "*.bias": ("model",)}.'
        )
    else:
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
    """Whether an entry of AXES has one name per dimension."""
    return isinstance(entry, tuple | list) and len(entry) == dimensions and all(isinstance(word, str) for word in entry)


def _forward_problems(model: nn.Module) -> Iterator[str]:
    parameters = list(signature(model.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is Parameter.empty]
    open_ended = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    if (len(positional) < 3 and not open_ended) or len(required) > 3:
        yield f"its forward takes ({', '.join(p.name for p in parameters)}), but is called as {_FORWARD}."
