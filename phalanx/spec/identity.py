"""Which keys decide what is computed, as opposed to where, how fast and for how long.
A checkpoint is resumed only by a run of the same identity; whoever resumes asks here and tells the person what changed."""

from __future__ import annotations

from typing import Any

from phalanx.spec.keys import find_key, keys_in, tables_in
from phalanx.spec.run import Run
from phalanx.spec.sources import kind
from phalanx.spec.words import shown

_TABLES = ["model", "data", "train", "optimizer", "precision"]
_WITHOUT_EFFECT = {
    "model.preset",  # a name for the sizes, which are compared themselves
    "data.prefetch",
    "data.cache",
    "data.processes",
    "data.max_bad_records",
    "train.batch_tokens",  # another way to give train.batch
    "train.steps",
    "train.tokens",
    "train.micro_batch",
    "train.eval_every",
    "train.eval_sequences",
}


def identity(run: Run) -> dict[str, Any]:
    """The deciding keys of a run, dotted, with what they stand for where they are left out."""
    model = run.model
    keys = [key for table in tables_in(run) if table.split(".")[0] in _TABLES for key in keys_in(run, table)]
    said = {key.path: key.of(run) for key in keys if key.path not in _WITHOUT_EFFECT}
    meant = {"model.kv_heads": model.kv, "model.head_dim": model.head, "model.ffn": model.hidden, "train.batch": run.batch}
    if run.data.mix:  # which source a sample comes from depends on their order
        return said | meant | {"data.mix": [source.name for source in run.data.mix]}
    return said | meant | {"data.source": kind(run.data)}


def changed(a: Run, b: Run) -> list[str]:
    """Deciding keys that differ between two runs, such as "train.seed: 0 → 1"."""
    before, after = identity(a), identity(b)
    return [
        f"{path}: {_text(before.get(path))} → {_text(after.get(path))}"
        for path in sorted(before | after, key=lambda path: _TABLES.index(path.split(".")[0]))
        if _differs(path, before, after)
    ]


def _differs(path: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    if path in before and path in after:
        return bool(before[path] != after[path])
    # A table that only one of the two has is told by what it sets, not by its defaults.
    key = find_key(path)
    return key is None or (before | after)[path] != key.default


def _text(value: Any) -> str:
    return "unset" if value is None else shown(value)
