"""Problems between `model.config`, which gives a model of transformers, and the other keys of the run file; for `spec/check`."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec import config_text
from phalanx.spec.errors import RunError, quote
from phalanx.spec.keys import KEYS, OPTIONAL, Finding
from phalanx.spec.model import ModelSpec
from phalanx.spec.origin import overridable
from phalanx.spec.run import Run

CONFIG = "$(model.config)model.config"
"""How a sentence names the key: its value is long."""


def custom(model: ModelSpec) -> str:
    """How a sentence names the key that gives another model than the built-in decoder."""
    return CONFIG if model.module is None else "$model.module"


def config_problems(run: Run) -> Iterator[str | Finding]:
    """What cannot stand next to a config, and sizes that differ from it."""
    model = run.model
    if model.config is None:
        return
    for other, value in (("preset", model.preset), ("module", model.module)):
        if value is not None:
            yield f"$model.{other} and {CONFIG} both define the model: remove one of them."
    try:
        theirs = config_text.spec_of(config_text.parse(config_text.read(model.config), "model.config"))
    except RunError as error:
        for sentence in error.problems:
            yield Finding(("model.config",), sentence)
        return
    for path, key in KEYS.items():
        if key.table != "model" or path in ("model.config", "model.module", "model.preset", "model.from"):
            continue
        ours, given = key.of(run), key.of(Run(model=theirs))
        if path.removeprefix("model.") in config_text.FIELDS:
            if ours != given and not overridable(key, model):
                yield f"${path} differs from the {quote(given)} of {CONFIG}: remove {path}."
        elif ours != given:
            yield f"${path} belongs to the built-in decoder, but {CONFIG} defines the model: remove {path}."
    if run.lora.base is not None:
        yield f"$lora.base quantizes the blocks of the built-in decoder, but {CONFIG} defines the model: remove lora.base."
    for table in OPTIONAL:
        if getattr(model, table.removeprefix("model.")) is not None:
            first = next(path for path in KEYS if path.startswith(f"{table}."))
            yield f"$({first})[{table}] belongs to the built-in decoder, but {CONFIG} defines the model: remove [{table}]."
