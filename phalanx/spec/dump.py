"""A resolved run as TOML, and single values as TOML writes them. The run directory keeps the first beside the checkpoints;
every message about a value quotes the second."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from phalanx.spec.keys import KEYS, keys_in, tables_in
from phalanx.spec.presets import PRESETS
from phalanx.spec.run import Run

_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPED = re.compile(r'[\x00-\x1f"\\\x7f]')

HEADER = "# The resolved run: the run file with overrides applied and every default filled in.\n"
"""First line of every run file that Phalanx writes. Such files may have the keys of earlier versions."""


def dump(run: Run) -> str:
    """The complete run file of a run: `loads` reads it back to an equal Run."""
    blocks = [HEADER]
    nameless = not _expressible(run)
    for table in tables_in(run):
        lines = [
            f"{key.name} = {toml(value)}\n"
            for key in keys_in(run, table)
            if (value := key.of(run)) is not None and not (nameless and key.path == "model.preset")
        ]
        if lines:
            blocks.append(f"[{table}]\n" + "".join(lines))
    return "\n".join(blocks)


def _expressible(run: Run) -> bool:
    """Whether the preset's name may stand beside the sizes: TOML cannot take back what a preset sets and the run does not.

    Only a Run made in Python can be so; its sizes are kept, and the name, which no longer describes it, is left out.
    """
    preset = PRESETS.get(run.model.preset or "")
    if preset is None:
        return False
    of_preset = Run(model=preset)
    return all(key.of(run) is not None or key.of(of_preset) is None for path, key in KEYS.items() if path.startswith("model."))


def toml(value: Any) -> str:
    """A value as a run file would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 64:
        return hex(value)  # Python refuses to print integers of thousands of digits in decimal
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return '"' + _ESCAPED.sub(lambda m: _ESCAPES.get(m.group()) or f"\\u{ord(m.group()):04x}", value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + " }"
    return str(value)
