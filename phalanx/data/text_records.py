"""Reads records out of files: text or the reason why there is none, each with its place. `piecework` calls it, in a worker.

Nothing that one record does wrong stops the others; what is wrong with a whole file is a RunError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from phalanx.data.files import Decompressed, Stream, is_compressed, open_binary, reachable
from phalanx.spec.errors import RunError

BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used."""

    reason: str
    """One of a few, to be counted by."""
    detail: str = ""
    """What exactly, for people."""


TOO_LONG, NOT_UTF8, BROKEN, NOT_OBJECT = "too long", "not UTF-8", "broken JSON", "not an object"
MISSING, NOT_TEXT = "field missing", "field is not text"
EMPTY = "empty"
"""Counted like the other reasons, but no mistake: it does not count towards the limit."""


def lines(stream: Stream, limit: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Lines that begin before `stop`, each with the byte where it begins; None for one of more than `limit` bytes, which is
    never held in memory. The stream stands at byte `start`, the beginning of a line."""
    offset, held, size = start, list[bytes](), 0
    while stop is None or offset < stop:
        block = stream.read(_BLOCK)
        if not block:
            break
        *whole, tail = block.split(b"\n")
        for part in whole:
            size += len(part)
            yield offset, None if size > limit else b"".join((*held, part)) if held else part
            offset += size + 1
            held, size = [], 0
            if stop is not None and offset >= stop:
                return
        size += len(tail)
        if size > limit:
            held = []
        elif tail:
            held.append(tail)
    if size:
        yield offset, None if size > limit else b"".join(held)


def next_line(file: BinaryIO, start: int, stop: int) -> int:
    """Where the first line begins that begins at `start` or later; `stop` if none does before. Leaves the file there."""
    if start == 0:
        return 0
    position = start - 1  # a line begins at `start` if this byte ends one
    file.seek(position)
    while position < stop - 1:
        block = file.read(min(_BLOCK, stop - 1 - position))
        if not block:
            break
        if (end := block.find(b"\n")) >= 0:
            file.seek(position + end + 1)
            return position + end + 1
        position += len(block)
    return stop


class JsonLines:
    """Records of one file, or of the lines that begin in start … stop of one that is not packed."""

    def __init__(self, path: str, limit: int, start: int = 0, stop: int | None = None):
        self._path, self._limit, self._start, self._stop = path, limit, start, stop
        self._numbered = start == 0
        self._line = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
        """(line number, or byte where the beginning was not seen; record)."""
        with reachable(self._path):
            yield from self._read()

    def _read(self) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
        if self._stop is None or is_compressed(self._path):
            source: Decompressed | BinaryIO = Decompressed(self._path)
            found = lines(source, self._limit)
        else:
            source = open_binary(self._path)
            first = next_line(source, self._start, self._stop)
            found = lines(source, self._limit, first, self._stop)
        try:
            for number, (offset, line) in enumerate(found, 1):
                record = self._parse(line, first=offset == 0)
                if record is not None:
                    yield (number if self._numbered else offset), record
        finally:
            source.close()

    def _parse(self, line: bytes | None, *, first: bool) -> dict[str, Any] | BadRecord | None:
        if line is None:
            return BadRecord(TOO_LONG, f"more than data.max_record_bytes = {self._limit}")
        if first:
            line = line.removeprefix(BOM)
        if not line or line.isspace():
            return None
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            return BadRecord(NOT_UTF8, f"byte 0x{line[error.start]:02x} at {error.start} of the line")
        except ValueError as error:
            return BadRecord(BROKEN, f"{error}; every line has to be a JSON object")
        except RecursionError:
            return BadRecord(BROKEN, "nested too deeply")
        return record if isinstance(record, dict) else BadRecord(NOT_OBJECT, f"a {type(record).__name__}")

    def place(self, position: int) -> str:
        if self._numbered:
            return f"{self._path}, line {position}"
        with open_binary(self._path) as file:  # counted only for the few that are shown
            number, left = 1, position
            while left and (block := file.read(min(_BLOCK, left))):
                number, left = number + block.count(b"\n"), left - len(block)
        return f"{self._path}, line {number}"


def text_in(record: Any, field: str, limit: int) -> str | BadRecord:
    """The text of a record's field; dots reach inside, unless the whole name is a field itself."""
    value = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            there = ", ".join(map(str, list(record)[:10])) or "none"
            return BadRecord(MISSING, f'no "{field}"; its fields are: {there}')
        value = value[name]
    return checked(value, field, limit)


def checked(value: Any, field: str, limit: int) -> str | BadRecord:
    """The value of a field if it is text that can be encoded."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRecord(NOT_UTF8, str(error))
    if value is None:
        return BadRecord(MISSING, f'"{field}" is null')
    if not isinstance(value, str):
        return BadRecord(NOT_TEXT, f'"{field}" is a {type(value).__name__}')
    if not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:  # half of a pair of surrogates, written as an escape
            return BadRecord(NOT_UTF8, f"half a character at {error.start}: {value[error.start]!r}")
    else:
        size = len(value)
    return BadRecord(TOO_LONG, f"{size} bytes, data.max_record_bytes = {limit}") if size > limit else value


class TextDocuments:
    """Files, each of them one document."""

    def __init__(self, paths: tuple[str, ...], limit: int, raw: bool):
        """`raw`: bytes as they are, for a tokenizer that takes any."""
        self._paths, self._limit, self._raw = paths, limit, raw

    def __iter__(self) -> Iterator[tuple[int, str | bytes | BadRecord]]:
        for number, path in enumerate(self._paths):
            yield number, self._read(path)

    def _read(self, path: str) -> str | bytes | BadRecord:
        source = Decompressed(path)
        try:
            blocks, size = [], 0
            while size <= self._limit and (block := source.read(_BLOCK)):
                blocks.append(block)
                size += len(block)
        finally:
            source.close()
        if size > self._limit:
            return BadRecord(TOO_LONG, f"more than data.max_record_bytes = {self._limit}")
        content = b"".join(blocks)
        if self._raw:
            return content
        try:
            return content.removeprefix(BOM).decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRecord(NOT_UTF8, f"byte 0x{content[error.start]:02x} at {error.start}")

    def place(self, position: int) -> str:
        return self._paths[position]


class Rows:
    """Records that were read elsewhere and handed over: texts, or what could not be one."""

    def __init__(self, rows: tuple[str | BadRecord, ...], first: int, name: str):
        self._rows, self._first, self._name = rows, first, name

    def __iter__(self) -> Iterator[tuple[int, str | BadRecord]]:
        yield from enumerate(self._rows, self._first)

    def place(self, position: int) -> str:
        return f"{self._name}, row {position}"


def missing_extra(what: str, package: str, extra: str) -> RunError:
    return RunError([f"{what} needs the package {package}: pip install 'phalanx[{extra}]'."])
