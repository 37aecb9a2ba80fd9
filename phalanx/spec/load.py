"""From a run file and `key=value` overrides to a Run, or to every problem at once. Called by the CLI and `phalanx.load`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.spec.check import findings
from phalanx.spec.keys import KEYS, TABLES, keys_of
from phalanx.spec.lines import key_lines
from phalanx.spec.model import ModelSpec, RopeScaling
from phalanx.spec.nearest import near
from phalanx.spec.presets import PRESETS
from phalanx.spec.run import TOKENIZER_VOCAB, Run
from phalanx.spec.settings import Draft, Where
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
        draft.take_file(tomllib.loads(text), key_lines(text))
    except RecursionError:
        draft.lose_file(draft.file, "brackets are nested too deeply to be read: a run file needs two levels at most.")
    except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
        draft.lose_file(*_syntax(draft, text, error))


def _finish(draft: Draft, overrides: Sequence[str]) -> Run:
    for override in overrides:
        draft.take_override(override)
    run = resolve(_build(draft, _values(draft)))
    for finding in findings(run):
        if not any(draft.doubts(path) for path in finding.keys):
            draft.problem(draft.blame(finding.keys), finding.sentence)
    draft.raise_problems()
    return run


def resolve(run: Run) -> Run:
    """The run with what follows from other keys filled in: the model takes the tokenizer's vocabulary unless it has one."""
    if run.model.vocab is not None:
        return run
    return replace(run, model=replace(run.model, vocab=TOKENIZER_VOCAB[run.data.tokenizer]))


def _values(draft: Draft) -> dict[str, Any]:
    """Every setting that is right in itself."""
    values: dict[str, Any] = {}
    for path, (value, where, bare) in draft.settings.items():
        try:
            values[path] = read(KEYS[path], value, bare)
        except Wrong as wrong:
            draft.problem(where, str(wrong))
            draft.doubtful.add(path)
            continue
        refused = refusal(KEYS[path], values[path])
        if refused is not None:
            draft.problem(where, refused)
    return values


def _build(draft: Draft, values: dict[str, Any]) -> Run:
    def given(table: str) -> dict[str, Any]:
        return {key.name: values[key.path] for key in keys_of(table) if key.path in values}

    tables = {table: TABLES[table](**given(table)) for table in TABLES if "." not in table and table != "model"}
    return Run(model=_model(draft, given("model"), given("model.rope_scaling")), **tables)


def _model(draft: Draft, sizes: dict[str, Any], scaling: dict[str, Any]) -> ModelSpec:
    """The preset, if one is named, under the sizes that are given."""
    preset = sizes.get("preset")
    if preset is not None and preset not in PRESETS:
        guesses = either(near(preset.lower(), PRESETS, most=3))
        remedy = f"did you mean {guesses} (`phalanx models` lists them all)?" if guesses else "`phalanx models` lists them."
        draft.problem(draft.blame(["model.preset"]), f"model.preset = {shown(preset)} is not a known model: {remedy}")
        draft.doubtful.add("model")
    base = PRESETS.get(preset or "", ModelSpec())
    if scaling and base.rope_scaling is not None:
        sizes["rope_scaling"] = replace(base.rope_scaling, **scaling)
    elif "factor" in scaling:
        sizes["rope_scaling"] = RopeScaling(**scaling)
    elif scaling and not draft.doubts("model.rope_scaling.factor"):
        where = draft.blame([f"model.rope_scaling.{name}" for name in scaling])
        draft.problem(where, "model.rope_scaling.factor is missing: set it, such as model.rope_scaling.factor = 8.")
    return replace(base, **sizes)


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
