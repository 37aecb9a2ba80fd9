"""Arrays on disk of which only what is asked for is read. `bestfit` keeps its plan of a large corpus in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from phalanx.data.tokenfile import OpenFile
from phalanx.spec.errors import RunFailed


class Stored:
    """The one-dimensional array of integers in an .npy file, read with explicit offsets.

    A map would count every page that was ever touched as this process' memory, which for a large plan is all of them.
    """

    def __init__(self, path: Path):
        header = np.load(path, mmap_mode="r")
        self._dtype, self._offset, self._length = header.dtype, header.offset, len(header)
        self._path, self._file = path, OpenFile(str(path))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> npt.NDArray[Any]: ...
    def __getitem__(self, at: int | slice) -> int | npt.NDArray[Any]:
        if not isinstance(at, slice):
            first = range(self._length)[at]
            return int(self._read(first, first + 1)[0])
        first, last, step = at.indices(self._length)
        return self._read(first, max(first, last))[::step]

    def _read(self, first: int, last: int) -> npt.NDArray[Any]:
        values = np.empty(last - first, dtype=self._dtype)
        try:
            whole = self._file.fill(values.view(np.uint8).data, self._offset + first * self._dtype.itemsize)
        except OSError as error:
            raise RunFailed(f"{self._path} can no longer be read ({error.strerror}): remove its folder and resume.") from error
        if not whole:
            raise RunFailed(f"{self._path} has shrunk since the run started: remove its folder and resume.")
        return values
