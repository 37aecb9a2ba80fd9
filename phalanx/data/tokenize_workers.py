"""Worker processes that tokenize a source: each turns one piece at a time into one part of the token files.

`data/ingest` makes the pool; `worker/tokenize_process` is the program of a worker and calls `serve`. Workers are started as a
command instead of by `multiprocessing`: the caller may have threads or a GPU (no fork), or be a script without a main guard
(no spawn). They die with the caller, however it ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import numpy as np

from phalanx.data import chat
from phalanx.data.records import EMPTY, BadRecord, JsonLines, ParquetRows, Rows, TextDocuments, text_in
from phalanx.data.source_pieces import Piece, TokenizeSpec
from phalanx.data.token_files import Part, TokenWriter, replace_text
from phalanx.data.tokenizer import open_tokenizer
from phalanx.spec.errors import RunError, RunFailed

DONE = ".done"
_BATCH = 1 << 20
"""Characters per call of the tokenizer."""
_BATCH_RECORDS = 4096
_EXAMPLES = 3
"""Bad records of each reason whose positions are reported."""
_HOME = str(Path(__file__).parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from phalanx.worker.tokenize_process import main; main()"
"""Imports this very package, also from a checkout that was never installed."""

Value = str | bytes | chat.Rendered | BadRecord


class PieceProgress(NamedTuple):
    """Progress within pieces that are not finished."""

    bytes: int = 0
    tokens: int = 0
    documents: int = 0


@dataclass(kw_only=True, slots=True)
class PieceResult:
    """A finished piece."""

    number: int
    part: Part | None = None
    """None if the piece has no good record."""
    skipped: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    """(reason, position, detail) of the first bad records of each reason."""
    stopped: bool = False
    """The piece was abandoned because it has more bad records than the source may have; there is no part."""

    @property
    def bad(self) -> int:
        return self.skipped.total() - self.skipped[EMPTY]

    def write(self, folder: Path, name: str) -> None:
        part = asdict(self.part) if self.part else None
        table = {"number": self.number, "part": part, "skipped": dict(self.skipped), "examples": self.examples}
        replace_text(folder / f"{name}{DONE}", json.dumps(table))

    @staticmethod
    def read(folder: Path, name: str) -> PieceResult | None:
        """The stored result of a finished piece; None if it is not finished, or its files have changed since."""
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


class PieceTokenizer:
    """Tokenizes pieces with one tokenizer and one template."""

    def __init__(self, spec: TokenizeSpec, folder: Path, max_bad: int):
        self._spec, self._folder, self._max_bad = spec, folder, max_bad
        self._tokenizer = open_tokenizer(spec.tokenizer, spec.end_token)
        self._chat: chat.ChatRenderer | None = None
        if spec.template is not None:
            template = chat.ChatTemplate(spec.template, spec.template_name, self._tokenizer.special)
            self._chat = chat.ChatRenderer(template, spec.field, spec.prompt_field, spec.answer_field)

    def run(self, piece: Piece, report: Callable[[PieceProgress], None]) -> PieceResult:
        """Write the part of one piece. `report` receives the progress after every batch of records."""
        result = PieceResult(number=piece.number)
        try:
            writer = TokenWriter(self._folder, piece.part, self._tokenizer, masked=self._chat is not None)
            try:
                self._write(piece, writer, result, report)
                if not result.stopped:
                    result.part = writer.close()
                    result.write(self._folder, piece.part)
            finally:
                writer.discard()
        except OSError as error:  # errors of reading are RunErrors
            raise RunFailed(
                f"{self._folder} cannot be written ({error.strerror or error}): free space or make it writable, and start again."
            ) from None
        return result

    def _write(self, piece: Piece, writer: TokenWriter, result: PieceResult, report: Callable[[PieceProgress], None]) -> None:
        batch: list[Any] = []
        length = read = 0
        reader = self._reader(piece)
        for position, record in reader:
            value = self._value(record)
            if isinstance(value, BadRecord):
                result.skipped[value.reason] += 1
                if result.skipped[value.reason] <= _EXAMPLES:
                    result.examples.append((value.reason, reader.place(position), value.detail))
                if result.bad > self._max_bad:
                    result.stopped = True
                    return
                continue
            if not value:
                result.skipped[EMPTY] += 1
                continue
            batch.append(value)
            length += len(value.text) if isinstance(value, chat.Rendered) else len(value)
            if length >= _BATCH or len(batch) >= _BATCH_RECORDS:
                self._encode(batch, writer)
                read += length
                batch, length = [], 0
                report(PieceProgress(bytes=min(read, piece.size), tokens=writer.tokens, documents=writer.documents))
        self._encode(batch, writer)

    def _encode(self, batch: list[Any], writer: TokenWriter) -> None:
        if self._chat is not None:
            encoded = [chat.encode_document(rendered, self._tokenizer) for rendered in batch]
            writer.add_batch([ids for ids, _ in encoded], [mask for _, mask in encoded])
        elif batch and isinstance(batch[0], bytes):
            writer.add_batch([np.frombuffer(content, dtype=np.uint8) for content in batch])
        else:
            writer.add_batch(self._tokenizer.encode_batch(batch))

    def _reader(self, piece: Piece) -> Rows | ParquetRows | TextDocuments | JsonLines:
        spec, limit = self._spec, self._spec.max_record_bytes
        if piece.rows is not None:
            return Rows(piece.rows, piece.start, spec.name)
        if spec.kind == "parquet":
            assert piece.stop is not None, "a piece of Parquet is a range of row groups"
            return ParquetRows(piece.paths[0], spec.field, limit, piece.start, piece.stop)
        if spec.kind in ("text", "stdlib"):
            return TextDocuments(piece.paths, limit, raw=spec.tokenizer == "byte")
        return JsonLines(piece.paths[0], limit, piece.start, piece.stop)

    def _value(self, record: Any) -> Value:
        if not isinstance(record, dict):
            return cast(Value, record)
        if self._chat is not None:
            return self._chat.render(record)
        return text_in(record, self._spec.field, self._spec.max_record_bytes)


def serve(connection: Any) -> None:
    """The main loop of a worker: tokenize pieces from the connection until it closes."""
    try:
        spec, folder, max_bad = connection.recv()
        tokenizer: PieceTokenizer | None = None
        while (piece := connection.recv()) is not None:
            try:
                tokenizer = tokenizer or PieceTokenizer(spec, folder, max_bad)
                connection.send(tokenizer.run(piece, connection.send))
            except (RunError, RunFailed) as error:
                connection.send(error)
            except BaseException:  # a panic of the tokenizers library is not an Exception
                where = ", ".join(piece.paths[:1])
                connection.send(RunFailed(f"{traceback.format_exc()}\nThis happened while reading {where}."))
    except (EOFError, ConnectionError):
        return  # the parent is gone


class _Worker:
    def __init__(self, settings: tuple[TokenizeSpec, Path, int]):
        ours, theirs = socket.socketpair()
        # -P: a file in the working directory must not replace a module of the same name.
        command = [sys.executable, "-P", "-c", _START, _HOME, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # programs read the caller's output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only the caller, which kills the workers
            )
        self.connection = Connection(ours.detach())
        self.piece: Piece | None = None
        self.progress = PieceProgress()
        self._send(settings)

    def start(self, piece: Piece) -> None:
        self.piece = piece
        self._send(piece)

    def _send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._death() from None

    def receive(self) -> PieceResult | None:
        """The result of the current piece; None if the message is progress. Raises the worker's error."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, PieceProgress):
            self.progress = message
            return None
        assert isinstance(message, PieceResult)
        self.piece, self.progress = None, PieceProgress()
        return message

    def _death(self) -> RunFailed:
        code = self.process.wait()
        where = f" while reading {self.piece.paths[0]}" if self.piece and self.piece.paths else ""
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
        return RunFailed(f"A tokenizer process {how}{where}. Start again with fewer processes: finished parts are kept.")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class TokenizePool:
    """At most `count` workers, started on demand and killed at the end."""

    def __init__(self, count: int, spec: TokenizeSpec, folder: Path, max_bad: int):
        self._count, self._settings = count, (spec, folder, max_bad)
        self._workers: list[_Worker] = []

    def run(self, pieces: Iterator[Piece]) -> Iterator[PieceResult | PieceProgress]:
        """Yields results in the order of completion; in between, the total progress of unfinished pieces."""
        piece = next(pieces, None)
        while True:
            while piece is not None and (worker := self._idle()) is not None:
                worker.start(piece)
                piece = next(pieces, None)
            busy = {worker.connection: worker for worker in self._workers if worker.piece is not None}
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                result = busy[connection].receive()
                yield result or PieceProgress(*map(sum, zip(*(worker.progress for worker in self._workers), strict=True)))

    def _idle(self) -> _Worker | None:
        """A worker without a piece, started if there may be one more."""
        idle = next((worker for worker in self._workers if worker.piece is None), None)
        if idle is None and len(self._workers) < self._count:
            idle = _Worker(self._settings)
            self._workers.append(idle)
        return idle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.kill()
