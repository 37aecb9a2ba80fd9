"""Processes that tokenise pieces. `ingest` hands them pieces and hears of results; they die with it, whatever kills it.

They are started as a command, not forked: the caller may hold threads, or a GPU. What they may use is theirs to set up.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.data.source_pieces import Piece, Recipe
from phalanx.data.tokenize_piece import Advance, Result
from phalanx.spec.errors import RunFailed

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
        self.advance = Advance(bytes=0, tokens=0, documents=0)
        self._send(hello)

    def begin(self, piece: Piece) -> None:
        self.piece = piece
        self._send(piece)

    def _send(self, what: object) -> None:
        try:
            self.connection.send(what)
        except OSError:
            raise self.died() from None

    def hear(self) -> Result | None:
        """What it has to say; None: how far it is."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self.died() from None
        if isinstance(message, Advance):
            self.advance = message
            return None
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, Result)
        self.piece, self.advance = None, Advance(bytes=0, tokens=0, documents=0)
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

    def __init__(self, count: int, recipe: Recipe, folder: Path, max_bad: int):
        self._count, self._hello = count, (recipe, folder, max_bad)
        self._workers: list[_Worker] = []

    def run(self, pieces: Iterator[Piece]) -> Iterator[Result | Advance]:
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

    def _together(self) -> Advance:
        under_way = [worker.advance for worker in self._workers]
        return Advance(
            bytes=sum(one.bytes for one in under_way),
            tokens=sum(one.tokens for one in under_way),
            documents=sum(one.documents for one in under_way),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()
