"""Turns a source of text into token files: piece by piece in several processes, resumable, with the same result in any case."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from phalanx.data.files import paths_key
from phalanx.data.pieces import DONE, MASKED, Piece, PieceProgress, PieceResult, TokenizePlan, TokenizeSpec, make_plan
from phalanx.data.record_readers import EMPTY, MISSING
from phalanx.data.token_files import META, TokenMeta, replace_text, unfinished, write_meta
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RUN_FILE, RunError, RunFailed
from phalanx.spec.run import Data, Source

PLAN, LOCK = "plan.json", ".lock"
_EXAMPLES = 3
_MANY = 1_000_000  # bad records: as many as nobody has
_HOME = str(Path(__file__).parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from phalanx.worker.tokenize_process import main; main()"
"""Imports this very package, also from a checkout that was never installed."""
_log = logging.getLogger("phalanx.data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of tokenizing one source."""

    name: str
    bytes: int
    size: int | None
    """Bytes in total; None: unknown."""
    tokens: int
    kept: int
    """Tokens from an earlier start."""
    tokens_per_second: float = 0.0
    """Average since this start."""


ProgressCallback = Callable[[Progress], None]


def cached_token_files(source: Source, data: Data, tokenizer: Tokenizer, progress: ProgressCallback | None = None) -> Path:
    """The folder in `data.cache` with the token files of a source; makes them if they are missing. A process that needs the
    same files waits for the one that makes them."""
    plan = make_plan(source, data, tokenizer)
    folder = Path(data.cache).expanduser() / f"tokens-{plan.key}"
    if not (folder / META).exists():
        check_outside(plan, folder.parent, "data.cache: ")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder, wait=True):
                ingest(plan, folder, progress)
        except OSError as error:
            raise RunError(
                f'data.cache = "{data.cache}": {error.filename or folder} cannot be written ({error.strerror}).'
            ) from None
    check_limit(plan.spec, TokenMeta.read(folder).skipped)
    return folder


def tokenize_into(
    folder: Path,
    source: Source,
    data: Data,
    tokenizer: Tokenizer,
    *,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> TokenMeta:
    """Makes token files in a folder of the caller's choice. Continues an interrupted start of the same source and refuses a
    folder with token files of another one, unless `force` is given."""
    plan = make_plan(source, data, tokenizer)
    check_outside(plan, folder)
    try:
        _check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=False):
            if force:
                _clear(folder)
            elif _has_results(folder) and (other := _differences(_identity(folder), plan.identity)):
                raise RunError(
                    f"{folder} holds token files of something else ({other}); name another folder, or start over (--force)."
                )
            try:
                return ingest(plan, folder, progress)
            except RunError:
                if not _has_results(folder):  # refused before anything was made: leave nothing behind
                    _clear(folder)
                    (folder / LOCK).unlink()
                    folder.rmdir()
                raise
    except OSError as error:
        raise RunError(f"{error.filename or folder} cannot be written ({error.strerror}); name another folder.") from None


def check_outside(plan: TokenizePlan, folder: Path, key: str = "") -> None:
    """Refuses a folder inside the text: the next start would read its files as text. Parquet sources, which read only
    .parquet files, and hidden folders are exempt."""
    if plan.spec.kind == "parquet":
        return
    for path in plan.spec.source.paths:
        top, place = Path(path).expanduser().resolve(), folder.resolve()
        if top.is_dir() and place.is_relative_to(top) and not any(p.startswith(".") for p in place.relative_to(top).parts):
            raise RunError(f"{key}{folder} is inside {path}, which is read as text; name a folder outside of it.")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; name a folder for the token files.")
    early = {LOCK, unfinished(PLAN)}  # all that remains of a start that ended at once
    inside = [path.name for path in folder.iterdir() if path.name not in early] if folder.exists() else []
    if inside and PLAN not in inside:
        raise RunError(f"{folder} is not empty and holds other files ({min(inside)}): name another folder.")


def ingest(plan: TokenizePlan, folder: Path, progress: ProgressCallback | None = None) -> TokenMeta:
    """Makes the token files in a folder whose lock the caller holds."""
    if _identity(folder) != plan.identity:
        _clear(folder)
        replace_text(folder / PLAN, json.dumps(plan.identity, indent=1) + "\n")
    if (folder / META).exists():
        meta = TokenMeta.read(folder)
        check_limit(plan.spec, meta.skipped)
    else:
        meta = _make(plan, folder, progress)
    for temporary in [*folder.glob(f"*{DONE}"), *folder.glob("*.unfinished")]:
        temporary.unlink()
    return meta


def _make(plan: TokenizePlan, folder: Path, progress: ProgressCallback | None) -> TokenMeta:
    totals = _Totals(plan)

    def missing_pieces() -> Iterator[Piece]:
        for piece in plan.pieces():
            if (result := PieceResult.read(folder, piece)) is not None:
                totals.add(result, kept=True)
            else:
                yield piece

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = plan.spec.data.processes or cores
    with contextlib.closing(tokenize_pieces(processes, (plan.spec, folder), missing_pieces())) as events:
        for event in events:
            if isinstance(event, PieceResult):
                totals.add(event)
                event = PieceProgress()
            if progress is not None:
                progress(totals.progress(event))
    totals.check_any_good()
    parts = [result.part for _, result in sorted(totals.results.items()) if result.part is not None]
    return write_meta(folder, plan.tokenizer, parts, masked=plan.spec.kind in MASKED, skipped=totals.skipped)


class _Totals:
    """Sums over all finished pieces."""

    def __init__(self, plan: TokenizePlan):
        self._plan = plan
        self._start = time.monotonic()
        self.results: dict[int, PieceResult] = {}
        self.skipped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._bytes = self._tokens = self._kept = 0

    def add(self, result: PieceResult, *, kept: bool = False) -> None:
        """`kept`: the result is from an earlier start."""
        self.results[result.number] = result
        self.skipped.update(result.skipped)
        for reason, place, detail in result.examples:
            examples = self._examples.setdefault(reason, [])
            if len(examples) < _EXAMPLES:
                examples.append(f"{place} ({detail})" if detail else place)
                _log.warning("skipped, %s: %s", reason, examples[-1])
        self._bytes += result.size
        if result.part is not None:
            self._tokens += result.part.tokens
            self._kept += result.part.tokens if kept else 0
        check_limit(self._plan.spec, self.skipped, self._examples)

    def check_any_good(self) -> None:
        """Raises RunError if no record is good."""
        if self._tokens:
            return
        key, name = paths_key(self._plan.spec.source), self._plan.spec.name
        if not self.skipped:
            raise RunError(f"{key}: there is no record in {name}; name files that hold some.")
        remedy = "set data.field (--field) to the one that holds the text" if MISSING in self.skipped else "correct them"
        counts = _skipped_text(self.skipped, self._examples)
        raise RunError(
            f"{key}: no record of {name} can be used: {counts}; {remedy}, or name other files. `phalanx data preview {RUN_FILE}` "
            "then shows what is read."
        )

    def progress(self, unfinished: PieceProgress) -> Progress:
        tokens = self._tokens + unfinished.tokens
        return Progress(
            name=self._plan.spec.name,
            bytes=self._bytes + unfinished.bytes,
            size=self._plan.size,
            tokens=tokens,
            kept=self._kept,
            tokens_per_second=(tokens - self._kept) / (time.monotonic() - self._start),
        )


def check_limit(spec: TokenizeSpec, skipped: dict[str, int], examples: dict[str, list[str]] | None = None) -> None:
    """Raises RunError if there are more bad records than data.max_bad_records."""
    limit, bad = spec.data.max_bad_records, sum(count for reason, count in skipped.items() if reason != EMPTY)
    if bad > limit:
        raise RunError(
            f"{paths_key(spec.source)}: {bad} or more records of {spec.name} cannot be used, and data.max_bad_records "
            f"(--max-bad-records) = {limit}: {_skipped_text(skipped, examples or {})}. Correct them, or raise the limit to "
            f"skip them. `phalanx data preview {RUN_FILE} data.max_bad_records={_MANY}` shows what is read without them."
        )


def _skipped_text(skipped: dict[str, int], examples: dict[str, list[str]]) -> str:
    """Counts by reason, with the position of the first record of each."""
    counts = []
    for reason, count in sorted(skipped.items(), key=lambda item: -item[1]):
        first = f", first {examples[reason][0]}" if examples.get(reason) else ""
        counts.append(f"{count} × {reason}{first}")
    return "; ".join(counts)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Locks a folder against other processes; `wait` for them, or refuse."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise RunError(f"{folder} is being written by another process; wait for it, or name another folder.") from None
        yield  # closing the file releases the lock


def _identity(folder: Path) -> dict[str, object] | None:
    try:
        table = json.loads((folder / PLAN).read_text())
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) else None


def _has_results(folder: Path) -> bool:
    """Whether starting over would lose anything."""
    return (folder / META).exists() or any(folder.glob("part-*.tokens"))


def _differences(before: dict[str, object] | None, now: dict[str, object]) -> str:
    """Describes the differences of two identities; empty if there are none, or there was no identity."""
    if before is None:
        return ""
    differences = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if key == "files" and isinstance(old, list) and isinstance(new, list):
            changed = sorted({str(file[0]) for file in [*old, *new] if file not in old or file not in new})
            differences.append(f"{len(changed)} of its files differ or have changed, first {changed[0]}")
        elif key in ("tokenizer", "template", "documents"):
            differences.append(f"another {key}")
        else:
            differences.append(f"{key} was {json.dumps(old)} and is {json.dumps(new)}")
    return "; ".join(differences)


def _clear(folder: Path) -> None:
    """Removes our files only; the meta file first, so that an incomplete folder never looks complete."""
    for name in (META, PLAN):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("part-*"):
        path.unlink()


class _Worker:
    """A process that tokenizes one piece at a time, and dies with the caller, however that ends. It is started as a command instead of
    by `multiprocessing`: the caller may have threads or a GPU (no fork), or be a script without a main guard (no spawn)."""

    def __init__(self, settings: tuple[TokenizeSpec, Path]):
        self.connection, theirs = multiprocessing.Pipe()
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


def tokenize_pieces(
    count: int, settings: tuple[TokenizeSpec, Path], pieces: Iterator[Piece]
) -> Generator[PieceResult | PieceProgress]:
    """Tokenizes pieces with at most `count` workers, started on demand and killed at the end. Yields results in the order of
    completion; in between, the total progress of unfinished pieces."""
    workers: list[_Worker] = []
    piece = next(pieces, None)
    try:
        while True:
            while piece is not None and sum(worker.piece is not None for worker in workers) < count:
                idle = next((worker for worker in workers if worker.piece is None), None)
                if idle is None:
                    workers.append(idle := _Worker(settings))
                idle.start(piece)
                piece = next(pieces, None)
            busy = {worker.connection: worker for worker in workers if worker.piece is not None}
            if not busy:
                return
            for connection in wait(list(busy)):
                result = busy[cast(Connection, connection)].receive()
                yield result or PieceProgress(*map(sum, zip(*(worker.progress for worker in workers), strict=True)))
    finally:
        for worker in workers:
            worker.kill()
