"""Writes docs/run-file.md from the dataclasses in phalanx/spec, so that it cannot drift; `make docs` runs it, a test compares."""

from __future__ import annotations

from pathlib import Path

from phalanx.spec.dump import toml
from phalanx.spec.keys import TABLES, Key, keys_of
from phalanx.spec.run import Run
from phalanx.spec.schema import documented_fields

HEAD = """# The run file

One TOML file describes a run. Every key may be left out unless said otherwise; any key can be set on the command line after the file:
`phalanx train run.toml train.steps=20 layout.data=2`. `model = "llama3-8b"` is short for `[model] preset = "llama3-8b"`.
`phalanx schema` prints the same as a JSON schema, with which editors complete and check.

A run needs `train.batch` or `train.batch_tokens`, and `train.steps` or `train.tokens`. An unknown key, a wrong value or an impossible
combination is an error before anything starts. Keys marked *not built yet* are known and refused by name.

This file is made by `make docs`.
"""


def text() -> str:
    parts = [HEAD]
    for table, cls in TABLES.items():
        above, _, name = table.rpartition(".")
        about = documented_fields(TABLES[above] if above else Run)[name]
        parts.append(f"\n## `[{table}]`\n\n{about}\n\n| key | takes | default | |\n|---|---|---|---|\n")
        described = documented_fields(cls)
        parts += [_row(key, described[key.name]) for key in keys_of(table)]
    return "".join(parts)


def _row(key: Key, about: str) -> str:
    takes = (
        " ".join(f"`{choice}`" for choice in key.choices)
        or {bool: "true, false", int: "integer", float: "number", str: "text"}[key.kind]
    )
    takes = f"list of {takes}" if key.many else takes
    default = "" if key.default is None or not isinstance(key.default, bool | int | float | str) else f"`{toml(key.default)}`"
    later = key.metadata.get("later")
    values = key.metadata.get("later_values", {})
    note = " *Not built yet.*" if later else f" *Not built yet: {', '.join(values)}.*" if values else ""
    return f"| `{key.name}` | {takes} | {default} | {about}{note} |\n"


if __name__ == "__main__":
    Path(__file__).with_name("run-file.md").write_text(text())
