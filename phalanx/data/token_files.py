"""Token files: a corpus as ids on disk with an index of its documents, opened at once whatever its size.

docs/token-files.md describes the format. `data/ingest` writes them part by part; `data/dataset` reads them as a corpus.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import BLOCKS, OpenFile
from phalanx.spec.errors import RunError, RunFailed

FORMAT, VERSION = "phalanx-tokens", 1
META = "tokens.json"
_OPEN_FILES = 64
_INDEX = np.dtype("<i8")
_CHUNK = 1 << 17
"""Numbers of an index read at once when it is looked through."""
_SPARSE = 1024
"""From so many documents between two that are wanted on, each is read by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One piece of the corpus: NAME.tokens, NAME.index and, where only some tokens are trained on, NAME.mask."""

    name: str
    documents: int
    tokens: int
    """End tokens included."""
    sha256: str
    """Of the three files, one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMeta:
    """What tokens.json says; it is written last, so a folder that has one is complete."""

    dtype: str
    """"uint16" or "uint32", little-endian."""
    tokenizer: str
    """Name of the tokenizer, for people."""
    tokenizer_sha256: str
    """Of what the tokenizer computes from; ids of another tokenizer mean other text."""
    vocab: int
    end: int
    """The id that stands behind every document."""
    masked: bool
    """Whether there are masks."""
    documents: int
    tokens: int
    skipped: dict[str, int]
    """Bad records that were left out, counted by reason."""
    parts: tuple[Part, ...]
    fingerprint: str
    """Changes when any id, boundary or mask does."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=2) + "\n"

    @staticmethod
    def read(folder: Path) -> TokenMeta:
        """The meta file of a folder, or RunError saying why it is not one."""
        path = folder / META
        try:
            table: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise RunError(
                [f"{folder} holds no token files: {META} is missing, which is written last. Tokenise again."]
            ) from None
        except (OSError, ValueError) as error:
            raise RunError([f"{path} cannot be read ({error}): tokenise again."]) from None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise RunError([f'{path} is not the meta file of token files: its "format" is not "{FORMAT}".'])
        if table.get("version") != VERSION:
            raise RunError([f"{path} has version {table.get('version')} and this Phalanx reads {VERSION}: tokenise again."])
        try:
            known = {f.name: table[f.name] for f in fields(TokenMeta)}
            return TokenMeta(**known | {"parts": tuple(Part(**part) for part in table["parts"])})
        except (KeyError, TypeError) as error:
            raise RunError([f"{path} is not complete ({error}): tokenise again."]) from None


class TokenFiles:
    """A folder of token files as one stream of ids in which every document is followed by the end token: a corpus.

    Read with explicit offsets rather than mapped: a file that shrinks under a map kills the process, and resident memory
    stays what it is however much has been read.
    """

    def __init__(self, folder: Path):
        self.folder, self.meta = folder, TokenMeta.read(folder)
        self.fingerprint = self.meta.fingerprint
        self.documents, self.tokens = self.meta.documents, self.meta.tokens
        self._dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        # Where each part begins, and the end. Lists, since finding one number in a short list is quickest by bisect.
        self._token_starts = [0, *itertools.accumulate(part.tokens for part in self.meta.parts)]
        self._document_starts = [0, *itertools.accumulate(part.documents for part in self.meta.parts)]
        self._paths = [str(folder / part.name) for part in self.meta.parts]
        self._stride = max(1, -(-self.documents // BLOCKS))
        self._open = functools.lru_cache(_OPEN_FILES)(OpenFile)
        self._check_sizes()

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Ids start … stop of the stream."""
        return self._gather("tokens", self._dtype, start, stop)

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Which of these ids are trained on as targets; None: all of them."""
        return self._gather("mask", np.dtype(np.bool_), start, stop) if self.meta.masked else None

    def bounds(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where the documents first … last begin in the stream, and so where each of them but the last ends: last - first + 1
        numbers. `last` may be the number of documents: the end of the stream."""
        end = self._begins(last, last + 1)[0] if last < self.documents else self.tokens
        return np.append(self._begins(first, last), end)

    def find(self, position: int) -> int:
        """The document that holds this id of the stream."""
        block = int(self.blocks().searchsorted(position, "right")) - 1
        first = block * self._stride
        begins = self._begins(first, min(first + self._stride, self.documents))
        return first + int(begins.searchsorted(position, "right")) - 1

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where documents begin in start … stop, `stop` not included."""
        begins = self.blocks()
        if self._stride > 1:
            low = int(begins.searchsorted(start, "right")) - 1
            high = int(begins.searchsorted(stop, "left"))
            begins = self._begins(low * self._stride, min(high * self._stride, self.documents))
        low, high = begins.searchsorted((start, stop)).tolist()
        return begins[low:high]

    def blocks(self) -> npt.NDArray[np.int64]:
        """Where every so many-th document begins, and at last the end of the stream: the part of the index kept in memory."""
        return self._blocks

    @functools.cached_property
    def _blocks(self) -> npt.NDArray[np.int64]:
        stride, found = self._stride, [np.array([], dtype=np.int64)]
        if stride >= _SPARSE:
            found += [self._begins(document, document + 1) for document in range(0, self.documents, stride)]
        else:
            chunk = max(1, _CHUNK // stride) * stride
            for first in range(0, self.documents, chunk):
                begins = self._begins(first, min(first + chunk, self.documents))
                found.append(begins[::stride].copy())  # a view would keep all of them
        return np.append(np.concatenate(found), self.tokens)

    def _begins(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where documents first … last begin, `last` not included."""
        part = bisect.bisect_right(self._document_starts, first) - 1
        found = []
        while first < last:
            own, until = self._document_starts[part], min(last, self._document_starts[part + 1])
            found.append(self._slice(part, "index", _INDEX, first - own, until - own) + self._token_starts[part])
            first, part = until, part + 1
        return found[0] if len(found) == 1 else np.concatenate([np.array([], dtype=np.int64), *found])

    def _gather(self, suffix: str, dtype: np.dtype[Any], start: int, stop: int) -> npt.NDArray[Any]:
        part = bisect.bisect_right(self._token_starts, start) - 1
        base = self._token_starts[part]
        if start < stop <= self._token_starts[part + 1]:
            return self._slice(part, suffix, dtype, start - base, stop - base)
        pieces = [np.array([], dtype=dtype)]
        while start < stop:
            base, until = self._token_starts[part], min(stop, self._token_starts[part + 1])
            pieces.append(self._slice(part, suffix, dtype, start - base, until - base))
            start, part = until, part + 1
        return np.concatenate(pieces)

    def _slice(self, part: int, suffix: str, dtype: np.dtype[Any], start: int, stop: int) -> npt.NDArray[Any]:
        path = f"{self._paths[part]}.{suffix}"
        values = np.empty(stop - start, dtype=dtype)
        try:
            whole = self._open(path).fill(values.view(np.uint8).data, start * dtype.itemsize)
        except OSError as error:
            raise RunFailed(f"{path} can no longer be read ({error.strerror}): make it readable again and resume.") from error
        if not whole:
            raise RunFailed(f"{path} has shrunk since the run started: put the former file back and resume.")
        return values

    def _check_sizes(self) -> None:
        """A look at each file's size: a truncated copy is found before a step is taken."""
        wrong = []
        for part in self.meta.parts:
            expected = {"tokens": part.tokens * self._dtype.itemsize, "index": (part.documents + 1) * 8}
            if self.meta.masked:
                expected["mask"] = part.tokens
            for suffix, size in expected.items():
                path = self.folder / f"{part.name}.{suffix}"
                found = path.stat().st_size if path.is_file() else None
                if found != size:
                    has = "is missing" if found is None else f"has {found} bytes"
                    wrong.append(f"{path} {has} where {META} says {size}: copy the folder again, or tokenise again.")
        if wrong:
            raise RunError(wrong[:10])


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
