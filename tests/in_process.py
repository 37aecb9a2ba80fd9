"""Tokenizes in the test's own process, for tests that do not depend on worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.data.source_pieces import Piece
from phalanx.data.tokenize_workers import PieceResult, PieceTokenizer


class InProcessPool:
    """Replaces `TokenizePool`."""

    def __init__(self, count: int, *settings: Any):
        self._tokenizer = PieceTokenizer(*settings)

    def run(self, pieces: Iterator[Piece]) -> Iterator[PieceResult]:
        return (self._tokenizer.run(piece, lambda progress: None) for piece in pieces)

    def __enter__(self) -> InProcessPool:
        return self

    def __exit__(self, *error: object) -> None:
        pass
