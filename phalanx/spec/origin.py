"""The folder that `model.from` names: which model it holds, and which tokenizer. Called by `spec/load` when a run is
resolved and by `spec/check_model`; whoever reads the weights starts from `origin_folder` too."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from phalanx.spec.dump import toml
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.spec.tokenizer_size import FILE

_TRAINING_ONLY = frozenset(
    {"model.moe.bias_rate", "model.moe.balance_loss", "model.mtp_depth", "model.mtp_loss_weight", "model.init_std"}
)

_MARKER = "commit.json"


class Origin(NamedTuple):
    """What a folder says of its model."""

    model: ModelSpec
    """Complete, without a preset's name; its `from_` is whatever the run says."""
    tokenizer: str | None
    """As `data.tokenizer` would name it; None: the folder holds none."""


def origin_folder(text: str) -> Path:
    """`model.from` as a path."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # a home directory that nobody has
        return Path(text)


def origin(text: str) -> Origin | None:
    """What the folder at `model.from` holds; None where there is no such folder, RunError where it cannot be understood."""
    folder = origin_folder(text)
    if not os.path.exists(folder):  # as opposed to pathlib's, it takes a name that no system accepts for a missing one
        return None
    run_dir = _run_directory(folder)
    if run_dir is not None:
        from phalanx.spec.load import model_of  # it calls this file in turn

        model, tokenizer = model_of(run_dir / "run.toml")
        if os.path.isfile(run_dir / "tokenizer" / FILE):
            tokenizer = str(run_dir / "tokenizer")
        return Origin(replace(model, preset=None, from_=text), tokenizer)
    if os.path.isfile(folder / _MARKER):  # a checkpoint that was taken out of its run directory carries its run file
        return _carried(folder, text)
    if os.path.isfile(folder / "config.json"):
        from phalanx.spec.hf_config import model_spec  # only those who start from such a folder pay for it

        return Origin(replace(model_spec(folder), from_=text), text if os.path.isfile(folder / FILE) else None)
    raise RunError(
        [
            f"model.from = {toml(text)} holds neither a config.json (Hugging Face weights) nor a run.toml (a run directory), "
            "nor is it a checkpoint of one: name such a folder."
        ]
    )


def _carried(folder: Path, text: str) -> Origin:
    from phalanx.spec.load import model_of

    try:
        run = json.loads((folder / _MARKER).read_bytes())["run"].encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError(
            [f"model.from = {toml(text)} is a checkpoint whose {_MARKER} carries no run file: name it in its run directory."]
        ) from None
    model, tokenizer = model_of(folder / _MARKER, run)
    return Origin(replace(model, preset=None, from_=text), tokenizer)


def overridable(path: str, model: ModelSpec) -> bool:
    """Whether a run may set this key otherwise than the folder it starts from: no weight's shape or meaning rests on it."""
    return (
        path in _TRAINING_ONLY
        or path in ("model.preset", "model.from")
        or (path == "model.context" and model.positions == "rope")
    )


def under(model: ModelSpec, base: ModelSpec) -> ModelSpec:
    """A model made in Python, with what it leaves at its default taken from the folder."""
    default = ModelSpec()
    return replace(
        base, **{f.name: value for f in fields(model) if (value := getattr(model, f.name)) != getattr(default, f.name)}
    )


def _run_directory(folder: Path) -> Path | None:
    """The run directory that a folder is, or is a checkpoint of."""
    if os.path.isfile(folder / "run.toml"):
        return folder
    parent = Path(os.path.abspath(folder)).parent
    if parent.name == "checkpoints" and not os.path.isfile(folder / "config.json"):
        return parent.parent if os.path.isfile(parent.parent / "run.toml") else None
    return None
