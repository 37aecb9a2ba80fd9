"""Cuts a source into pieces that are tokenized separately, each into one part of the token files. `data/ingest` makes the plan.

The cuts depend on the source alone, never on the number of processes, so the files are the same for any number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from phalanx.data.chat import ChatTemplate, template_of
from phalanx.data.files import SourceFile, find_files, is_compressed, is_web, paths_key, stdlib_files
from phalanx.data.records import BadRecord, dataset_rows, row_groups, saved_dataset_files
from phalanx.data.token_files import VERSION
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError
from phalanx.spec.run import Data, Source
from phalanx.spec.sources import kinds

_PIECE = 16 << 20
"""Bytes of a piece: seconds of work, so that a kill loses little and all processes finish at about the same time."""
_MOST_PIECES = 4096
"""A larger corpus gets larger pieces, so that its folder of token files opens quickly."""
_MOST_FILES = 4096
"""Maximum number of text files in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeSpec:
    """How records become ids: the settings of a worker."""

    kind: str
    field: str
    max_record_bytes: int
    tokenizer: str
    end_token: str | None
    template: str | None
    """chat: the text of the template."""
    template_name: str
    prompt_field: str
    answer_field: str
    name: str
    """Name of the source in messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The unit of work of a tokenizer process."""

    number: int
    paths: tuple[str, ...] = ()
    start: int = 0
    """First byte, row group or row."""
    stop: int | None = None
    """End byte or row group (exclusive); None: the whole file."""
    rows: tuple[str | BadRecord, ...] | None = None
    """The records themselves, if the parent process reads them."""
    size: int = 0
    """Bytes, for progress reports."""

    @property
    def part(self) -> str:
        return f"part-{self.number:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizePlan:
    """A source to tokenize."""

    spec: TokenizeSpec
    tokenizer: Tokenizer
    paths_key: str
    """The run file's name for the paths."""
    identity: dict[str, Any]
    """Everything that determines the ids: equal identities have equal token files."""
    size: int | None
    """Stored bytes; None: unknown."""
    pieces: Callable[[], Iterator[Piece]]

    @property
    def key(self) -> str:
        """A hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def masked(self) -> bool:
        return self.spec.kind == "chat"


def make_plan(source: Source, data: Data, tokenizer: Tokenizer) -> TokenizePlan:
    """Plans the pieces from file names and sizes. Reads no file but the template."""
    kind = _kind(source)
    if kind == "tokens":
        raise RunError(f"{paths_key(source)} holds token files already; there is nothing to tokenize.")
    name, template = template_of(source, tokenizer) if kind == "chat" else ("", None)
    if template is not None:
        ChatTemplate(template, name, tokenizer.special)  # reports errors here instead of in a worker
    spec = TokenizeSpec(
        kind=kind,
        field=source.field or ("messages" if kind == "chat" else "text"),
        max_record_bytes=data.max_record_bytes,
        tokenizer=tokenizer.name,
        end_token=data.end_token,
        template=template,
        template_name=name,
        prompt_field=source.prompt_field,
        answer_field=source.answer_field,
        name=", ".join(source.paths) or kind,
    )
    files = _files(source, kind)
    sizes = [file.size for file in files]
    documents = [text for text in source.documents if text] if kind == "memory" else []
    if kind == "memory" and not documents:
        raise RunError('data.source = "memory" but data.documents holds no text; give it at least one.')
    return TokenizePlan(
        spec=spec,
        tokenizer=tokenizer,
        paths_key=paths_key(source),
        identity=_identity(source, spec, tokenizer, files, documents),
        size=sum(size or 0 for size in sizes) if files and None not in sizes else None,
        pieces=partial(_pieces, source, spec, files, documents),
    )


def _kind(source: Source) -> str:
    found = kinds(source)
    if len(found) > 1:
        raise RunError(
            f"{paths_key(source)} names files of several kinds ({', '.join(found)}); set the kind (data.source, --source)."
        )
    return found[0] if found else "text"


def _files(source: Source, kind: str) -> list[SourceFile]:
    if kind == "memory":
        return []
    if kind == "stdlib":
        return stdlib_files()
    return saved_dataset_files(source) if kind == "hf" else find_files(source, kind)


def _identity(
    source: Source, spec: TokenizeSpec, tokenizer: Tokenizer, files: Sequence[SourceFile], documents: Sequence[str]
) -> dict[str, Any]:
    identity: dict[str, Any] = {
        "version": VERSION,
        "source": spec.kind,
        "tokenizer": tokenizer.sha256,
        "max_record_bytes": spec.max_record_bytes,
        "files": [list(asdict(file).values()) for file in files],
    }
    if spec.kind in ("jsonl", "parquet", "hf", "chat"):
        identity["field"] = spec.field
    if spec.kind == "hf":
        identity |= {"dataset": list(source.paths), "split": source.split, "config": source.config}
    if spec.kind == "memory":
        identity["documents"] = hashlib.sha256("\0".join(documents).encode(errors="replace")).hexdigest()
    if spec.template is not None:
        identity |= {"prompt_field": spec.prompt_field, "answer_field": spec.answer_field}
        identity["template"] = hashlib.sha256(spec.template.encode()).hexdigest()
        # Templates write the texts of special tokens, which are not in tokenizer.json.
        identity["special_tokens"] = dict(sorted(tokenizer.special.items()))
    return identity


def _pieces(source: Source, spec: TokenizeSpec, files: Sequence[SourceFile], documents: Sequence[str]) -> Iterator[Piece]:
    size = max(_PIECE, sum(file.size or 0 for file in files) // _MOST_PIECES)
    if spec.kind == "memory":
        return _of_rows(documents, size)
    if spec.kind == "hf":
        return _of_rows(dataset_rows(source, spec.field, spec.max_record_bytes), size)
    if spec.kind == "parquet":
        return _of_row_groups([(file, row_groups(file.path, spec.field)) for file in files], size)
    if spec.kind in ("text", "stdlib"):
        return _of_documents(files, size)
    return _of_lines(files, size)


def _of_lines(files: Sequence[SourceFile], size: int) -> Iterator[Piece]:
    """Byte ranges; a range has the lines that begin in it. A compressed file can only be read from its beginning."""
    number = 0
    for file in files:
        whole = file.size is None or is_compressed(file.path) or is_web(file.path)
        ends = [None] if whole else [*range(size, file.size or 0, size), file.size]
        begin = 0
        for end in ends:
            length = (file.size or 0) if end is None else end - begin
            yield Piece(number=number, paths=(file.path,), start=begin, stop=end, size=length)
            number, begin = number + 1, end or 0


def _of_documents(files: Sequence[SourceFile], size: int) -> Iterator[Piece]:
    number, paths, total = 0, list[str](), 0
    for file in files:
        if paths and (total + (file.size or 0) > size or len(paths) == _MOST_FILES):
            yield Piece(number=number, paths=tuple(paths), size=total)
            number, paths, total = number + 1, [], 0
        paths.append(file.path)
        total += file.size or 0
    yield Piece(number=number, paths=tuple(paths), size=total)


def _of_row_groups(files: Sequence[tuple[SourceFile, list[int]]], size: int) -> Iterator[Piece]:
    number = 0
    for file, groups in files:
        begin, total = 0, 0
        stored = (file.size or 0) / max(1, sum(groups))  # stored bytes per byte of a row group
        for group, length in enumerate(groups):
            total += length
            if total >= size or group == len(groups) - 1:
                yield Piece(number=number, paths=(file.path,), start=begin, stop=group + 1, size=int(total * stored))
                number, begin, total = number + 1, group + 1, 0


def _of_rows(rows: Iterable[str | BadRecord], size: int) -> Iterator[Piece]:
    number, first, batch, length = 0, 0, list[str | BadRecord](), 0
    for row in rows:
        batch.append(row)
        length += len(row) if isinstance(row, str) else 0
        if length >= size or len(batch) >= size >> 4:  # many empty rows make a piece, too
            yield Piece(number=number, start=first, rows=tuple(batch), size=length)
            number, first, batch, length = number + 1, first + len(batch), [], 0
    if batch:
        yield Piece(number=number, start=first, rows=tuple(batch), size=length)
