"""The names of the Hugging Face hub in a run: which keys may hold one, pinning them, and keeping the commits that a run directory
records. Called by the loader, the API and the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from phalanx.spec.config_text import is_text
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.hub import DATASET, MODEL, TOKENIZER, HubError, RepositoryKind, ensure, parse, pin, remote_name
from phalanx.spec.run import TOKENIZER_VOCAB, Data, MixedSource, Run, Source

S = TypeVar("S", bound=Source)


def repository_kind(path: str, values: Mapping[str, Any]) -> RepositoryKind | None:
    """The kind of repository that a setting of a run file may name; None: it names none."""
    if path == "model.from" or (path == "model.config" and not is_text(values[path])):
        return MODEL
    if path == "data.tokenizer":
        return None if values[path] in TOKENIZER_VOCAB else TOKENIZER
    table, _, name = path.rpartition(".")
    return DATASET if name == "paths" and values.get(f"{table}.source") == "hf" else None


def pin_datasets(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The names of datasets with their commits. Without a network, one whose commit is unknown stays as it is: `datasets` may have it in a
    cache of its own."""
    pinned = list(paths)
    for index, text in enumerate(paths):
        try:
            pinned[index] = pin(text, DATASET)
        except HubError as error:
            if not error.unreachable:
                raise
    return tuple(pinned)


def pin_run(run: Run) -> Run:
    """A run with the names of the hub pinned and their small files in the cache of this host. Names that the loader has pinned are only
    looked up there. Raises RunError."""
    problems = []
    try:
        if run.model.from_ is not None:
            run = replace(run, model=replace(run.model, from_=ensure(run.model.from_, MODEL)))
    except HubError as error:
        if run.model.vocab is None:  # otherwise the sizes are known, and the weights may not be needed
            problems.append(_problem("model.from", run.model.from_, error))
    try:
        run = replace(run, data=pin_data(run.data))
    except RunError as error:
        problems += error.problems
    refuse(problems)
    return run


def pin_data(data: Data) -> Data:
    """The tokenizer and the datasets of [data], pinned. Raises RunError."""
    problems = []
    try:
        if data.tokenizer not in TOKENIZER_VOCAB:
            data = replace(data, tokenizer=ensure(data.tokenizer, TOKENIZER))
    except HubError as error:
        problems.append(_problem("data.tokenizer", data.tokenizer, error))
    try:
        data = replace(pin_source(data), mix=tuple(map(pin_source, data.mix)))
    except RunError as error:
        problems += error.problems
    refuse(problems)
    return data


def pin_source(source: S) -> S:
    """A source with the names of its datasets pinned. Raises RunError."""
    try:
        return replace(source, paths=pin_datasets(source.paths)) if source.source == "hf" else source
    except HubError as error:
        table = f"data.mix.{source.name}" if isinstance(source, MixedSource) else "data"
        raise RunError(_problem(f"{table}.paths", source.paths, error)) from None


_EXPECTED = {
    "model.from": "name a folder of Hugging Face weights, a run directory, a checkpoint or a model of the Hugging Face hub.",
    "data.tokenizer": 'write "byte", the path of a tokenizer.json or of a folder that holds one, or a name of the Hugging Face hub.',
}


def _problem(key: str, value: object, error: HubError) -> str:
    if error.exists:
        return f"{key} = {toml(value)}: {error}"
    return f"{key} = {toml(value)} is not known; {_EXPECTED.get(key, 'name a folder or a dataset of the hub.')} {error}"


def keep_commits(run: Run, recorded: Run) -> Run:
    """A run with the commits of an earlier launch of it, wherever both name the same repository at the same revision: a branch that has
    moved since does not change a run."""

    def kept(text: str, old: str) -> str:
        ours, theirs = parse(text), parse(old)
        if ours is None or theirs is None or remote_name(text) is None or ours.repository != theirs.repository:
            return text
        return old if ours.revision == theirs.revision or (ours.commit and ours.commit == theirs.commit) else text

    def of_source(source: S, old: Source | None) -> S:
        if source.source != "hf" or old is None or len(old.paths) != len(source.paths):
            return source
        return replace(source, paths=tuple(map(kept, source.paths, old.paths)))

    if run.model.from_ is not None and recorded.model.from_ is not None:
        run = replace(run, model=replace(run.model, from_=kept(run.model.from_, recorded.model.from_)))
    mix = {source.name: source for source in recorded.data.mix}
    data = replace(of_source(run.data, recorded.data), mix=tuple(of_source(s, mix.get(s.name)) for s in run.data.mix))
    return replace(run, data=replace(data, tokenizer=kept(data.tokenizer, recorded.data.tokenizer)))


def moved_names(run: Run, kept: Run) -> list[str]:
    """Sentences about names whose commit `keep_commits` has changed."""
    pairs = [("model.from", run.model.from_, kept.model.from_), ("data.tokenizer", run.data.tokenizer, kept.data.tokenizer)]
    for old, new in zip((run.data, *run.data.mix), (kept.data, *kept.data.mix), strict=True):
        pairs += [("data.paths", *names) for names in zip(old.paths, new.paths, strict=True)]
    sentences: dict[str | None, str] = {}
    for key, before, after in pairs:
        now, recorded = parse(before or ""), parse(after or "")
        if before != after and now and recorded and now.commit and recorded.commit and now.commit != recorded.commit:
            sentences.setdefault(
                before,
                f'{key}: "{now.revision}" of {now.repository} is {now.commit[:12]} on the hub now; the run goes on with '
                f"{recorded.commit[:12]}, with which it began.",
            )
    return list(sentences.values())
