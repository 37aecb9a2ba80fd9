"""What a worker does: one piece of a source to one part of the token files. `worker/tokenize_process` is its process, `pool` its boss."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from phalanx.data import chat
from phalanx.data.chat import ChatTemplate, Rendered
from phalanx.data.source_pieces import Piece, TokenizeSpec
from phalanx.data.table_records import ParquetRows
from phalanx.data.text_records import EMPTY, BadRecord, JsonLines, Rows, TextDocuments, text_in
from phalanx.data.token_files import Part, TokenWriter, replace_text
from phalanx.data.tokenizer import Tokenizer, open_tokenizer
from phalanx.spec.errors import RunError, RunFailed

DONE = ".done"
_BATCH = 1 << 20
"""Characters that are encoded at once."""
_BATCH_RECORDS = 4096
_SHOWN = 3
"""Bad records of each reason whose places are kept."""

Value = str | bytes | Rendered | BadRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceProgress:
    """How far a worker is with the piece it is at."""

    bytes: int
    tokens: int
    documents: int


@dataclass(kw_only=True, slots=True)
class PieceResult:
    """A piece that is done."""

    number: int
    part: Part | None = None
    """None: nothing in it was good."""
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    """(reason, place, detail) of the first few of each."""
    stopped: bool = False
    """Given up, since it held more bad records than there may be in all; there is no part."""

    @property
    def bad(self) -> int:
        return self.skipped.total() - self.skipped[EMPTY]

    def write(self, folder: Path, name: str) -> None:
        part = asdict(self.part) if self.part else None
        table = {"number": self.number, "part": part, "skipped": dict(self.skipped), "examples": self.examples}
        replace_text(folder / f"{name}{DONE}", json.dumps(table))

    @staticmethod
    def read(folder: Path, name: str) -> PieceResult | None:
        """What was written when this piece was finished; None if it was not, or the part is no longer what it was."""
        try:
            table = json.loads((folder / f"{name}{DONE}").read_text())
            part = Part(**table["part"]) if table["part"] else None
            if part and (folder / f"{name}.index").stat().st_size != (part.documents + 1) * 8:
                return None
            if part and (folder / f"{name}.tokens").stat().st_size not in (part.tokens * 2, part.tokens * 4):
                return None
            examples = [(reason, place, detail) for reason, place, detail in table["examples"]]
            return PieceResult(number=table["number"], part=part, skipped=Counter(table["skipped"]), examples=examples)
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Reader(Protocol):
    """Records of a piece, each with a position whose place can be told."""

    def __iter__(self) -> Iterator[tuple[int, Any]]: ...
    def place(self, position: int) -> str: ...


class PieceTokenizer:
    """A recipe with its tokenizer loaded."""

    def __init__(self, recipe: TokenizeSpec, folder: Path, max_bad: int):
        self._recipe, self._folder, self._max_bad = recipe, folder, max_bad
        self._words: Tokenizer = open_tokenizer(recipe.tokenizer, recipe.end_token)
        self._chat: chat.ChatRenderer | None = None
        if recipe.template is not None:
            template = ChatTemplate(recipe.template, recipe.template_name, self._words.special)
            self._chat = chat.ChatRenderer(template, recipe.field, recipe.prompt_field, recipe.answer_field)

    def do(self, piece: Piece, report: Callable[[PieceProgress], None]) -> PieceResult:
        result = PieceResult(number=piece.number)
        try:
            writer = TokenWriter(self._folder, piece.part, self._words, masked=self._chat is not None)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        try:
            self._write(piece, writer, result, report)
            if result.stopped:
                writer.discard()
                return result
            result.part = writer.close()
            result.write(self._folder, piece.part)
        except OSError as error:  # what goes wrong while reading is a RunError by now
            writer.discard()
            raise _unwritable(self._folder, error) from None
        except BaseException:
            writer.discard()
            raise
        return result

    def _write(self, piece: Piece, writer: TokenWriter, result: PieceResult, report: Callable[[PieceProgress], None]) -> None:
        batch: list[Any] = []
        length = read = 0
        reader = self._reader(piece)
        for position, record in reader:
            value = self._value(record)
            if isinstance(value, BadRecord):
                self._note(result, value, reader, position)
                if result.bad > self._max_bad:
                    result.stopped = True
                    return
                continue
            if not value:
                result.skipped[EMPTY] += 1
                continue
            batch.append(value)
            length += len(value.text) if isinstance(value, Rendered) else len(value)
            if length >= _BATCH or len(batch) >= _BATCH_RECORDS:
                self._encode(batch, writer)
                read += length
                batch, length = [], 0
                report(PieceProgress(bytes=min(read, piece.size), tokens=writer.tokens, documents=writer.documents))
        self._encode(batch, writer)

    def _encode(self, batch: list[Any], writer: TokenWriter) -> None:
        if self._chat is not None:
            encoded = [chat.encode_document(rendered, self._words) for rendered in batch]
            writer.add_batch([ids for ids, _ in encoded], [mask for _, mask in encoded])
        elif batch and isinstance(batch[0], bytes):
            writer.add_batch([np.frombuffer(content, dtype=np.uint8) for content in batch])
        else:
            writer.add_batch(self._words.encode_batch(batch))

    def _reader(self, piece: Piece) -> Reader:
        recipe, limit = self._recipe, self._recipe.max_record_bytes
        if piece.rows is not None:
            return Rows(piece.rows, piece.start, recipe.name)
        if recipe.kind == "parquet":
            assert piece.stop is not None, "a piece of Parquet is a range of row groups"
            return ParquetRows(piece.paths[0], recipe.field, limit, piece.start, piece.stop)
        if recipe.kind in ("text", "stdlib"):
            return TextDocuments(piece.paths, limit, raw=recipe.tokenizer == "byte")
        return JsonLines(piece.paths[0], limit, piece.start, piece.stop)

    def _value(self, record: Any) -> Value:
        if not isinstance(record, dict):
            value: Value = record
            return value
        if self._chat is not None:
            return self._chat.render(record)
        return text_in(record, self._recipe.field, self._recipe.max_record_bytes)

    def _note(self, result: PieceResult, bad: BadRecord, reader: Reader, position: int) -> None:
        result.skipped[bad.reason] += 1
        if result.skipped[bad.reason] <= _SHOWN:
            result.examples.append((bad.reason, reader.place(position), bad.detail))


def _unwritable(folder: Path, error: OSError) -> RunFailed:
    return RunFailed(f"{folder} cannot be written ({error.strerror or error}): make room or make it writable, and start again.")


def serve(connection: Any) -> None:
    """Do pieces as they are handed over a connection, until it ends."""
    try:
        recipe, folder, max_bad = connection.recv()
        work: PieceTokenizer | None = None
        while (piece := connection.recv()) is not None:
            try:
                work = work or PieceTokenizer(recipe, folder, max_bad)
                connection.send(work.do(piece, connection.send))
            except (RunError, RunFailed) as error:
                connection.send(error)
            except BaseException:  # the tokenizer library panics with something that is no Exception
                connection.send(
                    RunFailed(f"{traceback.format_exc()}\nThis happened while reading {', '.join(piece.paths[:1])}.")
                )
    except (EOFError, ConnectionError):
        return  # the boss is gone
