"""The types of values that come from or go to JSON or TOML and whose keys another program defines: a Hugging Face config, a JSON schema, a
message between processes, an entry of the catalogue. Every room may use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""Any JSON value. A reader narrows it with isinstance (list, dict); a writer may give any sequence or mapping."""
JsonObject: TypeAlias = dict[str, Json]
"""A JSON object, as json.loads returns it."""
