"""The schema says what the dataclasses say, and what the loader does."""

import json
import re
from dataclasses import MISSING, fields
from typing import Any

import pytest

from phalanx.spec.keys import KEYS, TABLES
from phalanx.spec.load import loads
from phalanx.spec.model import PRESETS
from phalanx.spec.plan import Gpu
from phalanx.spec.run import Run
from phalanx.spec.schema import documented_fields, schema

REQUIRED = {"model.rope_scaling": ["factor"], "model.mla": ["kv_rank"], "model.moe": ["experts", "active", "ffn"]}
TYPES = {"boolean": bool, "integer": int, "number": float, "string": str}


def table_of(path: str) -> dict[str, Any]:
    node = schema()
    for name in path.split("."):
        node = node["additionalProperties"] if name == "*" else node["properties"][name]
        node = node["anyOf"][1] if path.startswith("model") and "anyOf" in node else node
    return node


@pytest.mark.parametrize("cls", TABLES.values(), ids=lambda cls: cls.__name__)
def test_every_field_has_a_docstring(cls: type) -> None:
    described = documented_fields(cls)
    assert list(described) == [field.name for field in fields(cls)]
    assert all(described.values())


def test_only_what_stands_under_a_field_describes_it() -> None:
    assert documented_fields(Gpu) == {"memory": "Bytes."}


def test_top_level() -> None:
    top = schema()
    assert top["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert top["additionalProperties"] is False
    assert set(top["properties"]) == {"$schema", *(field.name for field in fields(Run))}
    assert json.loads(json.dumps(top, allow_nan=False)) == top


@pytest.mark.parametrize("path", TABLES)
def test_table(path: str) -> None:
    table = table_of(path)
    assert table["type"] == "object"
    assert table["description"]
    assert table["additionalProperties"] is False
    expected = {
        field.name.removesuffix("_")
        for field in fields(TABLES[path])
        if not {"named_by_table", "not_a_key"} & set(field.metadata)
    }
    assert set(table["properties"]) == expected
    assert table.get("required", []) == REQUIRED.get(path, [])


@pytest.mark.parametrize("path", KEYS)
def test_key(path: str) -> None:
    key = KEYS[path]
    node = table_of(key.table)["properties"][key.name]
    one = node["anyOf"][0] if key.many else node
    if key.many:
        assert node["anyOf"][1] == {"type": "array", "items": one}
    assert TYPES[one["type"]] is key.kind
    assert node["description"].startswith(documented_fields(TABLES[key.table])[key.attribute])
    assert one.get("minimum") == key.metadata.get("low")
    assert one.get("maximum") == key.metadata.get("high")
    assert one.get("exclusiveMinimum") == key.metadata.get("above")
    if key.choices:
        assert one["enum"] == list(key.choices)
    if key.default in (None, MISSING):
        assert "default" not in node
    else:
        assert node["default"] == (list(key.default) if key.many else key.default)


def test_tables_that_the_person_names() -> None:
    mix, options = (
        table_of(path.rpartition(".")[0])["properties"][path.rpartition(".")[2]] for path in ("data.mix", "model.options")
    )
    for table in (mix, options):
        assert table["type"] == "object" and table["description"]
        assert re.search(table["propertyNames"]["pattern"], "my-source_2")
        assert not re.search(table["propertyNames"]["pattern"], "my.source")
    assert "weight" in mix["additionalProperties"]["properties"] and "name" not in mix["additionalProperties"]["properties"]
    assert mix["additionalProperties"]["additionalProperties"] is False
    assert options["additionalProperties"] == {"type": ["string", "number", "boolean"]}


def test_a_model_is_a_preset_or_a_table() -> None:
    preset, table = schema()["properties"]["model"]["anyOf"]
    assert preset["enum"] == table["properties"]["preset"]["enum"] == sorted(PRESETS)


def test_an_editors_pointer_is_part_of_a_run_file() -> None:
    assert loads("#:schema run.schema.json\n[train]\nbatch = 1\nsteps = 1\n").steps == 1
