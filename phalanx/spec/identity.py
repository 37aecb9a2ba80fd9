"""Which keys decide what is computed, as opposed to where, how fast and for how long.
A checkpoint is resumed only by a run of the same identity; whoever resumes asks here and tells the person what changed."""

from __future__ import annotations

from typing import Any

from phalanx.spec.keys import KEYS
from phalanx.spec.run import Run
from phalanx.spec.words import shown

_TABLES = {"model", "data", "train", "optimizer", "precision"}
_WITHOUT_EFFECT = {
    "model.preset",  # a name for the sizes, which are compared themselves
    "data.prefetch",
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
    said = {path: key.of(run) for path, key in KEYS.items() if path.split(".")[0] in _TABLES and path not in _WITHOUT_EFFECT}
    meant = {"model.kv_heads": model.kv, "model.head_dim": model.head, "model.ffn": model.hidden, "train.batch": run.batch}
    return said | meant


def changed(a: Run, b: Run) -> list[str]:
    """Deciding keys that differ between two runs, such as "train.seed: 0 → 1"."""
    before, after = identity(a), identity(b)
    return [f"{path}: {_text(before[path])} → {_text(after[path])}" for path in before if before[path] != after[path]]


def _text(value: Any) -> str:
    return "unset" if value is None else shown(value)
