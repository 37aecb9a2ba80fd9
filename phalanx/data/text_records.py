"""Reads records from JSON Lines and text files: a text, or the reason why there is none. `data/tokenize_workers` calls it.

A bad record never stops the others. A bad file raises a RunError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from phalanx.data.files import Decompressed, Stream, is_compressed, open_binary, storage_errors
from phalanx.spec.errors import RunError

BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used."""

    reason: str
    """One of a few constants, by which bad records are counted."""
    detail: str = ""
    """Details for people."""


TOO_LONG, NOT_UTF8, BROKEN, NOT_OBJECT = "too long", "not UTF-8", "broken JSON", "not an object"
MISSING, NOT_TEXT = "field missing", "field is not text"
EMPTY = "empty"
"""Counted like the other reasons, but not an error: it does not count towards the limit."""


def lines(stream: Stream, limit: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Lines that begin before `stop`, each with its first byte; None for a line of more than `limit` bytes, which is never held
    in memory. The stream is at byte `start`, the beginning of a line."""
    offset, pending, size = start, list[bytes](), 0
    while stop is None or offset < stop:
        block = stream.read(_BLOCK)
        if not block:
            break
        *whole, tail = block.split(b"\n")
        for part in whole:
            size += len(part)
            yield offset, None if size > limit else b"".join((*pending, part)) if pending else part
            offset += size + 1
            pending, size = [], 0
            if stop is not None and offset >= stop:
                return
        size += len(tail)
        if size > limit:
            pending = []
        elif tail:
            pending.append(tail)
    if size:
        yield offset, None if size > limit else b"".join(pending)


def next_line(file: BinaryIO, start: int, stop: int) -> int:
    """First byte of the first line that begins at `start` or later, or `stop` if there is none before. Seeks to it."""
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
    """Records of one file, or of the lines that begin in start … stop of an uncompressed file."""

    def __init__(self, path: str, limit: int, start: int = 0, stop: int | None = None):
        self._path, self._limit, self._start, self._stop = path, limit, start, stop
        self._numbered = start == 0
        self._line = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
        """Yields (line number, or first byte if the range does not start at the beginning of the file; record)."""
        with storage_errors(self._path):
            yield from self._read()

    def _read(self) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
        if self._stop is None or is_compressed(self._path):
            source: Decompressed | BinaryIO = Decompressed(self._path)
            parts = lines(source, self._limit)
        else:
            source = open_binary(self._path)
            first = next_line(source, self._start, self._stop)
            parts = lines(source, self._limit, first, self._stop)
        try:
            for number, (offset, line) in enumerate(parts, 1):
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
            return BadRecord(BROKEN, f"{error}; every line must be a JSON object")
        except RecursionError:
            return BadRecord(BROKEN, "nested too deeply")
        return record if isinstance(record, dict) else BadRecord(NOT_OBJECT, f"a {type(record).__name__}")

    def place(self, position: int) -> str:
        if self._numbered:
            return f"{self._path}, line {position}"
        with open_binary(self._path) as file:  # lines are counted only for the few records that are shown
            number, remaining = 1, position
            while remaining and (block := file.read(min(_BLOCK, remaining))):
                number, remaining = number + block.count(b"\n"), remaining - len(block)
        return f"{self._path}, line {number}"


def text_in(record: Any, field: str, limit: int) -> str | BadRecord:
    """The text of a record's field. Dots in the name reach into nested objects, unless the whole name is a field itself."""
    value = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            fields = ", ".join(map(str, list(record)[:10])) or "none"
            return BadRecord(MISSING, f'no "{field}"; its fields are: {fields}')
        value = value[name]
    return checked_text(value, field, limit)


def checked_text(value: Any, field: str, limit: int) -> str | BadRecord:
    """The value of a field if it is valid text."""
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
        except UnicodeEncodeError as error:  # an unpaired surrogate, written as an escape
            return BadRecord(NOT_UTF8, f"an unpaired surrogate at {error.start}: {value[error.start]!r}")
    else:
        size = len(value)
    return BadRecord(TOO_LONG, f"{size} bytes, data.max_record_bytes = {limit}") if size > limit else value


class TextDocuments:
    """Text files, one document each."""

    def __init__(self, paths: tuple[str, ...], limit: int, raw: bool):
        """`raw`: yield bytes, for a tokenizer that accepts any."""
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
    """Records that the parent process has read."""

    def __init__(self, rows: tuple[str | BadRecord, ...], first: int, name: str):
        self._rows, self._first, self._name = rows, first, name

    def __iter__(self) -> Iterator[tuple[int, str | BadRecord]]:
        yield from enumerate(self._rows, self._first)

    def place(self, position: int) -> str:
        return f"{self._name}, row {position}"


def missing_extra(what: str, package: str, extra: str) -> RunError:
    return RunError(f"{what} needs the package {package}: pip install 'phalanx[{extra}]'.")
