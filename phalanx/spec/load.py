"""From a run file and `key=value` overrides to a Run, or to every problem at once. Called by the CLI and `phalanx.load`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.spec import config_text
from phalanx.spec.check import findings
from phalanx.spec.draft import Draft
from phalanx.spec.errors import RunError, toml
from phalanx.spec.hub import DATASET, HubError, pin
from phalanx.spec.keys import KEYS
from phalanx.spec.model import ModelSpec
from phalanx.spec.origin import Origin, origin, under
from phalanx.spec.pinned_names import pin_datasets, repository_kind
from phalanx.spec.preset_vocabulary import fit_vocabulary
from phalanx.spec.run import Data, Run
from phalanx.spec.sources import vocabulary_size


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """Load a run file, apply overrides such as "train.steps=20", and check everything. Raises RunError with all problems."""
    draft = Draft(os.fspath(path))
    draft.read_file(Path(path))
    return _finish(draft, overrides)


def loads(text: str, *, name: str = "run file", overrides: Sequence[str] = ()) -> Run:
    """Load a run from TOML text; `name` stands for the file in messages."""
    draft = Draft(name)
    draft.read_text(text)
    return _finish(draft, overrides)


def resolve(run: Run) -> Run:
    """Fill in what follows from other keys: the folder's model under `model.from`, the tokenizer's vocabulary size.

    A run that has its vocabulary size is complete. What cannot be read stays open here; `check` reports it.
    """
    with suppress(RunError):
        if run.model.config is not None and (run.model.vocab is None or not config_text.is_text(run.model.config)):
            run = replace(run, model=_configured(run.model))
        if run.model.vocab is None and run.model.from_ is not None:
            start = origin(run.model.from_)
            if start is None:
                return run
            run = replace(run, model=under(run.model, start.model))
            if run.data.tokenizer == Data().tokenizer:
                run = _with_tokenizer(run, start)
        if run.model.vocab is None:
            return replace(run, model=replace(run.model, vocab=vocabulary_size(run.data.tokenizer)))
    return run


def load_unresolved(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """The settings of a run file alone, for a process that gets the resolved run from another one. Reads no other file, and checks each
    key for itself only."""
    draft = Draft(os.fspath(path))
    draft.read_file(Path(path))
    for override in overrides:
        draft.take_override(override)
    run = draft.build(draft.values())
    draft.raise_problems()
    return run


def given_keys(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> frozenset[str]:
    """The keys that a run file and overrides set, by their dotted names."""
    draft = Draft(os.fspath(path))
    draft.read_file(Path(path))
    for override in overrides:
        draft.take_override(override)
    return frozenset(draft.values())


def _configured(model: ModelSpec) -> ModelSpec:
    """A model whose `config` is the text, with the sizes that it gives where the model has defaults."""
    base = config_text.spec_of(config_text.parse(config_text.read(model.config or ""), "model.config"))
    return under(replace(model, config=base.config), base)


def _with_tokenizer(run: Run, start: Origin) -> Run:
    return run if start.tokenizer is None else replace(run, data=replace(run.data, tokenizer=start.tokenizer))


def _finish(draft: Draft, overrides: Sequence[str]) -> Run:
    for override in overrides:
        draft.take_override(override)
    values = draft.values()
    absent = {} if draft.is_resolved else _pin_names(draft, values)
    configured = None if draft.is_resolved else _config(draft, values)
    start = _start(draft, values)
    run = draft.build(values, configured or (None if start is None else start.model))
    if start is not None and "data.tokenizer" not in values:
        run = _with_tokenizer(run, start)
    if "model.preset" in values and not {"model.vocab", "model.from"} & values.keys():
        run = fit_vocabulary(run, tokenizer_given="data.tokenizer" in values)
    run = resolve(run)
    for finding in findings(run):
        if not any(draft.doubts(path) for path in finding.keys) and not (finding.not_if_resolved and draft.is_resolved):
            error = absent.get(finding.keys[0]) if finding.absent else None
            if error is None or not error.exists:  # otherwise it is reported already
                draft.problem(draft.blame(finding.keys), f"{finding.sentence} {error or ''}".rstrip())
    draft.raise_problems()
    return run


def _pin_names(draft: Draft, values: dict[str, Any]) -> dict[str, HubError]:
    """Pin the names of the Hugging Face hub to their commits, in place. Returns errors of names that may also be paths, by key: `findings`
    reports that there is no such path."""
    errors: dict[str, HubError] = {}
    for path in values:
        if (kind := repository_kind(path, values)) is None:
            continue
        try:
            if kind is DATASET:
                values[path] = pin_datasets(values[path])
            else:
                values[path] = pin(values[path], kind)
        except HubError as error:
            errors[path] = error
            given = f"{path} = {toml(values[path])}"
            if error.exists:
                draft.problem(draft.blame([path]), f"{given}: {error}")
            elif kind is DATASET:
                draft.problem(draft.blame([path]), f"{given} does not exist: name a folder or a dataset of the hub. {error}")
    return errors


def _config(draft: Draft, values: dict[str, Any]) -> ModelSpec | None:
    """The model of `model.config`, whose value becomes the text. A problem with it is reported here."""
    if "model.config" not in values:
        return None
    given = values["model.config"]
    try:
        values["model.config"] = config_text.read(given)
        where = "model.config" if config_text.is_text(given) else f"model.config = {toml(given)}"
        return config_text.spec_of(config_text.parse(values["model.config"], where), where)
    except RunError as error:
        if not draft.doubts("model.config"):
            for problem in error.problems:
                sentence = problem if "model.config" in problem else f"model.config = {toml(given)}: {problem}"
                draft.problem(draft.blame(["model.config"]), sentence, "model")
        return None


def _start(draft: Draft, values: dict[str, Any]) -> Origin | None:
    """The contents of the folder `model.from`; if it cannot be understood, `findings` reports why."""
    if "model.from" not in values or draft.is_resolved:
        return None
    try:
        return origin(values["model.from"])
    except RunError:
        # One sentence reports the folder; none is wanted about sizes that could not be read.
        draft.doubtful.update(
            key.path for key in KEYS.values() if key.path.startswith("model.") and key.name not in ("from", "preset")
        )
        return None
