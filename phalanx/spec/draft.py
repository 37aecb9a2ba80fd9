"""A run file while it is read: every setting with its line, every problem so far, and the Run that the settings describe.
`spec/load` and `spec/origin` fill a Draft and build the run from it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.spec.dump import HEADER
from phalanx.spec.errors import RunError, either, near, noun, quote, shorten, toml
from phalanx.spec.fields import RENAMED_KEYS
from phalanx.spec.keys import (
    BARE,
    FREE,
    KEYS,
    NAMED,
    OPTIONAL,
    TABLES,
    Wrong,
    find_key,
    is_table,
    keys_of,
    pattern,
    unknown_key,
    unknown_table,
)
from phalanx.spec.model import PRESETS, ModelSpec
from phalanx.spec.run import MixedSource, Run

_COMMAND_LINE = 1 << 30  # sorts after every line of a file


class Where(NamedTuple):
    """A place that a problem can be attributed to."""

    order: int
    """Line of the file, 0 for the file as a whole; problems are reported in this order."""
    label: str
    """The beginning of the message, such as "run.toml:12"."""


class Setting(NamedTuple):
    """One value that the file or the command line gives."""

    value: Any
    where: Where
    bare: str | None
    """The spelling on the command line if no quotes were written: 007 is a valid file name. None otherwise."""


class Draft:
    """The settings and problems of a run file so far."""

    def __init__(self, name: str):
        self.file = Where(0, name)
        self.settings: dict[str, Setting] = {}
        self.doubtful: set[str] = set()
        """Keys and tables whose values are unknown because of a problem reported already; "" means all of them."""
        self._problems: list[tuple[Where, str]] = []
        self._tables: dict[str, Where] = {}
        self._accepts_old_keys = False

    def problem(self, where: Where, sentence: str, *doubtful: str) -> None:
        """Record a problem, and keys or tables that it makes doubtful. Keys and arguments may hold line breaks and undecodable bytes;
        a problem is one printable line."""
        self.doubtful.update(doubtful)
        line = " ".join(f"{where.label}: {sentence}".splitlines())
        self._problems.append((where, line.encode("utf-8", "backslashreplace").decode()))

    def raise_problems(self) -> None:
        if self._problems:
            raise RunError([text for _, text in sorted(self._problems, key=lambda problem: problem[0].order)])

    def doubts(self, path: str) -> bool:
        """Whether a sentence about this key could be wrong because of another mistake."""
        parts = path.split(".")
        return not self.doubtful.isdisjoint({"", *(".".join(parts[:n]) for n in range(1, len(parts) + 1))})

    def blame(self, paths: Sequence[str]) -> Where:
        """The place of a problem that several keys share: the command line, else the first of them in the file."""
        given = [self.settings[path].where for path in paths if path in self.settings]
        typed = [where for where in given if where.order == _COMMAND_LINE]
        tables = [self._tables[table] for path in paths if (table := path.rpartition(".")[0]) in self._tables]
        return next(iter(typed + given + tables), self.file)

    @property
    def is_resolved(self) -> bool:
        """Whether `dump` wrote this file: it gives every size, as nobody does by hand, and needs no other folder any more."""
        return all(key.path in self.settings for key in keys_of("model") if not key.optional)

    def read_file(self, path: Path) -> None:
        """Take every setting of a file, or record why it cannot be read."""
        try:
            data = path.read_bytes()
        except OSError as error:
            self.problem(self.file, _unreadable(path, error), "")
        else:
            self.read_bytes(data)

    def read_bytes(self, data: bytes) -> None:
        """Take every setting of a file's contents."""
        try:
            text = data.decode("utf-8-sig")  # some editors begin a UTF-8 file with a byte-order mark
        except UnicodeDecodeError as error:
            where = self._line(data.count(b"\n", 0, error.start) + 1)
            self.problem(where, f"byte 0x{data[error.start]:02x} is not UTF-8: save the run file in that encoding.", "")
        else:
            self.read_text(text)

    def read_text(self, text: str) -> None:
        """Take every setting of a TOML text. Keys of earlier versions are accepted only in texts that a run wrote itself."""
        text = text.replace("\r\n", "\n")
        try:
            tree, lines = tomllib.loads(text), key_lines(text)
        except RecursionError:
            self.problem(self.file, "brackets are nested too deeply to be read: a run file needs two levels at most.", "")
        except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
            self.problem(*self._syntax_problem(text, error), "")
        else:
            tree.pop("$schema", None)  # points an editor to the schema; the run does not depend on it
            self._accepts_old_keys = text.startswith(HEADER)
            self._take(tree, (), lambda path: self._line(lines[path]), None)
            self._accepts_old_keys = False

    def take_override(self, text: str) -> None:
        """Take one `key=value` of the command line."""
        where = Where(_COMMAND_LINE, f"command line: {shorten(_without_secret(text))}")
        try:
            path, value, bare = _parse_override(text)
        except Wrong as wrong:
            self.problem(where, str(wrong), text.partition("=")[0].strip())
            return
        for name in reversed(path.split(".")):
            value = {name: value}
        self._take(value, (), lambda _: where, bare)

    def _take(
        self, tree: Mapping[str, Any], table: tuple[str, ...], where: Callable[[tuple[str, ...]], Where], bare: str | None
    ) -> None:
        for name, value in tree.items():
            parts = (*table, name)
            path = ".".join(parts)
            here = where(parts)
            if path in RENAMED_KEYS and self._accepts_old_keys:
                path = RENAMED_KEYS[path]
            above = ".".join(table)
            if above in (*NAMED, *FREE) and not BARE.fullmatch(name):
                self.problem(
                    here, f"{toml(name)} is no name for an entry of {above}: use letters, digits, _ and - only.", above
                )
            elif "." in name:
                dotted = "is one key with a dot in its name, which no table has: write it without quotes"
                self.problem(here, f"{toml(name)} {dotted}.", path)
            elif find_key(path) is not None:
                self.settings[path] = Setting(value, here, bare)
            elif not is_table(path):
                self._unknown(path, here, value)
            elif isinstance(value, Mapping):
                self._tables.setdefault(path, here)
                self._take(value, parts, where, bare)
            elif path == "model" and isinstance(value, str):
                self.settings["model.preset"] = Setting(value, here, None)
            else:
                self.problem(here, _not_a_table(path, value), path)

    def _unknown(self, path: str, where: Where, value: Any) -> None:
        if (new := RENAMED_KEYS.get(path)) is not None:
            self.problem(where, f"{path} is now called {new}: write {new} = {quote(value)}.", new)
        elif path.endswith(".name") and pattern(path).endswith(".*.name"):
            self.problem(where, f"{path} = {quote(value)} is not needed: the header of its table names it, so remove it.")
        else:
            sentence, guesses = unknown_table(path) if isinstance(value, Mapping) else unknown_key(path)
            self.problem(where, sentence, *guesses)

    def _line(self, number: int) -> Where:
        return Where(number, f"{self.file.label}:{number}")

    def _syntax_problem(self, text: str, error: ValueError) -> tuple[Where, str]:
        """tomllib's complaint with its line number, the line's text, and a remedy for the commonest mistakes."""
        match = re.fullmatch(
            r"(?P<what>.*?) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", str(error), re.DOTALL
        )
        if match is None:
            return self.file, f"not valid TOML: {str(error).partition(':')[0]}."
        number = int(match["line"] or text.rstrip().count("\n") + 1)
        what, column = match["what"], match["column"]
        line = f"`{shorten(_without_secret(text.split(chr(10))[number - 1].strip()))}`"
        if what == "Cannot overwrite a value":
            sentence = f"{line} gives a value that an earlier line has given: keep one of the two."
        elif what.startswith("Cannot declare"):
            sentence = f"{line} opens a table for the second time: put all its keys under one header."
        else:
            remedy = " (text needs quotes; true, false and inf are lower case)" if what == "Invalid value" else ""
            at, remedy = (f"at column {column}", remedy) if column else ("at the end", " (a bracket or a quote is still open)")
            sentence = f"not valid TOML {at} of {line}: {what[0].lower()}{what[1:]}{remedy}."
        return self._line(number), sentence

    def values(self) -> dict[str, Any]:
        """Every setting that its key accepts; records a problem for each of the others."""
        values: dict[str, Any] = {}
        for path, (value, where, bare) in self.settings.items():
            key = find_key(path)
            assert key is not None, path
            try:
                values[path] = key.read(value, bare)
            except Wrong as wrong:
                self.problem(where, str(wrong), path)
        return values

    def build(self, values: Mapping[str, Any], base: ModelSpec | None = None) -> Run:
        """The Run of these values. `base`: the model under the sizes that are given; default: the preset."""
        tables: dict[str, Any] = {
            table: TABLES[table](**_given(values, table)) for table in TABLES if "." not in table and table != "model"
        }
        for outer, name in (table.split(".") for table in _INNER_TABLES):
            inner = TABLES[f"{outer}.{name}"](**_given(values, f"{outer}.{name}"))
            tables[outer] = replace(tables[outer], **{name: inner})
        named = [table.removeprefix("data.mix.") for table in self._tables if table.startswith("data.mix.")]
        mix = tuple(MixedSource(name=name, **_given(values, f"data.mix.{name}")) for name in named)
        tables["data"] = replace(tables["data"], mix=mix)
        return Run(model=self._model(values, base or self._preset(values)), **tables)

    def _preset(self, values: Mapping[str, Any]) -> ModelSpec:
        preset = values.get("model.preset")
        if preset is not None and preset not in PRESETS:
            guesses = either(near(preset.lower(), PRESETS, most=3))
            remedy = f"did you mean {guesses} (`phalanx models` lists them all)?" if guesses else "`phalanx models` lists them."
            self.problem(
                self.blame(["model.preset"]), f"model.preset = {quote(preset)} is not a known model: {remedy}", "model"
            )
        return PRESETS.get(preset or "", ModelSpec())

    def _model(self, values: Mapping[str, Any], base: ModelSpec) -> ModelSpec:
        sizes = _given(values, "model")
        for table in OPTIONAL:
            name, given = table.removeprefix("model."), _given(values, table)
            of_base = getattr(base, name)
            if of_base is not None:
                sizes[name] = replace(of_base, **given)
                continue
            missing = [key.path for key in keys_of(table) if key.default is MISSING and key.path not in values]
            if not missing:
                sizes[name] = TABLES[table](**given)
            elif given or table in self._tables:
                where = self.blame([f"{table}.{name}" for name in given] or missing)
                for path in missing:
                    if not self.doubts(path):
                        self.problem(where, f"{path} is missing: set it, such as {path} = 8.")
                self.doubtful.add("model")  # without the table, sentences about other keys of the model would be wrong
        prefix = "model.options."
        options = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
        return replace(base, **sizes, options=tuple(sorted((dict(base.options) | options).items())))


def _without_secret(text: str) -> str:
    """A line or an override as it may be shown: of a key that holds a secret, only the name. A line does not say which table it is in."""
    name, equals, _ = text.partition("=")
    return f"{name}{equals}…" if equals and name.strip() in _SECRETS else _PASSWORD.sub("://…@", text)


def _given(values: Mapping[str, Any], table: str) -> dict[str, Any]:
    return {key.attribute: values[key.path] for key in keys_of(table) if key.path in values}


def _not_a_table(path: str, value: Any) -> str:
    """The sentence about a plain value where a table is expected."""
    given, above, name = f"{path} = {quote(value)} is {noun(value)}", *path.rpartition(".")[::2]
    if path in NAMED:
        return f"{given}, but {path} holds a table for each: write [{path}.NAME] and its keys below."
    if above in NAMED and find_key(f"{path}.{name}") is not None:  # the header's last part was forgotten
        return f"{given}, but every key of [{above}] belongs to a named table: write [{above}.NAME] above it."
    if path in FREE:
        return f"{given}, but {path} is a table: set its keys, such as {path}.width = 3."
    return f"{given}, but {path} is a table: set its keys, such as {keys_of(path)[0].path}."


def _parse_override(text: str) -> tuple[str, Any, str | None]:
    """Key, value and bare spelling; a value that is not TOML is a string without its quotes."""
    path, equals, spelled = (part.strip() for part in text.partition("="))
    if not equals or not path:
        raise Wrong("an override is written key=value, such as train.steps=20.")
    if not spelled:
        raise Wrong(f"{path} is given no value: write {path}=VALUE, or {path}='\"\"' for an empty string.")
    try:
        tree = tomllib.loads(f"value = {spelled}")
    except (ValueError, RecursionError):
        if spelled[0] in "[{\"'":
            raise Wrong("the value is not whole TOML: close its brackets and quotes.") from None
        return path, spelled, None
    value = tree["value"] if len(tree) == 1 else spelled  # a newline could smuggle in a second key
    return path, value, None if isinstance(value, str | list | dict) else spelled


def _unreadable(path: Path, error: OSError) -> str:
    if path.is_dir():
        inside = sorted(str(file) for file in path.glob("*.toml"))
        remedy = f"did you mean {either(inside[:3])}?" if inside else "name the TOML file to run."
        return f"this is a folder, but a run file is expected: {remedy}"
    if isinstance(error, FileNotFoundError):
        siblings = [str(file) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        guesses = near(os.fspath(path), siblings)
        remedy = f"did you mean {guesses[0]}?" if guesses else f"check the path, which is taken from {Path.cwd()}."
        return f"there is no such file: {remedy}"
    return f"the file cannot be read ({error.strerror or error}): check its permissions."


_INNER_TABLES = [table for table in TABLES if "." in table and table not in OPTIONAL and "*" not in table]
"""Tables inside of others, besides those of models and those that people name."""
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]*@")
_SECRETS = {name for key in KEYS.values() if "secret" in key.metadata for name in (key.path, key.name)}
_CLOSING = re.compile(r"""([\]}]|"{3}|'{3})\s*(#.*)?$""")
"""The end of a line with which a value of several lines can end."""


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, of each table header and each key; for a table without a header, the line of its first key.

    tomllib keeps no positions. But of a text that it accepts, it accepts every header and every pair of key and value alone, and not
    the first lines of a value of several lines.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    statement, first = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        if number > first and not _CLOSING.search(line):
            continue
        try:
            tree = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        header = statement.lstrip().startswith("[")
        paths = list(_paths(tree, () if header else table))
        for path in paths:
            lines.setdefault(path, first)
        table = paths[-1] if header else table
        statement, first = "", number + 1
    return lines


def _paths(tree: Mapping[str, Any], table: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every key and table in a table; each table before its keys."""
    for name, value in tree.items():
        yield (*table, name)
        if isinstance(value, Mapping):
            yield from _paths(value, (*table, name))
