"""The run file as a JSON schema, built from the dataclasses, for editors that complete and check TOML. `phalanx schema` prints it;
docs/make_run_file.py reads the field docstrings through it."""

from __future__ import annotations

from dataclasses import MISSING, is_dataclass
from functools import cache

from phalanx.spec.json_value import JsonObject
from phalanx.spec.keys import BARE, FREE, NAMED, TABLES, Key, keys_of
from phalanx.spec.model import PRESETS
from phalanx.spec.run import Run

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema() -> JsonObject:
    """JSON schema (draft 2020-12) of the run file, with what draft 7 has too and without references: TOML editors support little more."""
    tables = {table: _table(table) for table in TABLES if "." not in table}
    names = {"type": "string", "enum": sorted(PRESETS), "description": "A preset without changes."}
    tables["model"] = {"description": tables["model"]["description"], "anyOf": [names, tables["model"]]}
    pointer_key: JsonObject = {
        "type": "string",
        "description": "Location of this schema, for editors; it has no effect on the run.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Phalanx run file",
        "description": Run.__doc__,
        "type": "object",
        "properties": {"$schema": pointer_key} | tables,
        "additionalProperties": False,
    }


@cache
def documented_fields(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, which Python itself discards; inherited fields first."""
    import ast  # slow to import, and only schemas and tests come here
    import inspect
    import textwrap

    documented = {}
    for part in reversed([part for part in cls.__mro__ if is_dataclass(part)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    documented[name] = " ".join(text.split())
    return documented


def about(table: str) -> str:
    """The description of a table: the docstring of its class, or of the field for tables that only hold what the person names."""
    if table in TABLES:
        return " ".join((TABLES[table].__doc__ or "").split())
    above, _, name = table.rpartition(".")
    return documented_fields(TABLES[above])[name]


def _table(table: str) -> JsonObject:
    described, required = documented_fields(TABLES[table]), [key.name for key in keys_of(table) if key.default is MISSING]
    properties = {key.name: _key(key, described[key.attribute]) for key in keys_of(table)}
    plain: JsonObject = {"type": ["string", "number", "boolean"]}
    inner = {path: _table(path) for path in TABLES if path.rpartition(".")[0] == table}
    inner |= {path: _person_named(path, _table(f"{path}.*")) for path in NAMED if path.rpartition(".")[0] == table}
    inner |= {path: _person_named(path, plain) for path in FREE if path.rpartition(".")[0] == table}
    result: JsonObject = {
        "type": "object",
        "description": about(table),
        "properties": properties | {path.rpartition(".")[2]: value for path, value in inner.items()},
        "additionalProperties": False,
    }
    return result | {"required": required} if required else result


def _person_named(table: str, entry: JsonObject) -> JsonObject:
    """A table whose entries have names that the person chooses."""
    return {
        "type": "object",
        "description": about(table),
        "propertyNames": {"pattern": f"^{BARE.pattern}$"},
        "additionalProperties": entry,
    }


def _key(key: Key, description: str) -> JsonObject:
    element: JsonObject = {"type": _TYPES[key.kind]}
    if key.choices:
        element["enum"] = list(key.choices)
    if key.path == "model.preset":
        element["enum"] = sorted(PRESETS)
    for keyword, limit in (("minimum", "low"), ("maximum", "high"), ("exclusiveMinimum", "above")):
        if key.metadata.get(limit) is not None:
            element[keyword] = key.metadata[limit]
    result: JsonObject = {"anyOf": [element, {"type": "array", "items": element}]} if key.many else element
    if key.default is not MISSING and key.default is not None:
        result["default"] = list(key.default) if key.many else key.default
    return result | {"description": description}
