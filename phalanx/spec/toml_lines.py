"""The line of each key in a TOML text: tomllib keeps no positions, so the text is scanned a second time.
Called by `spec/draft` after tomllib has accepted the text; the scanner relies on that and checks nothing."""

from __future__ import annotations

import re
import tomllib

# Commas separate values in arrays and inline tables only, where skipping them like blanks loses nothing.
_BLANK = re.compile(r"(?:[ \t\n\r,]|#[^\n]*)*")
_PART = re.compile(r"""[ \t]*([A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')[ \t]*""")
_VALUE = re.compile(
    r'''"""(?:\\.|[^\\])*?""""{0,2}'''  # up to two quotes may stand right before the closing three
    r"""|'''.*?''''{0,2}"""
    r'''|"(?:\\.|[^"\\])*"'''
    r"""|'[^']*'"""
    r"""|[^\n,\]}#]+""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, of each table header and each key; for a table without a header, the line of its first key."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.lines: dict[tuple[str, ...], int] = {}
        self._counted, self._line = 0, 1

    def document(self) -> None:
        table: tuple[str, ...] = ()
        self._take(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                self.at += 2 if self.text.startswith("[[", self.at) else 1
                table = self._key(())
                while self.text.startswith("]", self.at):
                    self.at += 1
            else:
                self._pair(table)
            self._take(_BLANK)

    def _pair(self, table: tuple[str, ...]) -> None:
        path = self._key(table)
        self.at += 1  # the equals sign
        self._take(_BLANK)
        self._value(path)

    def _value(self, path: tuple[str, ...]) -> None:
        opening = self.text[self.at]
        if opening not in "[{":
            self._take(_VALUE)
            return
        self.at += 1
        self._take(_BLANK)
        while self.text[self.at] not in "]}":
            if opening == "{":
                self._pair(path)
            else:
                self._value(path)
            self._take(_BLANK)
        self.at += 1

    def _key(self, table: tuple[str, ...]) -> tuple[str, ...]:
        """Read a dotted key and record its line, and the lines of the tables it opens on its way."""
        line, path = self._line_here(), table
        while True:
            part = self._take(_PART).strip()
            path += (tomllib.loads(f"key = {part}")["key"] if part[0] in "\"'" else part,)
            self.lines.setdefault(path, line)
            if self.text[self.at] != ".":
                return path
            self.at += 1

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match, f"no TOML at {self.text[self.at : self.at + 20]!r}"
        self.at = match.end()
        return match.group()

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line
