"""Reads a column of Parquet files, row group by row group. `pieces` looks at them first, `piecework` reads, in a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from phalanx.data.open_file import is_url, open_binary, packed, reachable
from phalanx.data.text_records import Bad, checked, missing_extra
from phalanx.spec.errors import RunError

_ROWS = 512
"""Rows unpacked at once."""


def _library() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("Parquet", "pyarrow", "data") from None
    return pyarrow.parquet


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """The open file; whatever is wrong with it is told with its name."""
    library = _library()
    import pyarrow as pa

    if packed(path):
        raise RunError([f"{path}: Parquet packs its columns itself and is not read out of another packing; unpack it first."])
    try:
        if is_url(path):
            with reachable(path, passing=(pa.ArrowException,)), open_binary(path) as file:
                yield library.ParquetFile(file)
        else:
            with library.ParquetFile(path) as opened:
                yield opened
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError([f"{path} is no Parquet file, or is cut off or damaged ({reason}): copy or make it again."]) from None


def row_groups(path: str, field: str) -> list[int]:
    """Bytes of each row group of a file whose column `field` is there and holds text; else RunError."""
    with _open(path) as file:
        _check(path, field, file.schema_arrow)
        meta = file.metadata
        return [meta.row_group(group).total_byte_size for group in range(meta.num_row_groups)]


def _check(path: str, field: str, schema: Any) -> None:
    import pyarrow as pa

    kind: Any = None
    for number, name in enumerate(_steps(field, schema.names)):
        inner: Any = schema if number == 0 else kind
        if (number and not pa.types.is_struct(kind)) or inner.get_field_index(name) < 0:
            raise RunError(
                [
                    f'{path} has no column "{field}"; its columns are {", ".join(schema.names) or "none"}. '
                    "Set data.field (--field) to the one that holds the text."
                ]
            )
        kind = inner.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    if not any(is_text(kind) for is_text in texts):
        raise RunError([f'{path}: column "{field}" is {kind}, not text; set data.field (--field) to one that is.'])


def _steps(field: str, names: list[str]) -> list[str]:
    return [field] if field in names else field.split(".")


class ParquetRows:
    """The texts of row groups first … last (not included) of one file."""

    def __init__(self, path: str, field: str, limit: int, first: int, last: int):
        self._path, self._field, self._limit, self._first, self._last = path, field, limit, first, last

    def __iter__(self) -> Iterator[tuple[int, str | Bad]]:
        with _open(self._path) as file:
            row = sum(file.metadata.row_group(group).num_rows for group in range(self._first))
            steps = _steps(self._field, file.schema_arrow.names)
            groups = list(range(self._first, self._last))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[".".join(steps)], use_threads=False):
                for value in _values(batch, steps):
                    yield row, checked(value, self._field, self._limit)
                    row += 1

    def place(self, position: int) -> str:
        return f"{self._path}, row {position}"


def _values(batch: Any, steps: list[str]) -> list[Any]:
    """A column as Python values: bytes where it is not text after all, for files are not held to what they say."""
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
