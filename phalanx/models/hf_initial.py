"""Initial values of the models of transformers: what its own initialization does to each parameter, seen while it runs on parameters without
memory. So rules follow the library: scaled residual projections, norms that start at zero, wider embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

UNKNOWN = "unknown"
"""Rule of a parameter with initial values that are no constant and no random numbers, such as the decay rates of a state-space layer."""
_SMALL = 1 << 16  # values that are looked at, to find out whether they are all the same


class InitialValues(TorchDispatchMode):
    """Records the last thing that happens to each tensor on the meta device. Random numbers are not drawn there: the first such operation on that
    device imports seconds of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, tuple[Tensor, str]] = {}  # holds the tensor, so that no other one has its id

    def copied(self, target: Tensor, source: Tensor) -> None:
        """A parameter begins with the values of another tensor."""
        rule = UNKNOWN
        if not source.is_meta and 0 < source.numel() <= _SMALL:
            with torch.utils._python_dispatch._disable_current_modes():
                first = source.detach().flatten()[0].item()
                rule = constant(first) if bool((source == first).all()) else UNKNOWN
        self._last[id(target)] = (target, rule)

    def table(self, model: nn.Module) -> dict[str, str]:
        """Name to rule, as in `models/init`."""
        rules = {id(tensor): rule for tensor, rule in self._last.values()}
        return {name: rules.get(id(parameter), UNKNOWN) for name, parameter in model.named_parameters()}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        target, options = args[0] if args else None, dict(kwargs or {})
        if not isinstance(target, Tensor) or not target.is_meta or not str(function.overloadpacket).endswith("_"):
            return function(*args, **options)
        name = str(function.overloadpacket).removeprefix("aten.")
        rule = self._rule(name, target, args[1:], options)
        if rule is not None:
            self._last[id(target)] = (target, rule)
            return target
        return function(*args, **options)

    def _rule(self, name: str, target: Tensor, values: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """The rule that an operation in place sets; None: it is none that initializes."""
        match name:
            case "zero_":
                return "zeros"
            case "fill_":
                return constant(float(values[0])) if not isinstance(values[0], Tensor) else UNKNOWN
            case "normal_":
                mean, std = _given(values, options, mean=0.0, std=1.0)
                return normal(std) if mean == 0 else UNKNOWN
            case "uniform_":
                low, high = _given(values, options, **{"from": 0.0, "to": 1.0})
                return normal((high - low) / math.sqrt(12))
            case "mul_" if self._last.get(id(target), (None, ""))[1] == _TRUNCATED:
                return normal(float(values[0]) / math.sqrt(2))
            case "erfinv_":
                return _TRUNCATED  # a truncated normal distribution is made from a uniform one; what follows sets its deviation
            case "add_" | "clamp_":
                return self._last.get(id(target), (None, UNKNOWN))[1]
            case "copy_":
                self.copied(target, values[0])
                return self._last[id(target)][1]
        return None


_TRUNCATED = "truncated"


def normal(std: float) -> str:
    return f"normal:{std!r}" if std else "zeros"


def constant(value: float) -> str:
    return {0.0: "zeros", 1.0: "ones"}.get(value, f"constant:{value!r}")


def _given(values: tuple[Any, ...], options: Mapping[str, Any], **defaults: float) -> tuple[float, ...]:
    named = dict(zip(defaults, values, strict=False)) | {key: options[key] for key in defaults if key in options}
    return tuple(float(named.get(key, default)) for key, default in defaults.items())


def number_of(rule: str) -> float | None:
    """The number behind a rule, such as the 0.02 of "normal:0.02"."""
    _, colon, number = rule.partition(":")
    return float(number) if colon else None
