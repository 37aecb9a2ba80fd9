"""A source of text to token files: piece by piece in several processes, resumed where it was killed, the same in any case.

`phalanx tokenize` calls `tokenize_into`; `data/dataset` calls `cached_token_files` for every source that is not read as it lies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.data.source_pieces import Piece, TokenizePlan, TokenizeSpec, make_plan
from phalanx.data.text_records import EMPTY, MISSING
from phalanx.data.token_files import META, TokenMeta, replace_text, unfinished, write_meta
from phalanx.data.tokenize_piece import DONE, PieceProgress, PieceResult
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.run import Data, Source

PLAN, LOCK = "plan.json", ".lock"
_SHOWN = 3
_log = logging.getLogger("phalanx.data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a source is."""

    name: str
    bytes: int
    size: int | None
    """Bytes in all; None: not known."""
    documents: int
    tokens: int
    kept: int
    """Tokens of these that an earlier start had made."""
    skipped: int
    """Bad records."""
    tokens_per_second: float = 0.0
    """Of this start, so far."""


ProgressCallback = Callable[[Progress], None]


def cached_token_files(source: Source, data: Data, tokenizer: Tokenizer, progress: ProgressCallback | None = None) -> Path:
    """The folder of `data.cache` with the token files of a source: at once if they are there, else they are made first.
    Others that want the same wait for whoever came first."""
    plan = make_plan(source, data, tokenizer)
    folder = Path(data.cache).expanduser() / f"tokens-{plan.key}"
    if not (folder / META).exists():
        _check_apart(plan, folder.parent, source, "data.cache: ")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder, wait=True):
                ingest(plan, folder, data, progress)
        except OSError as error:
            raise RunError(
                [f'data.cache = "{data.cache}": {error.filename or folder} cannot be written ({error.strerror}).']
            ) from None
    check_limit(plan, TokenMeta.read(folder).skipped, data.max_bad_records)
    return folder


def tokenize_into(
    folder: Path, source: Source, data: Data, words: Tokenizer, *, force: bool = False, progress: ProgressCallback | None = None
) -> TokenMeta:
    """Token files of a source in a folder of the caller's; goes on where the same was begun, refuses where it was another."""
    plan = make_plan(source, data, words)
    _check_apart(plan, folder, source)
    try:
        _check_place(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=False):
            if force:
                _clear(folder)
            elif _begun(folder) and (other := _differences(_identity(folder), plan.identity)):
                raise RunError(
                    [f"{folder} holds token files of something else ({other}); name another folder, or start over (--force)."]
                )
            try:
                return ingest(plan, folder, data, progress)
            except RunError:
                if not _begun(folder):  # refused before anything came of it: nothing is left, either
                    _clear(folder)
                    (folder / LOCK).unlink()
                    folder.rmdir()
                raise
    except OSError as error:
        raise RunError([f"{error.filename or folder} cannot be written ({error.strerror}); name another folder."]) from None


def _check_apart(plan: TokenizePlan, folder: Path, source: Source, key: str = "") -> None:
    """Token files among the text would be taken for text the next time, unless their names are of no kind or hidden."""
    if plan.recipe.kind == "parquet":
        return
    for path in source.paths:
        top, place = Path(path).expanduser().resolve(), folder.resolve()
        if top.is_dir() and place.is_relative_to(top) and not any(p.startswith(".") for p in place.relative_to(top).parts):
            raise RunError([f"{key}{folder} lies in {path}, which is to be read; name a folder outside of it."])


def _check_place(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError([f"{folder} is a file; name a folder for the token files."])
    begun = {LOCK, unfinished(PLAN)}  # all that a start leaves which is killed, or finds no room, at once
    inside = [path.name for path in folder.iterdir() if path.name not in begun] if folder.exists() else []
    if inside and PLAN not in inside:
        raise RunError([f"{folder} is not empty and holds no token files of ours ({min(inside)}): name another folder."])


def ingest(plan: TokenizePlan, folder: Path, data: Data, progress: ProgressCallback | None = None) -> TokenMeta:
    """Make the token files; whoever calls holds the folder's lock."""
    if _identity(folder) != plan.identity:
        _clear(folder)
        replace_text(folder / PLAN, json.dumps(plan.identity, indent=1) + "\n")
    if (folder / META).exists():
        meta = TokenMeta.read(folder)
        check_limit(plan, meta.skipped, data.max_bad_records)
    else:
        meta = _make(plan, folder, data, progress)
    for left in [*folder.glob(f"*{DONE}"), *folder.glob("*.unfinished")]:
        left.unlink()
    return meta


def _make(plan: TokenizePlan, folder: Path, data: Data, progress: ProgressCallback | None) -> TokenMeta:
    tally = _Tally(plan, data.max_bad_records)
    sizes: dict[int, int] = {}

    def missing() -> Iterator[Piece]:
        for piece in plan.pieces():
            sizes[piece.number] = piece.size
            if (result := PieceResult.read(folder, piece.part)) is not None:
                tally.add(result, piece.size, kept=True)
            else:
                yield piece

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with Pool(data.processes or cores, plan.recipe, folder, data.max_bad_records) as pool:
        for event in pool.run(missing()):
            if isinstance(event, PieceResult):
                tally.add(event, sizes[event.number])
                event = PieceProgress(bytes=0, tokens=0, documents=0)
            if progress is not None:
                progress(tally.progress(event))
    tally.settle()
    parts = [result.part for _, result in sorted(tally.results.items()) if result.part is not None]
    return write_meta(folder, plan.words, parts, masked=plan.masked, skipped=tally.skipped)


class _Tally:
    """What all pieces together have come to."""

    def __init__(self, plan: TokenizePlan, max_bad: int):
        self._plan, self._max_bad = plan, max_bad
        self._begin = time.monotonic()
        self.results: dict[int, PieceResult] = {}
        self.skipped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._bytes = self._tokens = self._documents = self._kept = 0

    def add(self, result: PieceResult, size: int, *, kept: bool = False) -> None:
        self.results[result.number] = result
        self.skipped.update(result.skipped)
        for reason, place, detail in result.examples:
            shown = self._examples.setdefault(reason, [])
            if len(shown) < _SHOWN:
                shown.append(f"{place} ({detail})" if detail else place)
                _log.warning("skipped, %s: %s", reason, shown[-1])
        self._bytes += size
        if result.part is not None:
            self._tokens += result.part.tokens
            self._documents += result.part.documents
            self._kept += result.part.tokens if kept else 0
        check_limit(self._plan, self.skipped, self._max_bad, self._examples)

    def settle(self) -> None:
        """RunError where nothing was good."""
        if self._documents:
            return
        where = self._plan.recipe.name
        if not self.skipped:
            raise RunError([f"{self._plan.paths_key}: there is no record in {where}; name files that hold some."])
        remedy = "set data.field (--field) to the one that holds the text" if MISSING in self.skipped else "correct them"
        told = f"no record of {where} can be used: {_told(self.skipped, self._examples)}"
        raise RunError([f"{self._plan.paths_key}: {told}; {remedy}, or name other files."])

    def progress(self, under_way: PieceProgress) -> Progress:
        return Progress(
            name=self._plan.recipe.name,
            bytes=self._bytes + under_way.bytes,
            size=self._plan.size,
            documents=self._documents + under_way.documents,
            tokens=self._tokens + under_way.tokens,
            kept=self._kept,
            skipped=self.skipped.total() - self.skipped[EMPTY],
            tokens_per_second=(self._tokens + under_way.tokens - self._kept) / (time.monotonic() - self._begin),
        )


def check_limit(plan: TokenizePlan, skipped: dict[str, int], limit: int, examples: dict[str, list[str]] | None = None) -> None:
    """RunError where more records were bad than data.max_bad_records allows."""
    bad = sum(count for reason, count in skipped.items() if reason != EMPTY)
    if bad > limit:
        raise RunError(
            [
                f"{plan.paths_key}: {bad} or more records of {plan.recipe.name} cannot be used, and data.max_bad_records (--max-bad-records) = {limit}: "
                f"{_told(skipped, examples or {})}. Correct them, or raise the limit to leave them out."
            ]
        )


def _told(skipped: dict[str, int], examples: dict[str, list[str]]) -> str:
    """Counts by reason, with where the first ones are."""
    told = []
    for reason, count in sorted(skipped.items(), key=lambda item: -item[1]):
        first = f", first {examples[reason][0]}" if examples.get(reason) else ""
        told.append(f"{count} × {reason}{first}")
    return "; ".join(told)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Keeps others out of a folder; `wait` for them, or refuse."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise RunError([f"{folder} is being written by another process; wait for it, or name another folder."]) from None
        yield  # closing the file opens the lock


def _identity(folder: Path) -> dict[str, object] | None:
    try:
        table = json.loads((folder / PLAN).read_text())
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) else None


def _begun(folder: Path) -> bool:
    """Whether there is anything that starting over would lose."""
    return (folder / META).exists() or any(folder.glob("part-*.tokens"))


def _differences(before: dict[str, object] | None, now: dict[str, object]) -> str:
    """In words, what is other than it was; nothing if all is the same, or there was nothing."""
    if before is None:
        return ""
    told = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key == "files" and isinstance(old, list) and isinstance(new, list):
            changed = sorted({str(file[0]) for file in [*old, *new] if file not in old or file not in new})
            told.append(f"{len(changed)} of its files are others or have changed, first {changed[0]}")
        elif key in ("tokenizer", "template", "documents"):
            told.append(f"another {key}")
        else:
            told.append(f"{key} was {json.dumps(old)} and is {json.dumps(new)}")
    return "; ".join(told)


def _clear(folder: Path) -> None:
    """Nothing but what we wrote; the meta file first, so that no half of a folder ever looks complete."""
    for name in (META, PLAN):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("part-*"):
        path.unlink()


_HOME = str(Path(__file__).parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from phalanx.worker.tokenize_process import main; main()"
"""Finds this very package, also where it runs from a checkout that was never installed."""


class _Worker:
    def __init__(self, hello: tuple[Any, ...]):
        ours, theirs = socket.socketpair()
        # -P: a file of the working directory that is called like a module must not be taken for it.
        command = [sys.executable, "-P", "-c", _START, _HOME, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the caller's output is read by programs
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the caller alone, which ends them
            )
        self.connection = Connection(ours.detach())
        self.piece: Piece | None = None
        self.advance = PieceProgress(bytes=0, tokens=0, documents=0)
        self._send(hello)

    def begin(self, piece: Piece) -> None:
        self.piece = piece
        self._send(piece)

    def _send(self, what: object) -> None:
        try:
            self.connection.send(what)
        except OSError:
            raise self.died() from None

    def hear(self) -> PieceResult | None:
        """What it has to say; None: how far it is."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self.died() from None
        if isinstance(message, PieceProgress):
            self.advance = message
            return None
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, PieceResult)
        self.piece, self.advance = None, PieceProgress(bytes=0, tokens=0, documents=0)
        return message

    def died(self) -> RunFailed:
        code = self.process.wait()
        where = f" while reading {self.piece.paths[0]}" if self.piece and self.piece.paths else ""
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
        return RunFailed(f"A process that tokenises {how}{where}. Start again with fewer processes: what is done is kept.")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """At most `count` workers, started as there is work for them."""

    def __init__(self, count: int, recipe: TokenizeSpec, folder: Path, max_bad: int):
        self._count, self._hello = count, (recipe, folder, max_bad)
        self._workers: list[_Worker] = []

    def run(self, pieces: Iterator[Piece]) -> Iterator[PieceResult | PieceProgress]:
        """Every result as it comes, in any order; in between, how far all pieces that are under way are together."""
        more = True
        while True:
            while more and (len(self._workers) < self._count or self._idle()):
                piece = next(pieces, None)
                if piece is None:
                    more = False
                else:
                    self._hand_over(piece)
            busy = {worker.connection: worker for worker in self._workers if worker.piece is not None}
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                result = busy[connection].hear()
                yield self._together() if result is None else result

    def _idle(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.piece is None]

    def _hand_over(self, piece: Piece) -> None:
        if not self._idle():
            self._workers.append(_Worker(self._hello))
        self._idle()[0].begin(piece)

    def _together(self) -> PieceProgress:
        under_way = [worker.advance for worker in self._workers]
        return PieceProgress(
            bytes=sum(one.bytes for one in under_way),
            tokens=sum(one.tokens for one in under_way),
            documents=sum(one.documents for one in under_way),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()
