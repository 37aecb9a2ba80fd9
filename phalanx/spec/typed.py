"""One value against one key: its type, its choices, its range, and whether its capability is built.
Called by `spec/load` for what the file says and by `spec/check` for runs made in Python."""

from __future__ import annotations

import math
import re
from typing import Any

from phalanx.spec.dump import toml
from phalanx.spec.keys import PLAIN, Key
from phalanx.spec.nearest import did_you_mean
from phalanx.spec.words import either, noun, shown

_WANTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    PLAIN: "a plain value (a string, a number, true or false)",
}
_ACCEPTED: dict[type, tuple[type, ...]] = {float: (int, float), PLAIN: (bool, int, float, str)}
_NUMBERS = {int: re.compile(r"[+-]?\d+"), float: re.compile(r"[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|inf)")}


class Wrong(ValueError):
    """A value that its key does not accept; the text is the sentence without its place."""


def read(key: Key, value: Any, bare: str | None = None) -> Any:
    """The value as the dataclass holds it, or `Wrong`; `bare` is how the command line spelled it, for keys that want text."""
    if bare is not None and key.kind is str and not key.choices:
        value = bare
    if not key.many:
        return _one(key, key.path, value)
    if not isinstance(value, list | tuple):
        return (_one(key, key.path, value),)
    return tuple(_one(key, f"{key.path}[{i}]", item) for i, item in enumerate(value))


def refusal(key: Key, value: Any) -> str | None:
    """The sentence that refuses a value whose capability is not built yet, if it is one."""
    capability = key.metadata.get("later")
    if capability is not None and value != key.default:
        remedy = "remove it" if key.default is None else f"remove it or set it to {toml(key.default)}"
        return f"{key.path} = {shown(value)} asks for {capability}, which is not built yet: {remedy}."
    return None


def _one(key: Key, path: str, value: Any) -> Any:
    accepted = _ACCEPTED.get(key.kind, (key.kind,))
    if type(value) not in accepted:  # not isinstance: true is no integer here
        wanted = either(map(toml, key.choices)) if key.choices else _WANTED[key.kind]
        raise Wrong(f"{path} = {shown(value)} is {noun(value)}, but {wanted} is wanted{_hint(key, value)}.")
    if type(value) is str:
        _check_text(key, path, value)
        return value
    if type(value) is bool:
        return value
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise Wrong(f"{path} = {shown(value)} is out of range: an integer must fit into 64 bits.")
    if key.kind is PLAIN:
        if value != value:  # nothing equals it, so that no run would equal itself
            raise Wrong(f"{path} = nan is not a number: leave it out.")
        return value
    value = key.kind(value)
    _check_range(key, path, value)
    return value


def _check_text(key: Key, path: str, value: str) -> None:
    if key.choices and value not in key.choices:
        guess = did_you_mean([toml(choice) for choice in key.choices], toml(value))
        raise Wrong(f"{path} = {shown(value)} is unknown: it must be {either(map(toml, key.choices))}{guess or '.'}")
    if any("\ud800" <= char <= "\udfff" for char in value):  # undecodable bytes of a command line; no TOML can hold them
        raise Wrong(f"{path} = {value!a} is not valid Unicode: rename the file or quote the text as UTF-8.")


def _check_range(key: Key, path: str, value: float) -> None:
    low, high, above = (key.metadata.get(limit) for limit in ("low", "high", "above"))
    fits = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    finite = math.isfinite(value) or (value > 0 and key.metadata.get("infinite", False))
    if fits and finite:
        return
    rules = []
    if low is not None and high is not None:
        rules.append(f"between {low} and {high}")
    elif low is not None:
        rules.append(f"at least {low}")
    elif above is not None:
        rules.append(f"greater than {above}")
    if not finite:
        rules.append("finite")
    raise Wrong(f"{path} = {shown(value)} is out of range: it must be {' and '.join(rules)}.")


def _hint(key: Key, value: Any) -> str:
    """What to write instead, where that is plain."""
    spelled = value.strip().lower() if isinstance(value, str) else ""
    if key.kind in _NUMBERS and len(spelled) < 20 and _NUMBERS[key.kind].fullmatch(spelled):
        return f": write {spelled} without quotes"
    if key.kind is bool and (spelled in ("true", "false") or value in (0, 1)):
        return f": write {spelled or toml(bool(value))}"
    if key.kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f": write {int(value)}"
    if key.kind is str and not key.choices and isinstance(value, bool | int | float):
        return f": write it in quotes, {toml(toml(value))}"
    return ""
