"""Changes keys of a run file and keeps its comments, its order and everything else. Used by `phalanx plan --write` and `phalanx tune`."""

from __future__ import annotations

from collections.abc import Mapping

import tomlkit
from tomlkit.items import Table

from phalanx.spec.json_value import Json


def with_tables(text: str, tables: str) -> str:
    """The run file with the keys of `tables`, which is TOML too. A table that is there replaces the one of the file if it is [layout], whose
    keys mean something together only, and is merged into it otherwise."""
    document, changes = tomlkit.parse(text), tomlkit.parse(tables)
    for name, change in changes.items():
        known = document.get(name)
        if not isinstance(known, Table):
            document[name] = change
            continue
        if name == "layout":
            for key in [key for key in known if key not in change]:
                del known[key]
        for key, value in change.items():
            known[key] = value
    return tomlkit.dumps(document).rstrip("\n") + "\n"


def with_commented(text: str, tables: Mapping[str, Mapping[str, Json]], comments: Mapping[str, str]) -> str:
    """The run file with other values, by table and key, each with a comment on its line. A [layout] replaces the one of the file. `comments`:
    by dotted name; a table's own stands on the line of its header."""
    changes = tomlkit.document()
    for name, values in tables.items():
        table = tomlkit.table()
        if name in comments:
            table.comment(comments[name])
        for key, value in values.items():
            item = tomlkit.item(value)
            if (comment := comments.get(f"{name}.{key}")) is not None:
                item.comment(comment)
            table.append(key, item)
        changes.append(name, table)
    return with_tables(text, tomlkit.dumps(changes))
