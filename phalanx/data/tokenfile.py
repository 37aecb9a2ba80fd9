"""Token files: a corpus as ids on disk with an index of its documents, opened at once whatever its size.

docs/token-files.md describes the format. `data/ingest` writes them part by part; `data/dataset` reads them as a corpus.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import BLOCKS
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


class OpenFile:
    """A descriptor that closes when its last reader lets go, so that no thread can close what another one is reading."""

    fd = -1

    def __init__(self, path: str):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def fill(self, view: memoryview, offset: int) -> bool:
        """Fill `view` with what stands from `offset` on; False: the file ends before."""
        filled = 0
        while filled < len(view):  # one call may give less than it was asked for
            got = os.preadv(self.fd, [view[filled:]], offset + filled)
            if got == 0:
                return False
            filled += got
        return True

    def __del__(self) -> None:
        if self.fd >= 0:  # opening may have failed
            os.close(self.fd)


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
