"""Writes docs/run-file.md from the dataclasses in phalanx/spec, so that it cannot drift; `make docs` runs it, a test compares."""

from __future__ import annotations

from dataclasses import MISSING
from pathlib import Path

from phalanx.spec.errors import toml
from phalanx.spec.keys import FREE, TABLES, Key, keys_of
from phalanx.spec.schema import about, documented_fields

HEAD = """# The run file

One TOML file describes a run. Every key may be left out unless said otherwise; any key can be set on the command line after the file:
`phalanx train run.toml train.steps=20 layout.data=2`. `model = "llama3-8b"` is short for `[model] preset = "llama3-8b"`.
`phalanx schema` prints the same as a JSON schema, with which editors complete and check.

A run needs `train.batch` or `train.batch_tokens`, and `train.steps` or `train.tokens`. An unknown key, a wrong value or an impossible
combination is an error before anything starts. Keys marked *not built yet* are known and refused by name.

This file is made by `make docs`.
"""

NOTES = {
    "model": """

```toml
[model]
from = "weights/llama3.2-1b"   # sizes and tokenizer come from the folder; sizes that differ from it are refused
```

A run that starts from a folder may still set what only concerns training: `mtp_depth`, `mtp_loss_weight`, `init_std`,
`moe.bias_rate`, `moe.balance_loss`, and `context` where positions are rotary. A run file that gives all sizes itself, as the
one in a run directory does, can be read after the folder is gone.""",
    "model.options": """ Names are made of letters, digits, `_` and `-`; values are text, numbers, true or false.

```toml
[model]
module = "mypackage.mymodel:MyModel"

[model.options]
window = 256
gate = "tanh"
```""",
    "model.mla": " Heads then have the widths given here: `kv_heads`, `head_dim`, `qk_norm` and `bias` are left out.",
    "model.moe": ' Experts are gated (`activation = "swiglu"`) and have no biases.',
    "data": " One source is described here; several stand in `[data.mix.NAME]` tables instead.",
    "data.mix.*": """ NAME is yours, of letters, digits, `_` and `-`; it names the source in
evaluations and messages, and in overrides such as `data.mix.wiki.weight=0.3`. Weights are given for all sources or for none.

```toml
[data]
tokenizer = "tokenizer.json"

[data.mix.wiki]
paths = ["wiki/*.jsonl.zst"]
field = "text"
weight = 0.7

[data.mix.code]
paths = ["code.parquet"]
field = "content"
weight = 0.3
epochs = 2
```""",
}
"""What a table's own docstring has no room for."""


def text() -> str:
    return HEAD + "".join(_section(table) + "".join(map(_free_section, _free_tables(table))) for table in TABLES)


def _section(table: str) -> str:
    described, above = documented_fields(TABLES[table]), _keys_above(table)
    rows = "".join(_row(key, described[key.attribute]) for key in keys_of(table) if f"`{key.name}`" not in above)
    if above:
        rows += f"\nIt also takes the keys that describe a source in `[{table.partition('.')[0]}]`: {above}.\n"
    shown = table.replace("*", "NAME")
    return f"\n## `[{shown}]`\n\n{about(table)}{NOTES.get(table, '')}\n\n| key | takes | default | |\n|---|---|---|---|\n{rows}"


def _keys_above(table: str) -> str:
    """Keys of a named table that its top table has too, as a list in words; they are described there."""
    if not table.endswith(".*"):
        return ""
    there = {key.name for key in keys_of(table.partition(".")[0])}
    return ", ".join(f"`{key.name}`" for key in keys_of(table) if key.name in there)


def _free_tables(table: str) -> list[str]:
    return [free for free in FREE if free.rpartition(".")[0] == table]


def _free_section(table: str) -> str:
    return f"\n## `[{table}]`\n\n{about(table)}{NOTES.get(table, '')}\n"


def _row(key: Key, about: str) -> str:
    takes = (
        " ".join(f"`{choice}`" for choice in key.choices)
        or {bool: "true, false", int: "integer", float: "number", str: "text"}[key.kind]
    )
    takes = f"list of {takes}" if key.many else takes
    plain = isinstance(key.default, bool | int | float | str)
    default = "*required*" if key.default is MISSING else f"`{toml(key.default)}`" if plain else ""
    note = " *Not built yet.*" if key.metadata.get("later") else ""
    return f"| `{key.name}` | {takes} | {default} | {about}{note} |\n"


if __name__ == "__main__":
    Path(__file__).with_name("run-file.md").write_text(text())
