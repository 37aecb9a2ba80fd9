"""Every table and key that the run file accepts, read off the dataclasses once.
Load, check, dump, schema and identity all walk these two tables, so a new field needs no line anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from phalanx.spec.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the run file."""

    path: str
    """Dotted, such as "train.steps"."""
    kind: type
    """bool, int, float or str; of one element where the key takes a list."""
    many: bool
    """Whether it takes a list."""
    optional: bool
    """Whether None stands for "left out"."""
    choices: tuple[str, ...]
    """The only accepted strings; empty: any."""
    default: Any
    """MISSING where the key must be given."""
    metadata: Mapping[str, Any]
    """What `spec/fields` attached."""

    @property
    def table(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def of(self, run: Run) -> Any:
        """This key's value in a run; None where its table is left out."""
        value: Any = run
        for name in self.path.split("."):
            value = None if value is None else getattr(value, name)
        return value


def _key(path: str, hint: Any, optional: bool, default: Any, metadata: Mapping[str, Any]) -> Key:
    many = get_origin(hint) is tuple
    if many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = str if choices else hint
    assert kind in (bool, int, float, str), f"{path}: the run file has no way to write {hint}"
    return Key(path=path, kind=kind, many=many, optional=optional, choices=choices, default=default, metadata=metadata)


def _walk(cls: type, prefix: str, tables: dict[str, type], keys: dict[str, Key]) -> None:
    hints = get_type_hints(cls)
    for field in fields(cls):
        path, hint = prefix + field.name, hints[field.name]
        optional = NoneType in get_args(hint)
        if optional:
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        if is_dataclass(hint):
            assert isinstance(hint, type)
            tables[path] = hint
            _walk(hint, path + ".", tables, keys)
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            keys[path] = _key(path, hint, optional, default, field.metadata)


TABLES: dict[str, type] = {}
"""Dotted path of each table, such as "model.rope_scaling", to its dataclass; in the order of the run file."""
KEYS: dict[str, Key] = {}
"""Dotted path of each key; in the order of the run file."""
_walk(Run, "", TABLES, KEYS)


def keys_of(table: str) -> list[Key]:
    """The keys that stand directly in a table."""
    return [key for key in KEYS.values() if key.table == table]
