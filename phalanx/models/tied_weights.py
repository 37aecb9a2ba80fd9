"""Tied weights: a parameter that a module holds under two names becomes one parameter under one name, whatever replaces it later (allocation,
FSDP2, a cut)."""

from __future__ import annotations

from typing import Any

from torch import nn


def untie_names(model: nn.Module) -> None:
    """Leaves every parameter under the first of its names; at the others, an attribute reads it there."""
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        source = first.setdefault(id(parameter), name)
        if _holder(model, source) != _holder(model, name):  # else one module has two names
            borrow(model, name, source)


def _holder(model: nn.Module, name: str) -> tuple[int, str]:
    path, _, leaf = name.rpartition(".")
    return id(model.get_submodule(path)), leaf


def borrow(model: nn.Module, target: str, source: str) -> None:
    """Makes the parameter `target` an attribute that reads `source`."""
    (path, name), (lender, attribute) = (full.rpartition(".")[::2] for full in (target, source))
    module: Any = model.get_submodule(path)
    del module._parameters[name]
    module.__dict__["lenders"] = {**module.__dict__.get("lenders", {}), name: (model.get_submodule(lender), attribute)}
    kind = type(module)
    read = property(lambda self: getattr(*self.__dict__["lenders"][name]))
    module.__class__ = type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, name: read}
    )
