"""A resolved run as TOML, and the keys that decide what it computes. The run directory and every checkpoint carry the TOML; a
checkpoint is resumed only by a run of the same identity, or by one that differs in what `--change` may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.spec.errors import quote, toml
from phalanx.spec.fields import is_hidden
from phalanx.spec.keys import KEYS, find_key, keys_in, tables_in
from phalanx.spec.model import PRESETS
from phalanx.spec.run import Run
from phalanx.spec.sources import kind

HEADER = "# The resolved run: the run file with overrides applied and every default filled in.\n"
"""First line of every run file that Phalanx writes. Such files may have the keys of earlier versions."""

_RECORDED = ("train.eval_every", "train.eval_sequences")
"""Keys without an effect on the weights whose change a resumed run records, besides the number of steps."""
_DECIDING_TABLES = ["model", "data", "train", "optimizer", "lora", "dpo", "precision"]


def dump(run: Run) -> str:
    """The complete run file of a run: `loads` reads it back to an equal Run, but for secrets, which it does not have."""
    blocks = [HEADER]
    omit_preset = not _preset_is_expressible(run)
    for table in tables_in(run):
        lines = [
            f"# {key.name} is set; it is a secret, and not written here\n"
            if is_hidden(key.metadata, value)
            else f"{key.name} = {toml(value)}\n"
            for key in keys_in(run, table)
            if (value := key.of(run)) is not None and not (omit_preset and key.path == "model.preset")
        ]
        if lines:
            blocks.append(f"[{table}]\n" + "".join(lines))
    return "\n".join(blocks)


def written_secrets(run: Run, what: str) -> list[str]:
    """Why a run cannot be started by way of a file, which `what` needs: no file that Phalanx writes has a secret."""
    keys = [key for table in tables_in(run) for key in keys_in(run, table) if is_hidden(key.metadata, key.of(run))]
    return [
        f'{key.path} is a secret, and {what} passes the run on in a file: set it to "env:NAME", and the variable NAME in the environment of '
        "the hosts."
        for key in keys
    ]


def _preset_is_expressible(run: Run) -> bool:
    """Whether the preset's name may stand next to the sizes. TOML cannot unset a key that the preset sets and the run does not;
    only a Run made in Python has such a key, and the name no longer describes it."""
    preset = PRESETS.get(run.model.preset or "")
    if preset is None:
        return False
    of_preset = Run(model=preset)
    return all(key.of(run) is not None or key.of(of_preset) is None for path, key in KEYS.items() if path.startswith("model."))


def identity(run: Run) -> dict[str, Any]:
    """The keys that decide what a run computes, as opposed to where, how fast and for how long; defaults are filled in."""
    if run.command.program is not None:
        return {"command.program": run.command.program}
    keys = [key for table in tables_in(run) if table.split(".")[0] in _DECIDING_TABLES for key in keys_in(run, table)]
    values = {key.path: key.of(run) for key in keys if "no_effect" not in key.metadata}
    values |= {**run.model.computed_defaults, "train.batch": run.batch}
    if run.data.mix:  # which source a sample comes from depends on their order
        return values | {"data.mix": [source.name for source in run.data.mix]}
    return values | {"data.source": kind(run.data)}


@dataclass(frozen=True, slots=True)
class Change:
    """A key that differs between two runs."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.before)} → {shown(self.after)}"

    @property
    def allowed(self) -> bool:
        """Whether `phalanx train --change` accepts it: of learning rate and other hyperparameters, and of the data."""
        key = find_key(self.path)
        return self.path == "data.mix" or (key is not None and "changeable" in key.metadata)


def changes(a: Run, b: Run) -> list[Change]:
    """Deciding keys that differ between two runs."""
    before, after = identity(a), identity(b)
    return [
        Change(path, before.get(path), after.get(path))
        for path in sorted(before | after, key=lambda path: [*_DECIDING_TABLES, "command"].index(path.split(".")[0]))
        if _differs(path, before, after)
    ]


def recorded_changes(a: Run, b: Run) -> list[Change]:
    """All that a run records which resumes with other values: deciding keys, steps and evaluation."""
    if a.command.program is not None or b.command.program is not None:
        return []
    pairs = {path: (key.of(a), key.of(b)) for path in _RECORDED if (key := find_key(path))} | {
        "train.steps": (a.steps, b.steps)
    }
    return [*changes(a, b), *(Change(path, before, after) for path, (before, after) in pairs.items() if before != after)]


def changed(a: Run, b: Run) -> list[str]:
    """Deciding keys that differ between two runs, such as "train.seed: 0 → 1"."""
    return [str(change) for change in changes(a, b)]


def _differs(path: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    if path in before and path in after:
        return bool(before[path] != after[path])
    # A table that only one of the two runs has is reported by the values it sets, not by its defaults.
    key = find_key(path)
    return key is None or (before | after)[path] != key.default


def shown(value: Any) -> str:
    """The value of a key in a sentence."""
    return "unset" if value is None else quote(value)
