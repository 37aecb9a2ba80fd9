"""Opens files to be read, here or behind a URL, packed or not. `listing` finds them, `records` reads them, in any process."""

from __future__ import annotations

import contextlib
import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol, cast

from phalanx.spec.errors import RunError

_GZIP, _ZSTD = (".gz",), (".zst", ".zstd")
_FEED = 1 << 9
"""Packed bytes handed to zstd at once: each may become thousands, and what comes out has to stay small."""


class Stream(Protocol):
    """What can be read from front to back: at most so many bytes, none at the end."""

    def read(self, size: int, /) -> bytes: ...


def is_url(path: str) -> bool:
    return "://" in path


def is_web(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def packed(path: str) -> bool:
    return bare_name(path) != path.lower()


def bare_name(path: str) -> str:
    """The name in small letters, without what says that the file is packed."""
    name = path.lower()
    return next((name.removesuffix(ending) for ending in _GZIP + _ZSTD if name.endswith(ending)), name)


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it."""
    from fsspec.core import url_to_fs

    try:
        return cast(tuple[Any, str], url_to_fs(url))
    except ImportError as error:  # fsspec says which package serves the protocol
        raise RunError([f"{url}: {error}"]) from None
    except ValueError as error:
        raise RunError([f"{url}: no such kind of storage is known ({error})."]) from None


@contextlib.contextmanager
def reachable(path: str, what: str = "", passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What storage raises, however it calls it, becomes a RunError that names the file; `passing`: what the caller tells."""
    before = f"{what}: " if what else ""
    try:
        yield
    except (RunError, MemoryError):
        raise
    except passing:
        raise
    except FileNotFoundError:
        raise RunError([f"{before}{path} is not there; correct the name, or put it back."]) from None
    except Exception as error:  # each storage has exceptions of its own
        raise RunError([f"{before}{path} cannot be read ({str(error) or type(error).__name__})."]) from None


def open_binary(path: str) -> BinaryIO:
    """The bytes as stored."""
    with reachable(path):
        if is_url(path):
            system, inner = filesystem(path)
            file = cast(BinaryIO, system.open(inner, "rb"))
            return file if not is_web(path) or _anywhere(file) else _fetched(system, inner)
        return open(path, "rb")


def _anywhere(file: BinaryIO) -> bool:
    """Whether a file of a web server can be read from any place on. One may know no ranges, which fsspec notices only when
    it is asked for one."""
    try:
        file.seek(-1, io.SEEK_END)
        file.read(1)
        file.seek(0)
    except (ValueError, OSError):  # told by what follows, where the server is at fault otherwise
        file.close()
        return False
    return True


def _fetched(system: Any, inner: str) -> BinaryIO:
    """A copy that is gone when it is closed."""
    with tempfile.NamedTemporaryFile() as copy:
        system.get_file(inner, copy.name)
        return open(copy.name, "rb")


class Unpacked:
    """The bytes of a file, unpacked where its name says that it is packed. A damaged file is a RunError that names it."""

    def __init__(self, path: str):
        self._path = path
        zstd = zstd_library() if path.lower().endswith(_ZSTD) else None
        self._file = open_binary(path)
        self._source: Stream = self._file
        if path.lower().endswith(_GZIP):
            self._source = cast(Stream, gzip.GzipFile(fileobj=self._file))
        elif zstd is not None:
            self._source = _Zstd(self._file, zstd)

    def read(self, size: int) -> bytes:
        try:
            return self._source.read(size)
        except EOFError:
            raise RunError([f"{self._path} is cut off: its packed data has no end; copy or make it again."]) from None
        except (zlib.error, gzip.BadGzipFile, _Damaged) as error:
            raise RunError([f"{self._path} is damaged ({error}): copy or make it again."]) from None
        except Exception as error:  # each storage has exceptions of its own
            raise RunError([f"{self._path} cannot be read ({str(error) or type(error).__name__})."]) from None

    def tell(self) -> int:
        """Stored bytes that have been read: how far, of the size a listing shows."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class _Damaged(Exception):
    pass


class _Zstd:
    """zstd's own reader takes a file that is cut off for one that ends; this one knows whether the last frame was whole."""

    def __init__(self, file: Stream, library: Any):
        self._library, self._file = library, file
        self._frame: Any = None
        self._left = b""  # packed bytes not yet fed
        self._ready = io.BytesIO()

    def read(self, size: int) -> bytes:
        while not (block := self._ready.read(size)):
            if not self._left:
                self._left = self._file.read(1 << 16)
            if not self._left:
                if self._frame is not None:
                    raise EOFError
                return b""
            self._unpack()
        return block

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        feed, self._left = self._left[:_FEED], self._left[_FEED:]
        try:
            self._ready = io.BytesIO(self._frame.decompress(feed))
        except self._library.ZstdError as error:
            raise _Damaged(str(error)) from None
        if self._frame.eof:
            self._left = self._frame.unused_data + self._left
            self._frame = None


def zstd_library() -> Any:
    try:
        import zstandard
    except ImportError:
        raise RunError([".zst files need the package zstandard: pip install 'phalanx[data]'."]) from None
    return zstandard
