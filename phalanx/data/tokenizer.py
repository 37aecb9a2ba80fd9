"""Text to token ids and back. `dataset` and `ingest` choose a tokenizer by name; sampling from a model decodes with it."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phalanx.spec.errors import RunError

Ids = npt.NDArray[np.int32]
Spans = tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Ids, and the characters of the text where each begins and ends."""


class TextStream(Protocol):
    """Ids one by one to text, as it becomes certain."""

    def push(self, token: int) -> str:
        """The text this id adds; nothing while a character is not complete."""


class Tokenizer(Protocol):
    """What every tokenizer offers."""

    name: str
    """As the run file has it."""
    vocab: int
    """One more than the largest id."""
    end: int
    """The id that stands behind every document."""
    sha256: str
    """Of what the ids are computed from: with another one the same ids mean other text."""
    chat_template: str | None
    """Jinja source that turns a conversation into text, where the tokenizer brings one."""
    special: dict[str, str]
    """Texts of special tokens, by the names that chat templates use: bos_token, eos_token …"""
    files: list[Path]
    """What a model that uses it is to be kept with."""
    marks: dict[int, str]
    """Special tokens, which decoding drops, by their ids: what a person is shown in their place."""

    def encode(self, text: str, special: bool = True) -> Ids:
        """Ids of a text; `special`: with what the tokenizer puts around one, such as a token that begins it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The same for many at once, special tokens included."""

    def encode_spans(self, text: str) -> Spans:
        """Ids with the characters they stand for, no special tokens added."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids; special tokens and ids that a padded vocabulary adds are dropped."""

    def stream(self) -> TextStream: ...


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a document: any file is text, and no vocabulary has to be fetched."""

    name = "byte"
    vocab = 257
    end = 256
    sha256 = hashlib.sha256(b"phalanx byte tokenizer 1").hexdigest()
    chat_template: str | None = None

    def __init__(self) -> None:
        self.special: dict[str, str] = {}
        self.files: list[Path] = []
        self.marks = {self.end: "<end>"}

    def encode(self, text: str, special: bool = True) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str) -> Spans:
        ids = self.encode(text)
        # Every byte that does not continue a character begins one.
        starts = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1
        return ids, starts, starts + 1

    def decode(self, ids: npt.ArrayLike) -> str:
        tokens = np.asarray(ids, dtype=np.int64).ravel()
        shown = tokens[(tokens >= 0) & (tokens < self.end)]
        return shown.astype(np.uint8).tobytes().decode(errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < ByteTokenizer.end else ""


def tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """The tokenizer that data.tokenizer names, with the end token of data.end_token, or RunError."""
    if name != "byte":
        from phalanx.data.hf_tokenizer import HfTokenizer

        return HfTokenizer(name, end_token)
    if end_token is not None:
        raise RunError([f'data.end_token = "{end_token}", but data.tokenizer = "byte" has an end of its own; leave it out.'])
    return ByteTokenizer()
