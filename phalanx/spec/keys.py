"""Every table and key that the run file accepts, read off the dataclasses once.
Load, check, dump, schema and identity all walk these tables, so a new field needs no line anywhere else.

Tables that the person names are patterns here: `data.mix.*.weight` is the key `data.mix.wiki.weight` of a run that has a
`[data.mix.wiki]`. Functions take and give such concrete paths; only TABLES and KEYS themselves hold patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from keyword import iskeyword
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from phalanx.spec.run import Run

PLAIN = object
"""`Key.kind` of a key in a free table, which takes a string, an integer, a float or a boolean."""
BARE = re.compile(r"[A-Za-z0-9_-]+")
"""What names a person may give: those that TOML writes without quotes, so that they can stand in a dotted override too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the run file."""

    path: str
    """Dotted, such as "train.steps"."""
    kind: type
    """bool, int, float or str, or PLAIN; of one element where the key takes a list."""
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

    @property
    def attribute(self) -> str:
        """The dataclass's field: its name, with an underscore where Python keeps the word for itself."""
        return _attribute(self.name)

    def of(self, run: Run) -> Any:
        """This key's value in a run; None where its table is left out."""
        value: Any = run
        for name in self.path.split("."):
            if value is None:
                return None
            if not isinstance(value, tuple):
                value = getattr(value, _attribute(name))
            elif self.kind is PLAIN:
                value = dict(value).get(name)
            else:
                value = next((entry for entry in value if entry.name == name), None)
        return value


def _attribute(name: str) -> str:
    return f"{name}_" if iskeyword(name) else name


def _key(path: str, hint: Any, optional: bool, default: Any, metadata: Mapping[str, Any]) -> Key:
    many = get_origin(hint) is tuple
    if many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind = str if choices else hint
    assert kind in (bool, int, float, str), f"{path}: the run file has no way to write {hint}"
    return Key(path=path, kind=kind, many=many, optional=optional, choices=choices, default=default, metadata=metadata)


def _walk(cls: type, prefix: str) -> None:
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.metadata.get("named_by_table"):
            continue
        path, hint = prefix + field.name.removesuffix("_"), hints[field.name]
        optional = NoneType in get_args(hint)
        if optional:
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        element = get_args(hint)[0] if get_origin(hint) is tuple else None
        if get_origin(element) is tuple:  # pairs of a name and a plain value
            FREE[path] = cls
        elif is_dataclass(element):
            assert isinstance(element, type)
            NAMED[path] = cls
            TABLES[f"{path}.*"] = element
            _walk(element, f"{path}.*.")
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            TABLES[path] = hint
            if optional:
                OPTIONAL.append(path)
            _walk(hint, path + ".")
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            KEYS[path] = _key(path, hint, optional, default, field.metadata)


TABLES: dict[str, type] = {}
"""Dotted path of each table, such as "model.moe" or "data.mix.*", to its dataclass; in the order of the run file."""
KEYS: dict[str, Key] = {}
"""Dotted path of each key; in the order of the run file."""
NAMED: dict[str, type] = {}
"""Tables that hold tables which the person names, such as "data.mix", to the dataclass that they are a field of."""
FREE: dict[str, type] = {}
"""Tables of plain values under any name, such as "model.options", to the dataclass that they are a field of."""
OPTIONAL: list[str] = []
"""Tables whose absence means something, such as "model.moe": their keys are set together or not at all."""
_walk(Run, "")
_BY_TABLE = {table: [key for key in KEYS.values() if key.table == table] for table in TABLES}


def pattern(path: str) -> str:
    """A concrete path as TABLES and KEYS have it."""
    for named in NAMED:
        if path.startswith(f"{named}."):
            _, dot, rest = path[len(named) + 1 :].partition(".")
            return f"{named}.*{dot}{rest}"
    return path


def find_key(path: str) -> Key | None:
    """The key that a concrete path names, if there is one."""
    if path.rpartition(".")[0] in FREE:
        return Key(path=path, kind=PLAIN, many=False, optional=False, choices=(), default=MISSING, metadata={})
    key = KEYS.get(pattern(path))
    return key if key is None or key.path == path else replace(key, path=path)


def is_table(path: str) -> bool:
    """Whether a concrete path is a table's; those that hold named or free ones count."""
    return pattern(path) in TABLES or path in NAMED or path in FREE


def keys_of(table: str) -> list[Key]:
    """The keys that stand directly in a table; those of a free table are only known from a run."""
    found = _BY_TABLE.get(pattern(table), [])
    return list(found) if pattern(table) == table else [replace(key, path=f"{table}.{key.name}") for key in found]


def tables_in(run: Run) -> list[str]:
    """The tables that a run has something in, in the order of the run file."""
    tables = [table for table in TABLES if table not in OPTIONAL or _value(run, table) is not None]
    for named in NAMED:
        at = tables.index(f"{named}.*")
        tables[at : at + 1] = [f"{named}.{entry.name}" for entry in _value(run, named)]
    for free in FREE:
        if _value(run, free):
            tables.insert(tables.index(free.rpartition(".")[0]) + 1, free)
    return tables


def keys_in(run: Run, table: str) -> list[Key]:
    """The keys of one of a run's tables."""
    if table not in FREE:
        return keys_of(table)
    return [key for name, _ in _value(run, table) if (key := find_key(f"{table}.{name}"))]


def _value(run: Run, path: str) -> Any:
    value: Any = run
    for name in path.split("."):
        value = None if value is None else getattr(value, _attribute(name))
    return value
