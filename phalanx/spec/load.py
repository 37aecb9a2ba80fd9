"""From a run file and `key=value` overrides to a Run, or to every problem at once. Called by the CLI and `phalanx.load`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

from phalanx.spec.check import findings
from phalanx.spec.dump import HEADER
from phalanx.spec.errors import RunError
from phalanx.spec.keys import KEYS, OPTIONAL, TABLES, find_key, keys_of
from phalanx.spec.lines import key_lines
from phalanx.spec.model import ModelSpec
from phalanx.spec.nearest import near
from phalanx.spec.origin import Origin, origin, under
from phalanx.spec.presets import PRESETS
from phalanx.spec.run import Data, MixedSource, Run
from phalanx.spec.settings import Draft, Where
from phalanx.spec.tokenizer_size import vocabulary
from phalanx.spec.typed import Wrong, read, refusal
from phalanx.spec.words import cut, either, shown


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """The run that a file describes, with overrides such as "train.steps=20" applied and everything checked."""
    draft = Draft(os.fspath(path))
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        draft.lose_file(draft.file, _unreadable(Path(path), error))
    else:
        _read(draft, data)
    return _finish(draft, overrides)


def loads(text: str, *, name: str = "run file", overrides: Sequence[str] = ()) -> Run:
    """The run that a text describes; `name` stands for the file in messages."""
    draft = Draft(name)
    _parse(draft, text)
    return _finish(draft, overrides)


def _read(draft: Draft, data: bytes) -> None:
    try:
        text = data.decode("utf-8-sig")  # some editors open a UTF-8 file with a byte-order mark
    except UnicodeDecodeError as error:
        where = draft.line(data.count(b"\n", 0, error.start) + 1)
        draft.lose_file(where, f"byte 0x{data[error.start]:02x} is not UTF-8: save the run file in that encoding.")
    else:
        _parse(draft, text)


def _parse(draft: Draft, text: str) -> None:
    text = text.replace("\r\n", "\n")
    try:
        draft.take_file(tomllib.loads(text), key_lines(text), written_by_run=text.startswith(HEADER))
    except RecursionError:
        draft.lose_file(draft.file, "brackets are nested too deeply to be read: a run file needs two levels at most.")
    except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
        draft.lose_file(*_syntax(draft, text, error))


def model_of(path: Path, data: bytes | None = None) -> tuple[ModelSpec, str]:
    """The complete model and the tokenizer of a run file, whatever else is wrong with that run on this machine. `data`: its contents,
    where they stand in another file.

    Where its own weights came from is not followed: a run directory may name itself.
    """
    draft = Draft(os.fspath(path))
    try:
        _read(draft, path.read_bytes() if data is None else data)
    except OSError as error:
        draft.lose_file(draft.file, _unreadable(path, error))
    draft.settings.pop("model.from", None)
    run = resolve(_build(draft, _values(draft)))
    draft.raise_problems()
    return run.model, run.data.tokenizer


def _finish(draft: Draft, overrides: Sequence[str]) -> Run:
    for override in overrides:
        draft.take_override(override)
    run = resolve(_build(draft, _values(draft)))
    for finding in findings(run):
        if not any(draft.doubts(path) for path in finding.keys) and not (finding.lapses and _resolved(draft)):
            draft.problem(draft.blame(finding.keys), finding.sentence)
    draft.raise_problems()
    return run


def resolve(run: Run) -> Run:
    """The run with what follows from other keys filled in: the folder's model under `model.from`, the tokenizer's vocabulary.

    A run that has its vocabulary is complete; what cannot be read is left out here and told by `check`.
    """
    if run.model.vocab is None and run.model.from_ is not None:
        try:
            start = origin(run.model.from_)
        except RunError:
            start = None
        if start is None:
            return run
        run = replace(run, model=under(run.model, start.model))
        if start.tokenizer is not None and run.data.tokenizer == Data().tokenizer:
            run = replace(run, data=replace(run.data, tokenizer=start.tokenizer))
    if run.model.vocab is None:
        try:
            return replace(run, model=replace(run.model, vocab=vocabulary(run.data.tokenizer)))
        except RunError:
            return run
    return run


def _values(draft: Draft) -> dict[str, Any]:
    """Every setting that is right in itself."""
    values: dict[str, Any] = {}
    for path, (value, where, bare) in draft.settings.items():
        key = find_key(path)
        assert key is not None, path
        try:
            values[path] = read(key, value, bare)
        except Wrong as wrong:
            draft.problem(where, str(wrong))
            draft.doubtful.add(path)
            continue
        refused = refusal(key, values[path])
        if refused is not None:
            draft.problem(where, refused)
    return values


def _build(draft: Draft, values: dict[str, Any]) -> Run:
    tables: dict[str, Any] = {
        table: TABLES[table](**_given(values, table)) for table in TABLES if "." not in table and table != "model"
    }
    mix = tuple(MixedSource(name=name, **_given(values, f"data.mix.{name}")) for name in draft.names("data.mix"))
    start = _start(draft, values)
    tables["data"] = replace(tables["data"], mix=mix)
    if start is not None and start.tokenizer is not None and "data.tokenizer" not in values:
        tables["data"] = replace(tables["data"], tokenizer=start.tokenizer)
    return Run(model=_model(draft, values, _preset(draft, values) if start is None else start.model), **tables)


def _resolved(draft: Draft) -> bool:
    """Whether this is a file that `dump` wrote: it gives every size, as nobody does by hand, and needs no folder any more."""
    return all(key.path in draft.settings for key in keys_of("model") if not key.optional)


def _given(values: dict[str, Any], table: str) -> dict[str, Any]:
    return {key.attribute: values[key.path] for key in keys_of(table) if key.path in values}


def _start(draft: Draft, values: dict[str, Any]) -> Origin | None:
    """What the folder of `model.from` says; where that cannot be told, `findings` says why."""
    if "model.from" not in values or _resolved(draft):
        return None
    try:
        return origin(values["model.from"])
    except RunError:
        # One sentence says why; none about sizes that nobody could read.
        draft.doubtful.update(
            key.path for key in KEYS.values() if key.path.startswith("model.") and key.name not in ("from", "preset")
        )
        return None


def _preset(draft: Draft, values: dict[str, Any]) -> ModelSpec:
    preset = values.get("model.preset")
    if preset is not None and preset not in PRESETS:
        guesses = either(near(preset.lower(), PRESETS, most=3))
        remedy = f"did you mean {guesses} (`phalanx models` lists them all)?" if guesses else "`phalanx models` lists them."
        draft.problem(draft.blame(["model.preset"]), f"model.preset = {shown(preset)} is not a known model: {remedy}")
        draft.doubtful.add("model")
    return PRESETS.get(preset or "", ModelSpec())


def _model(draft: Draft, values: dict[str, Any], base: ModelSpec) -> ModelSpec:
    """The preset or the folder's model, if one is named, under the sizes that are given."""
    sizes = _given(values, "model")
    for table in OPTIONAL:
        name, given = table.removeprefix("model."), _given(values, table)
        under_it = getattr(base, name)
        if under_it is not None:
            sizes[name] = replace(under_it, **given)
            continue
        missing = [key.path for key in keys_of(table) if key.default is MISSING and key.path not in values]
        if not missing:
            sizes[name] = TABLES[table](**given)
        elif given or draft.has(table):
            where = draft.blame([f"{table}.{name}" for name in given] or missing)
            for path in missing:
                if not draft.doubts(path):
                    draft.problem(where, f"{path} is missing: set it, such as {path} = 8.")
            draft.doubtful.add("model")  # without the table, sentences about its neighbours would be wrong
    prefix = "model.options."
    options = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
    return replace(base, **sizes, options=tuple(sorted((dict(base.options) | options).items())))


def _unreadable(path: Path, error: OSError) -> str:
    if path.is_dir():
        inside = sorted(str(file) for file in path.glob("*.toml"))
        remedy = f"did you mean {either(inside[:3])}?" if inside else "name the TOML file to run."
        return f"this is a folder, but a run file is wanted: {remedy}"
    if isinstance(error, FileNotFoundError):
        beside = [str(file) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        guesses = near(str(path), beside)
        remedy = f"did you mean {guesses[0]}?" if guesses else f"check the path, which is taken from {Path.cwd()}."
        return f"there is no such file: {remedy}"
    return f"the file cannot be read ({error.strerror or error}): check its permissions."


def _syntax(draft: Draft, text: str, error: ValueError) -> tuple[Where, str]:
    """tomllib's complaint with its line in front, the line's text, and a remedy for the commonest mistakes."""
    found = re.fullmatch(
        r"(?P<what>.*?) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", str(error), re.DOTALL
    )
    if found is None:
        return draft.file, f"not valid TOML: {str(error).partition(':')[0]}."
    number = int(found["line"] or text.rstrip().count("\n") + 1)
    what, column = found["what"], found["column"]
    line = f"`{cut(text.split(chr(10))[number - 1].strip())}`"
    if what == "Cannot overwrite a value":
        sentence = f"{line} gives a value that an earlier line has given: keep one of the two."
    elif what.startswith("Cannot declare"):
        sentence = f"{line} opens a table for the second time: put all its keys under one header."
    else:
        remedy = " (text needs quotes; true, false and inf are lower case)" if what == "Invalid value" else ""
        at, remedy = (f"at column {column}", remedy) if column else ("at the end", " (a bracket or a quote is still open)")
        sentence = f"not valid TOML {at} of {line}: {what[0].lower()}{what[1:]}{remedy}."
    return draft.line(number), sentence
