"""Reads text columns of Parquet files and of Hugging Face datasets. `data/source_pieces` plans them.

Workers read Parquet files row group by row group; the parent process reads datasets and hands rows to the workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from phalanx.data.files import SourceFile, find_files, is_compressed, is_url, open_binary, paths_key, storage_errors
from phalanx.data.text_records import BadRecord, checked_text, missing_extra, text_in
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

_ROWS = 512
"""Rows per batch."""


def _library() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("Parquet", "pyarrow", "data") from None
    return pyarrow.parquet


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    """Opens a file; errors name it."""
    library = _library()
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

    kind: Any = None
    for number, name in enumerate(_steps(field, schema.names)):
        inner: Any = schema if number == 0 else kind
        if (number and not pa.types.is_struct(kind)) or inner.get_field_index(name) < 0:
            raise RunError(
                f'{path} has no column "{field}"; its columns are {", ".join(schema.names) or "none"}. '
                "Set data.field (--field) to the one that holds the text."
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
        raise RunError(f'{path}: column "{field}" is {kind}, not text; set data.field (--field) to one that is.')


def _steps(field: str, names: list[str]) -> list[str]:
    return [field] if field in names else field.split(".")


class ParquetRows:
    """The texts of row groups first … last (exclusive) of one file."""

    def __init__(self, path: str, field: str, limit: int, first: int, last: int):
        self._path, self._field, self._limit, self._first, self._last = path, field, limit, first, last

    def __iter__(self) -> Iterator[tuple[int, str | BadRecord]]:
        with _open_parquet(self._path) as file:
            row = sum(file.metadata.row_group(group).num_rows for group in range(self._first))
            steps = _steps(self._field, file.schema_arrow.names)
            groups = list(range(self._first, self._last))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[".".join(steps)], use_threads=False):
                for value in _values(batch, steps):
                    yield row, checked_text(value, self._field, self._limit)
                    row += 1

    def place(self, position: int) -> str:
        return f"{self._path}, row {position}"


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
    top = field if field in (data.column_names or [field]) else field.split(".")[0]
    if data.column_names and top not in data.column_names:
        raise RunError(
            f'{_dataset_path(source)} has no column "{field}"; its columns are {", ".join(data.column_names)}. '
            "Set data.field (--field) to the one that holds the text."
        )
    if data.column_names:
        data = data.select_columns([top])
    try:
        for row in data:
            yield text_in(row, field, limit)
    except RunError:
        raise
    except Exception as error:  # network, damaged file, failing script: each has exceptions of its own
        raise RunError(f"{_dataset_path(source)} cannot be read to its end ({type(error).__name__}: {error}).") from None


def _dataset_path(source: Source) -> str:
    if len(source.paths) != 1:
        raise RunError(f'{paths_key(source)} names {len(source.paths)} datasets; source = "hf" reads exactly one.')
    return source.paths[0]


def _open_dataset(source: Source) -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_extra('source = "hf"', "datasets", "datasets") from None
    path = os.path.expanduser(_dataset_path(source))
    try:
        if not os.path.isdir(path) or not _saved(path):
            return datasets.load_dataset(path, source.config, split=source.split, streaming=source.streaming)
        saved = datasets.load_from_disk(path)
    except Exception as error:
        raise RunError(
            f'{paths_key(source)}: the dataset "{path}" (split "{source.split}") cannot be opened ({type(error).__name__}: {error}).'
        ) from None
    if isinstance(saved, dict):
        if source.split not in saved:
            raise RunError(f'{path} has no split "{source.split}"; its splits are {", ".join(saved)}. Set data.split.')
        return saved[source.split]
    return saved


def _saved(path: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))
