"""Documents as byte sequences that can be read anywhere, at any size. `dataset` opens them, `pack` reads slices of them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from phalanx.data.files import named_files, stdlib_files
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.run import Data

_OPEN_FILES = 64
"""Descriptors kept open at once: enough that neighbouring windows share them, far below any process's limit."""


class Documents(Protocol):
    """An ordered collection of texts, none of them empty."""

    @property
    def names(self) -> Sequence[str]:
        """What each document is called; independent of where the collection is stored."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, the end token not counted."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
        """Tokens start … stop of a document: exactly stop - start of them."""


class _File:
    """A descriptor that closes when its last reader lets go, so that no thread can close what another one is reading."""

    fd = -1

    def __init__(self, path: str):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:  # opening may have failed
            os.close(self.fd)


class TextFiles:
    """One document per file, read where and when a window needs it: the corpus may be far bigger than memory.

    Reads carry their own offset and there is no lock, so threads do not disturb each other and a forked child reads on.
    """

    def __init__(self, root: str, sizes: Mapping[str, int]):
        """`sizes`: the bytes of each file, by its path; all paths begin with `root`."""
        paths = sorted(sizes)
        self._root = os.path.join(root, "")
        self.names: Sequence[str] = [path.removeprefix(self._root) for path in paths]
        self.lengths = np.array([sizes[path] for path in paths], dtype=np.int64)
        self._open = functools.lru_cache(_OPEN_FILES)(_File)

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        assert 0 <= start <= stop <= self.lengths[document], (document, start, stop)
        path = self._root + self.names[document]
        tokens = np.empty(stop - start, dtype=np.uint8)
        filled = 0
        try:
            file = self._open(path)
            while filled < len(tokens):  # one call may give less than it was asked for
                got = os.preadv(file.fd, [tokens.data[filled:]], start + filled)
                if got == 0:
                    raise RunFailed(
                        f"{path} has shrunk: it held {self.lengths[document]} bytes when the run started "
                        f"and holds {os.fstat(file.fd).st_size} now; put the former text back and resume."
                    )
                filled += got
        except OSError as error:
            raise RunFailed(
                f"{path} can no longer be read ({error.strerror}): it held {self.lengths[document]} bytes "
                "when the run started; make it readable again and resume."
            ) from error
        return tokens


class Memory:
    """Documents given as strings."""

    def __init__(self, texts: Sequence[str]):
        encoded = {f"document {i}": text.encode() for i, text in enumerate(texts) if text}
        self.names: Sequence[str] = list(encoded)
        self.lengths = np.array([len(text) for text in encoded.values()], dtype=np.int64)
        self._texts = list(encoded.values())

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._texts[document], dtype=np.uint8)[start:stop]


def open_documents(data: Data) -> Documents:
    """The documents a run names. Costs one look at each file's size; nothing is read."""
    problems = []
    if data.source != "text" and data.paths:
        problems.append(
            f'data.paths is set but data.source = "{data.source}" reads none; set data.source = "text" or remove it.'
        )
    if data.source != "memory" and data.documents:
        problems.append(
            f'data.documents is set but data.source = "{data.source}" reads none; set data.source = "memory" or remove it.'
        )
    if data.source == "text" and not data.paths:
        problems.append('data.source = "text" but data.paths names nothing; give it at least one file, folder or glob.')
    if data.source == "memory" and not any(data.documents):
        empty = f"holds {len(data.documents)} empty texts" if data.documents else "is empty"
        problems.append(f'data.source = "memory" but data.documents {empty}; give it at least one text.')
    if problems:
        raise RunError(problems)
    if data.source == "memory":
        return Memory(data.documents)
    return TextFiles(*(stdlib_files() if data.source == "stdlib" else named_files(data.paths)))


def fingerprint(documents: Documents) -> str:
    """The same for the same names and lengths in the same order, wherever the files lie: a resumed run compares it."""
    digest = hashlib.sha256()
    for name, length in zip(documents.names, documents.lengths.tolist(), strict=True):
        digest.update(b"%s\0%d\0" % (os.fsencode(name), length))  # no name holds a zero byte
    return digest.hexdigest()
