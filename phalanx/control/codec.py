"""Messages of the control plane (`control/protocol`) as tables for JSON, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, dataclass_transform

from phalanx.host.host_check import DeviceResult
from phalanx.host.host_report import HostReport
from phalanx.host.link_probe import LinkSpeed
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place, Plan, Promise


def _place(*, store: list[Any] | None, **fields: Any) -> Place:
    return Place(store=None if store is None else (store[0], store[1]), **fields)


def _host_report(**table: Any) -> HostReport:
    return HostReport.from_json(table)


MESSAGES: dict[str, Callable[..., Any]] = {
    "Layout": Layout,
    "Place": _place,
    "Plan": Plan,
    "Promise": Promise,
    **{"DeviceResult": DeviceResult, "LinkSpeed": LinkSpeed},
    **{"HostReport": _host_report, "Machine": dict, "Gpu": dict},  # a report makes its machine and GPUs from tables
}
"""Class name to its constructor, for `decode`: every message, and the values of other rooms inside them."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """Base class of messages, and of the values inside them: subclasses are frozen dataclasses that `decode` knows."""

    def __init_subclass__(cls) -> None:
        MESSAGES[cls.__name__] = dataclass(frozen=True, kw_only=True)(cls)


_PLAIN = frozenset({int, float, str, bool, type(None)})


_field_names: dict[type, tuple[str, ...]] = {}


def encode(value: Any) -> Any:
    """Convert a message, or a value inside one, to what JSON can represent."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if is_dataclass(kind):
        names = _field_names.get(kind) or _field_names.setdefault(kind, tuple(field.name for field in fields(kind)))
        return {"message": kind.__name__} | {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): encode(inner) for key, inner in value.items()}
    return [encode(inner) for inner in value] if isinstance(value, list | tuple) else value


def decode(value: Any) -> Any:
    """Undo `encode`. Tuples come back as lists, and keys as text."""
    if isinstance(value, dict):
        # No call for each number: there are thousands of messages a second, most of them heartbeats.
        table = {key: decode(inner) if isinstance(inner, dict | list) else inner for key, inner in value.items()}
        make = MESSAGES.get(table.get("message", ""))
        if make is None:
            return table
        del table["message"]
        return make(**table)
    if isinstance(value, list):
        return [decode(inner) if isinstance(inner, dict | list) else inner for inner in value]
    return value
