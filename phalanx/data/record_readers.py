"""Reads the records of text files, JSON Lines, Parquet and Hugging Face datasets. A bad record never stops the others, so readers yield the
reason (`BadRecord`) in its place; a bad file raises a RunError that names it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

from phalanx.data.files import (
    BLOCK,
    SourceFile,
    blocks,
    decompressed,
    find_files,
    is_compressed,
    is_url,
    open_binary,
    paths_key,
    require,
    storage_errors,
)
from phalanx.spec.errors import RunError
from phalanx.spec.hub import remote_name
from phalanx.spec.json_value import JsonObject
from phalanx.spec.run import Source

BOM = b"\xef\xbb\xbf"
_ROWS = 512
"""Rows of Parquet per batch."""


class BadRecord(Exception):
    """A record that cannot be used: the reason, one of a few constants by which bad records are counted, and details for people."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


Place = Callable[[], str]
"""Describes where a record is. Called only for the few records that are shown."""
TOO_LONG, NOT_UTF8, BROKEN, NOT_OBJECT = "too long", "not UTF-8", "broken JSON", "not an object"
MISSING, NOT_TEXT = "field missing", "field is not text"
EMPTY = "empty"
"""Counted like the other reasons, but not an error: it does not count towards the limit."""


def lines(content: Iterable[bytes], limit: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Lines that begin before `stop`, each with its first byte; None for a line of more than `limit` bytes, which is never held
    in memory. `content`: the blocks from byte `start` on, the beginning of a line."""
    offset, pending, size = start, list[bytes](), 0
    for block in content if stop is None or start < stop else ():
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
        block = file.read(min(BLOCK, stop - 1 - position))
        if not block:
            break
        if (end := block.find(b"\n")) >= 0:
            file.seek(position + end + 1)
            return position + end + 1
        position += len(block)
    return stop


def json_lines(
    path: str, limit: int, start: int = 0, stop: int | None = None
) -> Iterator[tuple[Place, JsonObject | BadRecord]]:
    """Records of one file, or of the lines that begin in start … stop of an uncompressed file."""
    with storage_errors(path):
        for number, (offset, line) in enumerate(_lines_of(path, limit, start, stop), 1):
            record = _parse(line, limit, first=offset == 0)
            if record is not None:
                yield partial(_line_at, path, offset) if start else partial("{}, line {}".format, path, number), record


def _lines_of(path: str, limit: int, start: int, stop: int | None) -> Iterator[tuple[int, bytes | None]]:
    if stop is None or is_compressed(path):
        yield from lines(decompressed(path), limit)
        return
    with open_binary(path) as file:
        yield from lines(blocks(file), limit, next_line(file, start, stop), stop)


def _line_at(path: str, offset: int) -> str:
    number = 1
    with open_binary(path) as file:
        while offset and (block := file.read(min(BLOCK, offset))):
            number, offset = number + block.count(b"\n"), offset - len(block)
    return f"{path}, line {number}"


def _parse(line: bytes | None, limit: int, *, first: bool) -> dict[str, Any] | BadRecord | None:
    """None: an empty line."""
    if line is None:
        return BadRecord(TOO_LONG, f"more than data.max_record_bytes = {limit}")
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


def row_place(name: str, row: int) -> Place:
    return partial("{}, row {}".format, name, row)


def text_in(record: Any, field: str, limit: int) -> str:
    """The text of a record's field. Dots in the name reach into nested objects, unless the whole name is a field itself."""
    value = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            fields = ", ".join(map(str, list(record)[:10])) or "none"
            raise BadRecord(MISSING, f'no "{field}"; its fields are: {fields}')
        value = value[name]
    return checked_text(value, field, limit)


def checked_text(value: Any, field: str, limit: int) -> str:
    """The value of a field; raises BadRecord if it is no valid text."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord(NOT_UTF8, str(error)) from None
    if value is None:
        raise BadRecord(MISSING, f'"{field}" is null')
    if not isinstance(value, str):
        raise BadRecord(NOT_TEXT, f'"{field}" is a {type(value).__name__}')
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:  # an unpaired surrogate, written as an escape
        raise BadRecord(NOT_UTF8, f"an unpaired surrogate at {error.start}: {value[error.start]!r}") from None
    if size > limit:
        raise BadRecord(TOO_LONG, f"{size} bytes, data.max_record_bytes = {limit}")
    return value


def text_document(path: str, limit: int, *, raw: bool) -> str | bytes | BadRecord:
    """A text file as one document. `raw`: as bytes, for a tokenizer that accepts any."""
    content = bytearray()
    for block in decompressed(path):
        content += block
        if len(content) > limit:
            return BadRecord(TOO_LONG, f"more than data.max_record_bytes = {limit}")
    if raw:
        return bytes(content)
    try:
        return content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(NOT_UTF8, f"byte 0x{content[error.start]:02x} at {error.start}")


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    """Opens a file; errors name it."""
    library = require("pyarrow.parquet", "Parquet", "data")
    import pyarrow as pa

    if is_compressed(path):
        raise RunError(
            f"{path}: Parquet compresses its columns itself and is not read from a compressed file; decompress it first."
        )
    try:
        if is_url(path):
            with storage_errors(path, passing=(pa.ArrowException,)), open_binary(path) as file:
                yield library.ParquetFile(file)
        else:
            with library.ParquetFile(path) as opened:
                yield opened
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"{path} is not a Parquet file, or is cut off or damaged ({reason}): copy or make it again.") from None


def row_groups(path: str, field: str) -> list[int]:
    """Bytes of each row group. Raises RunError if the file has no text column `field`."""
    with _open_parquet(path) as file:
        _check(path, field, file.schema_arrow)
        meta = file.metadata
        return [meta.row_group(group).total_byte_size for group in range(meta.num_row_groups)]


def _check(path: str, field: str, schema: Any) -> None:
    import pyarrow as pa

    kind: Any = pa.struct(schema)
    for name in _steps(field, schema.names):
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            raise RunError(
                f'{path} has no column "{field}"; its columns are {", ".join(schema.names) or "none"}. '
                "Set data.field (--field) to the one that holds the text."
            )
        kind = kind.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        raise RunError(f'{path}: column "{field}" is {kind}, not text; set data.field (--field) to one that is.')


def _steps(field: str, names: list[str]) -> list[str]:
    return [field] if field in names else field.split(".")


def parquet_rows(path: str, field: str, first: int, last: int) -> Iterator[tuple[Place, Any]]:
    """The values of row groups first … last (exclusive) of one file."""
    with _open_parquet(path) as file:
        row = sum(file.metadata.row_group(group).num_rows for group in range(first))
        steps = _steps(field, file.schema_arrow.names)
        groups = list(range(first, last))
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[".".join(steps)], use_threads=False):
            for value in _values(batch, steps):
                yield row_place(path, row), value
                row += 1


def _values(batch: Any, steps: list[str]) -> list[Any]:
    """A column as Python values: bytes if a column of strings is not valid UTF-8."""
    import pyarrow as pa
    import pyarrow.compute as compute

    column = batch.column(0)
    if len(steps) > 1:
        column = compute.struct_field(column, steps[1:])
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = column.view(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()).to_pylist()
    return values


def saved_dataset_files(source: Source) -> list[SourceFile]:
    """The files of a dataset saved on disk; empty for a dataset that is known by name only."""
    path = _dataset_path(source)
    return find_files(source, "hf") if os.path.isdir(os.path.expanduser(path)) else []


def dataset_rows(source: Source, field: str, limit: int) -> Iterator[str | BadRecord]:
    """The text of every row, in order. Raises RunError if the dataset, the split or the column does not exist."""
    data = _open_dataset(source)
    if data.column_names:
        top = _steps(field, data.column_names)[0]
        if top not in data.column_names:
            raise RunError(
                f'{_dataset_path(source)} has no column "{field}"; its columns are {", ".join(data.column_names)}. '
                "Set data.field (--field) to the one that holds the text."
            )
        data = data.select_columns([top])
    try:
        for row in data:
            try:
                text: str | BadRecord = text_in(row, field, limit)
            except BadRecord as bad:
                text = bad
            yield text
    except Exception as error:  # network, damaged file, failing script: each has exceptions of its own
        raise RunError(f"{_dataset_path(source)} cannot be read to its end ({type(error).__name__}: {error}).") from None


def _dataset_path(source: Source) -> str:
    if len(source.paths) != 1:
        raise RunError(f'{paths_key(source)} names {len(source.paths)} datasets; source = "hf" reads exactly one.')
    return source.paths[0]


def _without_network(name: str) -> str:
    return (
        f" Without a network, run `hf download {name} --repo-type dataset --local-dir FOLDER` where there is one, copy FOLDER here, and "
        "name it in paths instead."
    )


def _open_dataset(source: Source) -> Any:
    datasets = require("datasets", 'source = "hf"', "datasets")
    path = os.path.expanduser(_dataset_path(source))
    try:
        if not any(os.path.exists(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json")):
            name = remote_name(path)
            options = {} if name is None or str(name) == name.repository else {"revision": name.commit or name.revision}
            path = path if name is None else name.repository
            return datasets.load_dataset(path, source.config, split=source.split, streaming=source.streaming, **options)
        saved = datasets.load_from_disk(path)
    except Exception as error:
        raise RunError(
            f'{paths_key(source)}: the dataset "{path}" (split "{source.split}") cannot be opened ({type(error).__name__}: {error}).'
            + (_without_network(path) if isinstance(error, ConnectionError) else "")
        ) from None
    if isinstance(saved, dict) and source.split not in saved:
        raise RunError(f'{path} has no split "{source.split}"; its splits are {", ".join(saved)}. Set data.split.')
    return saved[source.split] if isinstance(saved, dict) else saved
