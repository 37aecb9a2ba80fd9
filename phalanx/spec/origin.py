"""The folder that `model.from` names: which model it holds, and which tokenizer. Called by `spec/load` and `spec/check`;
training reads the weights from `origin_folder`."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from phalanx.spec.config_text import model_of
from phalanx.spec.draft import Draft
from phalanx.spec.errors import RunError, toml
from phalanx.spec.hub import local_path
from phalanx.spec.keys import Key
from phalanx.spec.model import ModelSpec
from phalanx.spec.sources import TOKENIZER_FILE, vocabulary_size

_MARKER = "commit.json"


class Origin(NamedTuple):
    """The model and the tokenizer of a folder."""

    model: ModelSpec
    """Complete, without a preset's name; `from_` is the run's own `model.from`."""
    tokenizer: str | None
    """As `data.tokenizer` would name it; None: the folder holds none."""


def origin_folder(text: str) -> Path:
    """`model.from` as a path: for a name of the hub, its folder in the cache."""
    return local_path(text)


def origin(text: str) -> Origin | None:
    """The contents of the folder `model.from`; None if there is no such folder, RunError if it cannot be understood."""
    folder = origin_folder(text)
    if not os.path.exists(folder):  # unlike pathlib's, it answers False for a name that no file system accepts
        return None
    run_dir = _run_directory(folder)
    if run_dir is not None:
        start = _of_run_file(text, run_dir / "run.toml")
        copied = os.path.isfile(run_dir / "tokenizer" / TOKENIZER_FILE)
        return start._replace(tokenizer=str(run_dir / "tokenizer")) if copied else start
    if os.path.isfile(folder / _MARKER):  # a checkpoint that was moved out of its run directory carries its run file
        return _of_run_file(text, folder / _MARKER, _carried_run_file(folder, text))
    if os.path.isfile(folder / "config.json"):
        return Origin(replace(model_of(folder), from_=text), text if os.path.isfile(folder / TOKENIZER_FILE) else None)
    raise RunError(
        f"model.from = {toml(text)} holds neither a config.json (Hugging Face weights) nor a run.toml (a run directory), "
        "nor is it a checkpoint of one: name such a folder."
    )


def overridable(key: Key, model: ModelSpec) -> bool:
    """Whether a run may change this key of the folder it starts from: no weight's shape or meaning depends on it."""
    return "training_only" in key.metadata or (key.path == "model.context" and model.positions == "rope")


def under(model: ModelSpec, base: ModelSpec) -> ModelSpec:
    """A model made in Python, with the folder's value for every field that has its default."""
    default = ModelSpec()
    return replace(
        base, **{f.name: value for f in fields(model) if (value := getattr(model, f.name)) != getattr(default, f.name)}
    )


def _of_run_file(text: str, path: Path, data: bytes | None = None) -> Origin:
    """The complete model and the tokenizer of a run file, whatever else is wrong with that run on this machine.

    `data`: the run file's contents, if another file carries it. Its own `model.from` is ignored: a run directory may name itself.
    """
    draft = Draft(os.fspath(path))
    if data is None:
        draft.read_file(path)
    else:
        draft.read_bytes(data)
    draft.settings.pop("model.from", None)
    run = draft.build(draft.values())
    draft.raise_problems()
    if run.lora.rank is not None:
        raise RunError(
            f"model.from = {toml(text)} is a run whose checkpoints hold LoRA adapters, not a model: merge them with `phalanx export {text} "
            "FOLDER`, and name that folder."
        )
    model = replace(run.model, preset=None, from_=text)
    if model.vocab is None:
        with contextlib.suppress(RunError):  # a tokenizer that has moved away is reported where it is needed
            model = replace(model, vocab=vocabulary_size(run.data.tokenizer))
    return Origin(model, run.data.tokenizer)


def _carried_run_file(folder: Path, text: str) -> bytes:
    try:
        run_file: str = json.loads((folder / _MARKER).read_bytes())["run"]
        return run_file.encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        remedy = "name the checkpoint inside its run directory"
        raise RunError(f"model.from = {toml(text)} is a checkpoint whose {_MARKER} has no run file: {remedy}.") from None


def _run_directory(folder: Path) -> Path | None:
    """The run directory that a folder is, or that it is a checkpoint of."""
    if os.path.isfile(folder / "run.toml"):
        return folder
    parent = Path(os.path.abspath(folder)).parent
    if parent.name == "checkpoints" and not os.path.isfile(folder / "config.json"):
        return parent.parent if os.path.isfile(parent.parent / "run.toml") else None
    return None
