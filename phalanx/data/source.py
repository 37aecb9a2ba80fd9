"""Text read as it lies, a token per byte: files and strings as corpora. `dataset` opens them; nothing is copied or prepared."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from phalanx.data.corpus import Ids, Indexed
from phalanx.data.tokenfile import OpenFile
from phalanx.spec.errors import RunFailed

END = 256
"""What follows the last byte of each document: the byte tokenizer's end token."""
_OPEN_FILES = 64
"""Descriptors kept open at once: enough that neighbouring windows share them, far below any process's limit."""
_HASHED_WHOLE = 64 << 20
"""Up to so many bytes the fingerprint looks at all of them, beyond that at _SAMPLES pieces, together as many."""
_SAMPLES = 4096


class TextFiles(Indexed):
    """One document per file, read where and when a window needs it: the corpus may be far bigger than memory.

    Reads carry their own offset and there is no lock, so threads do not disturb each other and a forked child reads on.
    """

    def __init__(self, root: str, sizes: Mapping[str, int]):
        """`sizes`: the bytes of each file, none of them zero, by its path; all paths begin with `root`."""
        paths = sorted(sizes)
        self._root = os.path.join(root, "")
        self.names: Sequence[str] = [path.removeprefix(self._root) for path in paths]
        super().__init__(_begins([sizes[path] for path in paths]))
        self._open = functools.lru_cache(_OPEN_FILES)(OpenFile)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same names and texts in the same order, wherever the files lie."""
        digest = hashlib.sha256()
        for name, end in zip(self.names, self._begins[1:].tolist(), strict=True):
            digest.update(b"%s\0%d\0" % (os.fsencode(name), end))  # no name holds a zero byte
        length = _HASHED_WHOLE // _SAMPLES
        pieces = -(-self.tokens // length)
        for piece in range(min(pieces, _SAMPLES)):
            # Side by side where that covers the whole stream, else spread over it from its first token to its last.
            start = piece * length if pieces <= _SAMPLES else piece * (self.tokens - length) // (_SAMPLES - 1)
            digest.update(self.read(start, min(start + length, self.tokens)).astype("<u2").tobytes())
        return digest.hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        document = int(self._begins.searchsorted(start, "right")) - 1
        begin, end = int(self._begins[document]), int(self._begins[document + 1]) - 1
        if stop <= end:  # inside one file: the usual case
            return self._bytes(document, start - begin, stop - begin)
        ids = np.full(stop - start, END, dtype=np.uint16)  # what no document overwrites is an end token
        at = start
        while at < stop:
            begin, end = int(self._begins[document]), int(self._begins[document + 1]) - 1
            until = min(stop, end)
            if at < until:
                ids[at - start : until - start] = self._bytes(document, at - begin, until - begin)
            at, document = end + 1, document + 1
        return ids

    def _bytes(self, document: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        path = self._root + self.names[document]
        ids = np.empty(stop - start, dtype=np.uint8)
        try:
            file = self._open(path)
            if not file.fill(ids.data, start):
                raise RunFailed(
                    f"{path} has shrunk: it held {self._size(document)} bytes when the run started "
                    f"and holds {os.fstat(file.fd).st_size} now; put the former text back and resume."
                )
        except OSError as error:
            raise RunFailed(
                f"{path} can no longer be read ({error.strerror}): it held {self._size(document)} bytes "
                "when the run started; make it readable again and resume."
            ) from error
        return ids

    def _size(self, document: int) -> int:
        return int(self._begins[document + 1] - self._begins[document]) - 1


class Memory(Indexed):
    """Documents given as strings; empty ones are left out."""

    def __init__(self, texts: Sequence[str]):
        encoded = [text.encode() for text in texts if text]
        super().__init__(_begins([len(text) for text in encoded]))
        self._ids = np.full(self.tokens, END, dtype=np.uint16)
        for begin, text in zip(self._begins.tolist(), encoded, strict=False):
            self._ids[begin : begin + len(text)] = np.frombuffer(text, dtype=np.uint8)

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._ids.astype("<u2").tobytes()).hexdigest()

    def read(self, start: int, stop: int) -> Ids:
        return self._ids[start:stop]


def _begins(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each document begins in the stream, and where that ends: each is followed by one end token."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64) + 1)]).astype(np.int64)
