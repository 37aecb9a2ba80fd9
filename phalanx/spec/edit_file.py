"""Changes keys of a run file and keeps its comments, its order and everything else. Used by `phalanx plan --write`."""

from __future__ import annotations

import tomlkit
from tomlkit.items import Table


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
