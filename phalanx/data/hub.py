"""Hugging Face datasets, saved on disk or fetched by name, as rows. `ingest` reads them and hands them to the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from phalanx.data.listing import Found, files_of, key_of
from phalanx.data.text_records import Bad, missing_extra, text_in
from phalanx.spec.errors import RunError
from phalanx.spec.run import Source


def saved_files(source: Source) -> list[Found]:
    """The files of a dataset saved on disk; none for one that is known by name only."""
    path = _path(source)
    return files_of(source, "hf") if os.path.isdir(os.path.expanduser(path)) else []


def rows(source: Source, field: str, limit: int) -> Iterator[str | Bad]:
    """The text of every row, in order; RunError where there is no such dataset, split or column."""
    data = _open(source)
    top = field if field in (data.column_names or [field]) else field.split(".")[0]
    if data.column_names and top not in data.column_names:
        raise RunError(
            [
                f'{_path(source)} has no column "{field}"; its columns are {", ".join(data.column_names)}. '
                "Set data.field (--field) to the one that holds the text."
            ]
        )
    if data.column_names:
        data = data.select_columns([top])
    try:
        for row in data:
            yield text_in(row, field, limit)
    except RunError:
        raise
    except Exception as error:  # the network, a damaged file, a failing script: the library has one for each
        raise RunError([f"{_path(source)} cannot be read to its end ({type(error).__name__}: {error})."]) from None


def _path(source: Source) -> str:
    if len(source.paths) != 1:
        raise RunError([f'{key_of(source)} names {len(source.paths)} datasets; source = "hf" reads exactly one.'])
    return source.paths[0]


def _open(source: Source) -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_extra('source = "hf"', "datasets", "datasets") from None
    path = os.path.expanduser(_path(source))
    try:
        if not os.path.isdir(path) or not _saved(path):
            return datasets.load_dataset(path, source.config, split=source.split, streaming=source.streaming)
        found = datasets.load_from_disk(path)
    except Exception as error:
        raise RunError(
            [
                f'{key_of(source)}: the dataset "{path}" (split "{source.split}") cannot be opened ({type(error).__name__}: {error}).'
            ]
        ) from None
    if isinstance(found, dict):
        if source.split not in found:
            raise RunError([f'{path} has no split "{source.split}"; its splits are {", ".join(found)}. Set data.split.'])
        return found[source.split]
    return found


def _saved(path: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))
