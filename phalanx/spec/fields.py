"""What a field of the run file carries besides its type, as metadata of the dataclass, and the names that keys and tensors had in earlier
versions. A person's old key is refused with its new name as the remedy; files that a run wrote itself are translated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RENAMED_KEYS = {
    "model.ahead": "model.mtp_depth",
    "model.ahead_weight": "model.mtp_loss_weight",
    "optimizer.local_steps": "optimizer.sync_every",
    "layout.cut": "layout.stage_split",
    "checkpoint.asynchronous": "checkpoint.async_save",
    "resilience.go_on": "resilience.continue_degraded",
    "resilience.notice": "resilience.preemption_notice",
    "resilience.rewind_after": "resilience.rollback_after",
}
"""Run-file keys: old dotted path to new."""

RENAMED_MODULES = {"places": "position_embed", "ahead": "mtp"}
"""Modules of the built-in decoder, which the names of its parameters begin with: old to new."""

ENVIRONMENT = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
"""Value of a secret key that names an environment variable."""
_MODULE = re.compile(r"((?:[^/]*/)?)([^./]*)")  # "model/", "optimizer/" or nothing; the outermost module
_OWN_MODULE = re.compile(r"(?m)^(module|config) = ")


NO_EFFECT = {"no_effect": True}
"""Metadata of a key of the tables that decide what a run computes, which itself does not: a run resumes with another value of it."""
CHANGEABLE = {"changeable": True}
"""Metadata of a key that decides what a run computes, which `phalanx train --change` may change in a run that it resumes."""
NOT_A_KEY = {"not_a_key": True}
"""Metadata of a field that the loader fills and no run file has."""
TRAINING_ONLY = {"training_only": True}
"""Metadata of a key of [model] that a run may set although it starts from a folder: no weight's shape or meaning depends on it."""

SECRET = {"secret": True}
"""Metadata of a key whose value no file, message or record shows, unless it only names an environment variable ("env:NAME")."""


def read_by(*kinds: str) -> dict[str, Any]:
    """Metadata of a key that only these kinds of source read."""
    return {"read_by": kinds}


def within(
    low: float | None = None, high: float | None = None, *, above: float | None = None, infinite: bool = False
) -> dict[str, Any]:
    """Metadata of a number's accepted range: low ≤ value ≤ high, or above < value; inf only where it has a meaning."""
    return {"low": low, "high": high, "above": above, "infinite": infinite}


def below(remedy: str) -> dict[str, Any]:
    """Metadata of a number below whose range people look for a setting that another key has; `remedy` names it, in the same table."""
    return {"below": remedy}


def is_hidden(metadata: Mapping[str, Any], value: Any) -> bool:
    """Whether the value of a key must not be shown."""
    return "secret" in metadata and value is not None and not (isinstance(value, str) and ENVIRONMENT.fullmatch(value))


def current_keys(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of one saved table under their current names."""
    return {RENAMED_KEYS.get(f"{table}.{name}", f"{table}.{name}").rpartition(".")[2]: value for name, value in values.items()}


def current_tensor(name: str) -> str:
    """The current name of a parameter or state of the built-in decoder, such as "model/mtp.0.join.weight"."""
    return _renamed(name, RENAMED_MODULES)


def original_tensor(name: str) -> str:
    """The name that a parameter or state of the built-in decoder had first."""
    return _renamed(name, {new: old for old, new in RENAMED_MODULES.items()})


def has_own_module(run_file: str) -> bool:
    """Whether a resolved run file sets `model.module` or `model.config`; the parameters of such models keep the names their authors gave them."""
    return _OWN_MODULE.search(run_file) is not None


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    match = _MODULE.match(name)
    assert match, name
    return f"{match[1]}{modules.get(match[2], match[2])}{name[match.end() :]}"
