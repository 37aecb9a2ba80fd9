"""What the file and the command line say, key by key, each with its place; unknown names are found here.
`spec/load` fills a Draft and makes the run of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.spec.dump import toml
from phalanx.spec.errors import RunError
from phalanx.spec.keys import BARE, FREE, NAMED, find_key, is_table, keys_of, pattern
from phalanx.spec.nearest import unknown_key, unknown_table
from phalanx.spec.renamed import RENAMED_KEYS
from phalanx.spec.typed import Wrong
from phalanx.spec.words import cut, noun, shown

_COMMAND_LINE = 1 << 30  # sorts after every line of a file


class Where(NamedTuple):
    """A place that a problem can be blamed on."""

    order: int
    """Line of the file, 0 for the file as a whole; problems are told in this order."""
    label: str
    """How a message opens, such as "run.toml:12"."""


class Setting(NamedTuple):
    """One value that somebody gave."""

    value: Any
    where: Where
    bare: str | None
    """How the command line spelled it where no quotes were written, as 007 is a fine file name; None otherwise."""


class Draft:
    """A run file being read: settings so far, problems so far."""

    def __init__(self, name: str):
        self.file = Where(0, name)
        self.settings: dict[str, Setting] = {}
        self.doubtful: set[str] = set()
        """Keys and tables whose values are not known because of a problem told already; "" is all of them."""
        self._problems: list[tuple[Where, str]] = []
        self._tables: dict[str, Where] = {}
        self._accepts_old_keys = False

    def problem(self, where: Where, sentence: str) -> None:
        # Keys and arguments may hold line breaks and undecodable bytes; a problem is one line that any terminal prints.
        line = " ".join(f"{where.label}: {sentence}".splitlines())
        self._problems.append((where, line.encode("utf-8", "backslashreplace").decode()))

    def lose_file(self, where: Where, sentence: str) -> None:
        """The file cannot be read at all: nothing is known of any key that it may have set."""
        self.problem(where, sentence)
        self.doubtful.add("")

    def line(self, number: int) -> Where:
        return Where(number, f"{self.file.label}:{number}")

    def raise_problems(self) -> None:
        if self._problems:
            raise RunError([text for _, text in sorted(self._problems, key=lambda problem: problem[0].order)])

    def doubts(self, path: str) -> bool:
        """Whether a sentence about this key could be wrong because of another mistake."""
        parts = path.split(".")
        return not self.doubtful.isdisjoint({"", *(".".join(parts[:n]) for n in range(1, len(parts) + 1))})

    def blame(self, paths: Sequence[str]) -> Where:
        """The place of a problem that several keys share: what was typed last, else the first of them in the file."""
        given = [self.settings[path].where for path in paths if path in self.settings]
        typed = [where for where in given if where.order == _COMMAND_LINE]
        tables = [self._tables[table] for path in paths if (table := path.rpartition(".")[0]) in self._tables]
        return next(iter(typed + given + tables), self.file)

    def has(self, table: str) -> bool:
        """Whether the file or the command line opens a table, be it empty."""
        return table in self._tables

    def names(self, table: str) -> list[str]:
        """What the person called the tables in a table, in the order they came."""
        return [path.rpartition(".")[2] for path in self._tables if path.rpartition(".")[0] == table]

    def take_file(self, tree: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], *, written_by_run: bool) -> None:
        """Take every setting of a parsed file. Old keys are accepted only in files that a run wrote itself."""
        self._accepts_old_keys = written_by_run
        # An editor may be pointed to the schema by a key; it says nothing about the run.
        self._take(
            {name: value for name, value in tree.items() if name != "$schema"}, (), lambda path: self.line(lines[path]), None
        )
        self._accepts_old_keys = False

    def take_override(self, text: str) -> None:
        """One `key=value` of the command line."""
        where = Where(_COMMAND_LINE, f"command line: {cut(text)}")
        try:
            path, value, bare = _override(text)
        except Wrong as wrong:
            self.doubtful.add(text.partition("=")[0].strip())
            self.problem(where, str(wrong))
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
            if ".".join(table) in (*NAMED, *FREE) and not BARE.fullmatch(name):
                self.doubtful.add(".".join(table))
                self.problem(
                    here, f"{toml(name)} is no name for an entry of {'.'.join(table)}: use letters, digits, _ and - only."
                )
            elif "." in name:
                self.doubtful.add(path)
                self.problem(
                    here, f"{toml(name)} is one key with a dot in its name, which no table has: write it without quotes."
                )
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
                self.doubtful.add(path)
                self.problem(here, _no_table(path, value))

    def _unknown(self, path: str, where: Where, value: Any) -> None:
        if (new := RENAMED_KEYS.get(path)) is not None:
            self.doubtful.add(new)
            self.problem(where, f"{path} is now called {new}: write {new} = {shown(value)}.")
            return
        if path.endswith(".name") and pattern(path).endswith(".*.name"):
            self.problem(where, f"{path} = {shown(value)} is not needed: the header of its table names it, so remove it.")
            return
        sentence, guesses = unknown_table(path) if isinstance(value, Mapping) else unknown_key(path)
        self.doubtful.update(guesses)
        self.problem(where, sentence)


def _no_table(path: str, value: Any) -> str:
    """The sentence about a plain value that stands where a table is wanted."""
    given, above, name = f"{path} = {shown(value)} is {noun(value)}", *path.rpartition(".")[::2]
    if path in NAMED:
        return f"{given}, but {path} holds a table for each: write [{path}.NAME] and its keys below."
    if above in NAMED and find_key(f"{path}.{name}") is not None:  # the header's last part was forgotten
        return f"{given}, but every key of [{above}] belongs to a named table: write [{above}.NAME] above it."
    if path in FREE:
        return f"{given}, but {path} is a table: set its keys, such as {path}.width = 3."
    return f"{given}, but {path} is a table: set its keys, such as {keys_of(path)[0].path}."


def _override(text: str) -> tuple[str, Any, str | None]:
    """Key, value and bare spelling; what is no TOML value is a string without its quotes."""
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
