"""Token files: a corpus as ids on disk with an index of its documents; docs/token-files.md has the format. Opening takes the same time
for any size."""

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
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import BLOCKS, OPEN_FILES, OpenFile, offsets
from phalanx.data.tokenizer import Tokenizer
from phalanx.spec.errors import RunError, refuse

FORMAT, VERSION = "phalanx-tokens", 1
META = "tokens.json"
_INDEX = np.dtype("<i8")
_CHUNK = 1 << 17
"""Numbers per read when a whole index is scanned."""
_SPARSE = 1024
"""From this stride on, the wanted numbers of an index are read one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the corpus: NAME.tokens, NAME.index and, if some tokens are not trained on, NAME.mask."""

    name: str
    documents: int
    tokens: int
    """End tokens included."""
    sha256: str
    """Hash of the three files, one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMeta:
    """The content of tokens.json, which is written last: a folder that has one is complete."""

    dtype: str
    """"uint16" or "uint32", little-endian."""
    tokenizer: str
    """Display name of the tokenizer."""
    tokenizer_sha256: str
    """Hash of everything that determines the ids of the tokenizer."""
    vocab: int
    end: int
    """Id of the end token, which follows every document, except for conversations whose template ends turns with another token."""
    masked: bool
    """Whether the parts have masks."""
    documents: int
    tokens: int
    skipped: dict[str, int]
    """Number of bad records by reason."""
    parts: tuple[Part, ...]
    fingerprint: str
    """Changes when any id, boundary or mask changes."""

    @staticmethod
    def read(folder: Path) -> TokenMeta:
        """Reads the meta file of a folder; raises RunError if it is missing or damaged."""
        path = folder / META
        try:
            table: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            raise RunError(
                f"{folder} holds no token files: {META} is missing, which is written last. Tokenize again."
            ) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read ({error}): tokenize again.") from None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise RunError(f'{path} is not the meta file of token files: its "format" is not "{FORMAT}".')
        if table.get("version") != VERSION:
            raise RunError(f"{path} has version {table.get('version')} and this Phalanx reads {VERSION}: tokenize again.")
        try:
            known = {f.name: table[f.name] for f in fields(TokenMeta)}
            return TokenMeta(**known | {"parts": tuple(Part(**part) for part in table["parts"])})
        except (KeyError, TypeError) as error:
            raise RunError(f"{path} is not complete ({error}): tokenize again.") from None


class TokenFiles:
    """A folder of token files as a corpus. Files are read at explicit offsets instead of mapped: a file that shrinks under a map kills
    the process, and reads do not add to resident memory."""

    def __init__(self, folder: Path):
        self.folder, self.meta = folder, TokenMeta.read(folder)
        self.fingerprint = self.meta.fingerprint
        self.documents, self.tokens = self.meta.documents, self.meta.tokens
        self._dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        # Start of each part, then the end. Lists, because bisect in a short list is faster than searchsorted.
        self._token_starts = [0, *itertools.accumulate(part.tokens for part in self.meta.parts)]
        self._document_starts = [0, *itertools.accumulate(part.documents for part in self.meta.parts)]
        self._paths = [str(folder / part.name) for part in self.meta.parts]
        self._stride = max(1, -(-self.documents // BLOCKS))
        self._open = functools.lru_cache(OPEN_FILES)(OpenFile)
        self._check_sizes()

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._gather("tokens", self._dtype, self._token_starts, start, stop)

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        return self._gather("mask", np.bool_, self._token_starts, start, stop) if self.meta.masked else None

    def bounds(self, first: int, last: int) -> npt.NDArray[np.int64]:
        end = self._begins(last, last + 1)[0] if last < self.documents else self.tokens
        return np.append(self._begins(first, last), end)

    def find(self, position: int) -> int:
        block = int(self.blocks.searchsorted(position, "right")) - 1
        first = block * self._stride
        begins = self._begins(first, min(first + self._stride, self.documents))
        return first + int(begins.searchsorted(position, "right")) - 1

    def starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        begins = self.blocks
        if self._stride > 1:
            low = int(begins.searchsorted(start, "right")) - 1
            high = int(begins.searchsorted(stop, "left"))
            begins = self._begins(low * self._stride, min(high * self._stride, self.documents))
        low, high = begins.searchsorted((start, stop)).tolist()
        return begins[low:high]

    @functools.cached_property
    def blocks(self) -> npt.NDArray[np.int64]:
        """Start of every n-th document, then the end of the stream: the part of the index that is held in memory."""
        stride, parts = self._stride, [np.array([], dtype=np.int64)]
        if stride >= _SPARSE:
            parts += [self._begins(document, document + 1) for document in range(0, self.documents, stride)]
        else:
            chunk = max(1, _CHUNK // stride) * stride
            for first in range(0, self.documents, chunk):
                begins = self._begins(first, min(first + chunk, self.documents))
                parts.append(begins[::stride].copy())  # a view would keep all of them alive
        return np.append(np.concatenate(parts), self.tokens)

    def _begins(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Start positions of documents first … last (exclusive)."""
        return self._gather("index", _INDEX, self._document_starts, first, last)

    def _gather(self, suffix: str, dtype: npt.DTypeLike, starts: list[int], first: int, last: int) -> npt.NDArray[Any]:
        """Elements first … last (exclusive) over all parts; `starts`: the first element of each part. Positions count from the start
        of the stream."""
        part = bisect.bisect_right(starts, first) - 1
        pieces = []
        while first < last:
            own, until = starts[part], min(last, starts[part + 1])
            values = self._open(f"{self._paths[part]}.{suffix}").read(dtype, first - own, until - own)
            pieces.append(values + self._token_starts[part] if suffix == "index" else values)
            first, part = until, part + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.array([], dtype=dtype), *pieces])

    def _check_sizes(self) -> None:
        """Compares file sizes with the meta file, so that a truncated copy is reported before the first step."""
        wrong = []
        for part in self.meta.parts:
            expected = {"tokens": part.tokens * self._dtype.itemsize, "index": (part.documents + 1) * 8}
            if self.meta.masked:
                expected["mask"] = part.tokens
            for suffix, size in expected.items():
                path = self.folder / f"{part.name}.{suffix}"
                actual = path.stat().st_size if path.is_file() else None
                if actual != size:
                    has = "is missing" if actual is None else f"has {actual} bytes"
                    wrong.append(f"{path} {has} where {META} says {size}: copy the folder again, or tokenize again.")
        refuse(wrong[:10])


def dtype_of(vocab: int) -> str:
    """The smallest integer type that holds every id."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class TokenWriter:
    """Writes one part: documents are added in order, and `close` renames the files to their final names."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, *, masked: bool):
        self.documents = self.tokens = 0
        self._folder, self._name, self._end = folder, name, tokenizer.end
        self._dtype = np.dtype(dtype_of(tokenizer.vocab)).newbyteorder("<")
        self._lengths: list[int] = []
        self._digest = hashlib.sha256()
        suffixes = ("tokens", "index", "mask") if masked else ("tokens", "index")
        self._files = {suffix: (folder / unfinished(f"{name}.{suffix}")).open("wb") for suffix in suffixes}

    def add_batch(
        self, documents: Sequence[npt.NDArray[np.integer]], masks: Sequence[npt.NDArray[np.bool_]] | None = None
    ) -> None:
        """Add documents, each with the end token unless that is its last id. `masks`: which ids are trained on, if the part has masks; the
        documents are then complete, because the end of a conversation is its template's choice."""
        assert (masks is None) == ("mask" not in self._files), "every document of a part has a mask, or none has"
        if not documents:
            return
        end = np.array([self._end])
        pieces: list[npt.NDArray[np.integer]] = []
        for ids in documents:
            document = [ids] if masks is not None or (len(ids) and ids[-1] == self._end) else [ids, end]
            pieces += document
            self._lengths.append(sum(map(len, document)))
        tokens = np.concatenate(pieces, dtype=self._dtype, casting="unsafe")
        self._write("tokens", tokens)
        if masks is not None:
            mask = np.concatenate(masks)
            assert len(mask) == len(tokens), "a mask covers the whole document"
            self._files["mask"].write(mask.data)
        self.tokens += len(tokens)
        self.documents = len(self._lengths)

    def close(self) -> Part | None:
        """Finish the part; None, and no files, if no document was added."""
        if not self._lengths:
            self.discard()
            return None
        self._write("index", offsets(self._lengths).astype(_INDEX))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())  # a finished part survives a power failure
            file.close()
        if "mask" in self._files:
            with open(self._files["mask"].name, "rb") as written:
                while block := written.read(1 << 20):
                    self._digest.update(block)
        for suffix, file in self._files.items():
            os.rename(file.name, self._folder / f"{self._name}.{suffix}")
        return Part(name=self._name, documents=self.documents, tokens=self.tokens, sha256=self._digest.hexdigest())

    def discard(self) -> None:
        """Remove the files if they are not finished."""
        for file in self._files.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)

    def _write(self, suffix: str, values: npt.NDArray[np.integer]) -> None:
        self._files[suffix].write(values.data)
        self._digest.update(values.data)


def write_meta(
    folder: Path, tokenizer: Tokenizer, parts: Sequence[Part], *, masked: bool, skipped: Mapping[str, int]
) -> TokenMeta:
    """Writes the meta file, which completes a folder of parts."""
    dtype = dtype_of(tokenizer.vocab)
    digest = hashlib.sha256(f"{dtype} {tokenizer.sha256} {tokenizer.end} {masked}".encode())
    for part in parts:
        digest.update(part.sha256.encode())
    meta = TokenMeta(
        dtype=dtype,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab=tokenizer.vocab,
        end=tokenizer.end,
        masked=masked,
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        skipped=dict(sorted(skipped.items())),
        parts=tuple(parts),
        fingerprint=digest.hexdigest(),
    )
    replace_text(folder / META, json.dumps({"format": FORMAT, "version": VERSION} | asdict(meta), indent=2) + "\n")
    return meta


def unfinished(name: str) -> str:
    """The name of a file until it is complete."""
    return f"{name}.unfinished"


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    temporary = path.with_name(unfinished(path.name))
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
