"""Writes token files: one part after the other, each complete or not there at all. `data/ingest` and tests use it.

docs/token-files.md describes the format, `data/tokenfile` reads it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.data.tokenfile import META, Part, TokenMeta

_TEMPORARY = ".unfinished"


class Vocabulary(Protocol):
    """What token files say about the tokenizer they were made with."""

    name: str
    vocab: int
    end: int
    sha256: str


def dtype_of(vocab: int) -> str:
    """The smallest number that holds every id."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class TokenWriter:
    """One part: documents are added in order, and `close` puts the files in place under their names."""

    def __init__(self, folder: Path, name: str, words: Vocabulary, *, masked: bool = False):
        self.documents = self.tokens = 0
        self._folder, self._name, self._end = folder, name, words.end
        self._dtype = np.dtype(dtype_of(words.vocab)).newbyteorder("<")
        self._lengths: list[int] = []
        self._digest = hashlib.sha256()
        folder.mkdir(parents=True, exist_ok=True)
        self._tokens = self._begin("tokens")
        self._mask = self._begin("mask") if masked else None

    def add(self, ids: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> None:
        """A document; the end token is added unless it is its last. `mask`: which of its ids are trained on, where the part
        has masks; an end token that is added is if the id before it is."""
        self.add_batch([np.asarray(ids)], None if mask is None else [np.asarray(mask, dtype=np.bool_)])

    def add_batch(
        self, documents: Sequence[npt.NDArray[np.integer]], masks: Sequence[npt.NDArray[np.bool_]] | None = None
    ) -> None:
        """Many documents at once, as `add` takes one."""
        assert (masks is None) == (self._mask is None), "every document of a part has a mask, or none has"
        if not documents:
            return
        pieces: list[npt.NDArray[np.integer]] = []
        end = np.array([self._end])
        for ids in documents:
            own = [ids] if len(ids) and ids[-1] == self._end else [ids, end]
            pieces += own
            self._lengths.append(sum(map(len, own)))
        self._write(self._tokens, np.concatenate(pieces, dtype=self._dtype, casting="unsafe"), self._digest)
        if masks is not None and self._mask is not None:
            marks: list[npt.NDArray[np.bool_]] = []
            for mask, length in zip(masks, self._lengths[len(self._lengths) - len(documents) :], strict=True):
                marks += [mask] if len(mask) == length else [mask, mask[-1:] if len(mask) else np.zeros(1, dtype=np.bool_)]
            self._write(self._mask, np.concatenate(marks), None)
        self.documents = len(self._lengths)

    def close(self) -> Part | None:
        """The finished part, under its name; None, and no file, if no document was added."""
        if not self._lengths:
            self.discard()
            return None
        self._finish(self._tokens)
        index = self._begin("index")
        self._write(index, np.concatenate([[0], np.cumsum(self._lengths)]).astype("<i8"), self._digest, count=False)
        self._finish(index)
        if self._mask is not None:
            self._finish(self._mask)
            with self._path("mask").open("rb") as written:
                while block := written.read(1 << 20):
                    self._digest.update(block)
        for suffix in self._suffixes():
            self._path(suffix).rename(self._folder / f"{self._name}.{suffix}")
        return Part(name=self._name, documents=self.documents, tokens=self.tokens, sha256=self._digest.hexdigest())

    def discard(self) -> None:
        """Leave nothing behind."""
        for file in (self._tokens, self._mask):
            if file is not None:
                file.close()
        for suffix in self._suffixes():
            self._path(suffix).unlink(missing_ok=True)

    def _suffixes(self) -> tuple[str, ...]:
        return ("tokens", "index", "mask") if self._mask is not None else ("tokens", "index")

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._name}.{suffix}{_TEMPORARY}"

    def _begin(self, suffix: str) -> BinaryIO:
        return self._path(suffix).open("wb")

    def _write(
        self, file: BinaryIO, values: npt.NDArray[np.generic], digest: hashlib._Hash | None, *, count: bool = True
    ) -> None:
        file.write(values.data)
        if digest is not None:
            digest.update(values.data)
            self.tokens += len(values) if count else 0

    @staticmethod
    def _finish(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())  # a part that is said to be complete is so after a power cut, too
        file.close()


def write_meta(
    folder: Path, words: Vocabulary, parts: Sequence[Part], *, masked: bool, skipped: Mapping[str, int]
) -> TokenMeta:
    """The file that makes a folder of parts complete; written under another name first."""
    dtype = dtype_of(words.vocab)
    digest = hashlib.sha256(f"{dtype} {words.sha256} {words.end} {masked}".encode())
    for part in parts:
        digest.update(part.sha256.encode())
    meta = TokenMeta(
        dtype=dtype,
        tokenizer=words.name,
        tokenizer_sha256=words.sha256,
        vocab=words.vocab,
        end=words.end,
        masked=masked,
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        skipped=dict(sorted(skipped.items())),
        parts=tuple(parts),
        fingerprint=digest.hexdigest(),
    )
    replace_text(folder / META, meta.to_json())
    return meta


def write_token_files(
    folder: Path,
    words: Vocabulary,
    documents: Iterable[npt.ArrayLike],
    masks: Iterable[npt.ArrayLike] | None = None,
    *,
    per_part: int | None = None,
) -> TokenMeta:
    """Token files of documents that are ids already, `per_part` documents to a part."""
    parts: list[Part] = []
    writer: TokenWriter | None = None
    paired = ((ids, None) for ids in documents) if masks is None else zip(documents, masks, strict=True)
    for ids, mask in paired:
        if writer is None:
            writer = TokenWriter(folder, f"part-{len(parts):06d}", words, masked=masks is not None)
        writer.add(ids, mask)
        if writer.documents == per_part:
            parts += [part] if (part := writer.close()) else []
            writer = None
    if writer is not None and (part := writer.close()):
        parts.append(part)
    return write_meta(folder, words, parts, masked=masks is not None, skipped={})


def unfinished(name: str) -> str:
    """What a file is called until it is whole."""
    return name + _TEMPORARY


def replace_text(path: Path, text: str) -> None:
    """All of the text under this name, or what was there before."""
    temporary = path.with_name(unfinished(path.name))
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
