"""Cuts a source into pieces and tokenizes each into one part of the token files, in worker processes that run `serve`. The cuts depend on
the source alone, so that the files are the same for any number of processes."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx.data import chat
from phalanx.data.files import SourceFile, find_files, is_compressed, is_web, paths_key, stdlib_files
from phalanx.data.preferences import PreferenceRenderer
from phalanx.data.record_readers import (
    EMPTY,
    BadRecord,
    Place,
    checked_text,
    dataset_rows,
    json_lines,
    parquet_rows,
    row_groups,
    row_place,
    saved_dataset_files,
    text_document,
    text_in,
)
from phalanx.data.token_files import VERSION, Part, TokenWriter, replace_text
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.run import Data, Source
from phalanx.spec.sources import kinds

MASKED = ("chat", "preferences")
"""Kinds of sources of which only answers are targets."""
_PIECE = 16 << 20
"""Bytes of a piece: seconds of work, so that a kill loses little and all processes finish at about the same time."""
_MOST_PIECES = 4096
"""A larger corpus gets larger pieces, so that its folder of token files opens quickly."""
_MOST_FILES = 4096
"""Maximum number of text files in one piece."""
DONE = ".done"
_BATCH = 1 << 20
"""Characters per call of the tokenizer."""
_BATCH_RECORDS = 4096
_EXAMPLES = 3
"""Bad records of each reason whose positions are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeSpec:
    """How records become ids: the settings of a worker."""

    kind: str
    source: Source
    data: Data
    template: str | None
    """chat: the text of the template."""
    template_name: str

    @property
    def field(self) -> str:
        return self.source.field or ("messages" if self.kind == "chat" else "text")

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        return ", ".join(self.source.paths) or self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The unit of work of a tokenizer process."""

    number: int = 0
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


@dataclass(frozen=True, kw_only=True)
class TokenizePlan:
    """A source to tokenize."""

    spec: TokenizeSpec
    tokenizer: Tokenizer
    files: list[SourceFile]

    @property
    def documents(self) -> list[str]:
        """memory: the texts."""
        return [text for text in self.spec.source.documents if text]

    @property
    def size(self) -> int | None:
        """Stored bytes; None: unknown."""
        sizes = [file.size for file in self.files if file.size is not None]
        return sum(sizes) if sizes and len(sizes) == len(self.files) else None

    @property
    def key(self) -> str:
        """A hash of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the ids: equal identities have equal token files."""
        spec, source = self.spec, self.spec.source
        identity: dict[str, Any] = {
            "version": VERSION,
            "source": spec.kind,
            "tokenizer": self.tokenizer.sha256,
            "max_record_bytes": spec.data.max_record_bytes,
            "files": [list(asdict(file).values()) for file in self.files],
        }
        if spec.kind in ("jsonl", "parquet", "hf", "chat"):
            identity["field"] = spec.field
        if spec.kind == "hf":
            identity |= {"dataset": list(source.paths), "split": source.split, "config": source.config}
        if spec.kind == "memory":
            identity["documents"] = hashlib.sha256("\0".join(self.documents).encode(errors="replace")).hexdigest()
        if spec.kind == "preferences":
            identity |= {name: getattr(source, name) for name in ("prompt_field", "chosen_field", "rejected_field", "template")}
        if spec.template is not None:
            identity |= {"prompt_field": source.prompt_field, "answer_field": source.answer_field}
            identity["template"] = hashlib.sha256(spec.template.encode()).hexdigest()
            # Templates write the texts of special tokens, which are not in tokenizer.json.
            identity["special_tokens"] = dict(sorted(self.tokenizer.special.items()))
            identity["end"] = "of the template"  # earlier versions added the end token
        return identity

    def pieces(self) -> Iterator[Piece]:
        return (replace(piece, number=number) for number, piece in enumerate(self._cut()))

    def _cut(self) -> Iterator[Piece]:
        spec, files = self.spec, self.files
        size = max(_PIECE, sum(file.size or 0 for file in files) // _MOST_PIECES)
        if spec.kind == "memory":
            return _of_rows(self.documents, size)
        if spec.kind == "hf":
            return _of_rows(dataset_rows(spec.source, spec.field, spec.data.max_record_bytes), size)
        if spec.kind == "parquet":
            return _of_row_groups([(file, row_groups(file.path, spec.field)) for file in files], size)
        if spec.kind in ("text", "stdlib"):
            return _of_documents(files, size)
        return _of_lines(files, size)


def make_plan(source: Source, data: Data, tokenizer: Tokenizer) -> TokenizePlan:
    """Plans the pieces from file names and sizes. Reads no file but the template."""
    kind = text_kind(source)
    needs_template = kind == "chat" or (kind == "preferences" and (source.template or tokenizer.chat_template))
    name, template = chat.template_of(source, tokenizer) if needs_template else ("", None)
    if template is not None:
        chat.ChatTemplate(template, name, tokenizer.special)  # reports errors here instead of in a worker
    spec = TokenizeSpec(kind=kind, source=source, data=data, template=template, template_name=name)
    return TokenizePlan(spec=spec, tokenizer=tokenizer, files=source_files(source, kind))


def text_kind(source: Source) -> str:
    """The kind of a source of text. Raises RunError if its files are of several kinds, or token files."""
    several = kinds(source)
    if len(several) > 1:
        raise RunError(
            f"{paths_key(source)} names files of several kinds ({', '.join(several)}); set the kind (data.source, --source)."
        )
    if several == ["tokens"]:
        raise RunError(f"{paths_key(source)} holds token files already; there is nothing to tokenize.")
    return several[0] if several else "text"


def source_files(source: Source, kind: str) -> list[SourceFile]:
    if kind == "memory":
        return []
    if kind == "stdlib":
        return stdlib_files()
    return saved_dataset_files(source) if kind == "hf" else find_files(source, kind)


def _of_lines(files: Sequence[SourceFile], size: int) -> Iterator[Piece]:
    """Byte ranges; a range has the lines that begin in it. A compressed file can only be read from its beginning."""
    for file in files:
        if file.size is None or is_compressed(file.path) or is_web(file.path):
            yield Piece(paths=(file.path,), size=file.size or 0)
            continue
        for begin in range(0, file.size, size):
            end = min(begin + size, file.size)
            yield Piece(paths=(file.path,), start=begin, stop=end, size=end - begin)


def _of_documents(files: Sequence[SourceFile], size: int) -> Iterator[Piece]:
    paths, total = list[str](), 0
    for file in files:
        if paths and (total + (file.size or 0) > size or len(paths) == _MOST_FILES):
            yield Piece(paths=tuple(paths), size=total)
            paths, total = [], 0
        paths.append(file.path)
        total += file.size or 0
    yield Piece(paths=tuple(paths), size=total)


def _of_row_groups(files: Sequence[tuple[SourceFile, list[int]]], size: int) -> Iterator[Piece]:
    for file, groups in files:
        begin, total = 0, 0
        stored = (file.size or 0) / max(1, sum(groups))  # stored bytes per byte of a row group
        for group, length in enumerate(groups):
            total += length
            if total >= size or group == len(groups) - 1:
                yield Piece(paths=(file.path,), start=begin, stop=group + 1, size=int(total * stored))
                begin, total = group + 1, 0


def _of_rows(rows: Iterable[str | BadRecord], size: int) -> Iterator[Piece]:
    first, batch, length = 0, list[str | BadRecord](), 0
    for row in rows:
        batch.append(row)
        length += len(row) if isinstance(row, str) else 0
        if length >= size or len(batch) >= size >> 4:  # many empty rows make a piece, too
            yield Piece(start=first, rows=tuple(batch), size=length)
            first, batch, length = first + len(batch), [], 0
    if batch:
        yield Piece(start=first, rows=tuple(batch), size=length)


class PieceProgress(NamedTuple):
    """Progress within pieces that are not finished."""

    bytes: int = 0
    tokens: int = 0


@dataclass(kw_only=True, slots=True)
class PieceResult:
    """A finished piece."""

    number: int
    size: int
    """Bytes of the piece."""
    part: Part | None = None
    """None if the piece has no good record."""
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    """(reason, position, detail) of the first bad records of each reason."""

    @property
    def bad(self) -> int:
        return self.skipped.total() - self.skipped[EMPTY]

    def write(self, folder: Path, name: str) -> None:
        part = asdict(self.part) if self.part else None
        table = {"number": self.number, "part": part, "skipped": dict(self.skipped), "examples": self.examples}
        replace_text(folder / f"{name}{DONE}", json.dumps(table))

    @staticmethod
    def read(folder: Path, piece: Piece) -> PieceResult | None:
        """The stored result of a finished piece; None if it is not finished, or its files have changed since."""
        path = folder / piece.part
        try:
            table = json.loads(path.with_suffix(DONE).read_text())
            part = Part(**table["part"]) if table["part"] else None
            if part and path.with_suffix(".index").stat().st_size != (part.documents + 1) * 8:
                return None
            if part and path.with_suffix(".tokens").stat().st_size not in (part.tokens * 2, part.tokens * 4):
                return None
            examples = [(reason, place, detail) for reason, place, detail in table["examples"]]
            skipped = Counter(table["skipped"])
            return PieceResult(number=table["number"], size=piece.size, part=part, skipped=skipped, examples=examples)
        except (OSError, ValueError, KeyError, TypeError):
            return None


class PieceTokenizer:
    """Tokenizes pieces with one tokenizer and one template."""

    def __init__(self, spec: TokenizeSpec, folder: Path):
        self._spec, self._folder = spec, folder
        self._tokenizer = open_tokenizer(spec.data.tokenizer, spec.data.end_token)
        self._chat: chat.ChatRenderer | None = None
        self._preferences: PreferenceRenderer | None = None
        template = None
        if spec.template is not None:
            template = chat.ChatTemplate(spec.template, spec.template_name, self._tokenizer.special)
        if spec.kind == "preferences":
            self._preferences = PreferenceRenderer(template, spec.source)
        elif template is not None:
            self._chat = chat.ChatRenderer(template, spec.field, spec.source.prompt_field, spec.source.answer_field)

    def run(self, piece: Piece, report: Callable[[PieceProgress], None]) -> PieceResult:
        """Write the part of one piece. `report` receives the progress after every batch of records."""
        result = PieceResult(number=piece.number, size=piece.size)
        try:
            writer = TokenWriter(self._folder, piece.part, self._tokenizer, masked=self._spec.kind in MASKED)
            try:
                if self._write(piece, writer, result, report):
                    result.part = writer.close()
                    result.write(self._folder, piece.part)
            finally:
                writer.discard()
        except OSError as error:  # errors of reading are RunErrors
            raise RunFailed(
                f"{self._folder} cannot be written ({error.strerror or error}): free space or make it writable, and start again."
            ) from None
        return result

    def _write(self, piece: Piece, writer: TokenWriter, result: PieceResult, report: Callable[[PieceProgress], None]) -> bool:
        """False if the piece was abandoned because it has more bad records than the source may have."""
        batch: list[Any] = []
        length = read = 0
        for place, record in records(self._spec, piece, raw=self._spec.data.tokenizer == "byte"):
            try:
                value = self._value(record)
            except BadRecord as bad:
                result.skipped[bad.reason] += 1
                if result.skipped[bad.reason] <= _EXAMPLES:
                    result.examples.append((bad.reason, place(), bad.detail))
                if result.bad > self._spec.data.max_bad_records:
                    return False
                continue
            if not value:
                result.skipped[EMPTY] += 1
                continue
            batch += value if isinstance(value, tuple) else (value,)
            length += sum(len(text.text) for text in value) if isinstance(value, tuple) else len(_text(value))
            if length >= _BATCH or len(batch) >= _BATCH_RECORDS:
                self._encode(batch, writer)
                read += length
                batch, length = [], 0
                report(PieceProgress(bytes=min(read, piece.size), tokens=writer.tokens))
        self._encode(batch, writer)
        return True

    def _encode(self, batch: list[Any], writer: TokenWriter) -> None:
        if self._spec.kind in MASKED:
            encoded = [chat.encode_document(rendered, self._tokenizer) for rendered in batch]
            writer.add_batch([ids for ids, _ in encoded], [mask for _, mask in encoded])
        elif batch and isinstance(batch[0], bytes):
            writer.add_batch([np.frombuffer(content, dtype=np.uint8) for content in batch])
        else:
            writer.add_batch(self._tokenizer.encode_batch(batch))

    def _value(self, record: Any) -> str | bytes | chat.Rendered | tuple[chat.Rendered, ...]:
        """The text of a record, or the two texts of a pair; raises BadRecord if it has none."""
        if self._preferences is not None and isinstance(record, dict):
            return self._preferences.render(record)
        if self._chat is not None and isinstance(record, dict):
            return self._chat.render(record)
        return text_of(record, self._spec)


def records(spec: TokenizeSpec, piece: Piece, *, raw: bool) -> Iterator[tuple[Place, Any]]:
    """The records of a piece with their positions. `raw`: text files as bytes."""
    limit = spec.data.max_record_bytes
    if piece.rows is not None:
        return ((row_place(spec.name, number), row) for number, row in enumerate(piece.rows, piece.start))
    if spec.kind == "parquet":
        assert piece.stop is not None, "a piece of Parquet is a range of row groups"
        return parquet_rows(piece.paths[0], spec.field, piece.start, piece.stop)
    if spec.kind in ("text", "stdlib"):
        return ((partial(str, path), text_document(path, limit, raw=raw)) for path in piece.paths)
    return json_lines(piece.paths[0], limit, piece.start, piece.stop)


def text_of(record: Any, spec: TokenizeSpec) -> str | bytes:
    """The text of a record that is no conversation; raises BadRecord if it has none."""
    if isinstance(record, BadRecord):
        raise record
    if spec.kind == "parquet":
        return checked_text(record, spec.field, spec.data.max_record_bytes)
    if isinstance(record, dict):
        return text_in(record, spec.field, spec.data.max_record_bytes)
    assert isinstance(record, str | bytes)
    return record


def _text(value: str | bytes | chat.Rendered) -> str | bytes:
    return value.text if isinstance(value, chat.Rendered) else value


def serve(connection: Any) -> None:
    """The main loop of a worker: tokenize pieces from the connection until it closes."""
    try:
        spec, folder = connection.recv()
        tokenizer: PieceTokenizer | None = None
        while (piece := connection.recv()) is not None:
            try:
                tokenizer = tokenizer or PieceTokenizer(spec, folder)
                connection.send(tokenizer.run(piece, connection.send))
            except (RunError, RunFailed) as error:
                connection.send(error)
            except BaseException:  # a panic of the tokenizers library is not an Exception
                where = ", ".join(piece.paths[:1])
                connection.send(RunFailed(f"{traceback.format_exc()}\nThis happened while reading {where}."))
    except (EOFError, ConnectionError):
        return  # the parent is gone
