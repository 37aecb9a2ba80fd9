"""Tokenizes in the test's own process, for tests that do not depend on worker processes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from phalanx.data.pieces import Piece, PieceResult, PieceTokenizer


def tokenize_in_process(count: int, settings: Any, pieces: Iterator[Piece]) -> Generator[PieceResult]:
    """Replaces `tokenize_pieces`."""
    tokenizer = PieceTokenizer(*settings)
    for piece in pieces:
        yield tokenizer.run(piece, lambda progress: None)
