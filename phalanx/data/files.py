"""Opens files to be read, here or behind a URL, packed or not. `listing` finds them, `records` reads them, in any process."""

from __future__ import annotations

import contextlib
import errno
import glob
import gzip
import io
import os
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from phalanx.spec.errors import RunError
from phalanx.spec.run import Source

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


def is_compressed(path: str) -> bool:
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


class Decompressed:
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


_SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "chat": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
}
"""Names by which a folder's files of a kind are known; every file is text."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    path: str
    """Absolute, or a URL."""
    size: int | None
    """Bytes as stored; None where a server does not say."""
    stamp: str
    """Changes when the file is written again: time of change, or what the storage has instead."""


def paths_key(source: Source) -> str:
    """How the run file calls the paths of this source."""
    name = getattr(source, "name", "")
    return f"data.mix.{name}.paths" if name else "data.paths"


def find_files(source: Source, kind: str) -> list[SourceFile]:
    """Every file that `source.paths` names and that is not empty, in one order for all machines; else RunError."""
    key = paths_key(source)
    found: dict[str, SourceFile] = {}
    problems: list[str] = []
    if not source.paths:
        raise RunError([f'{key} names nothing, but source = "{kind}" reads files; give it at least one file, folder or glob.'])
    for path in source.paths:
        try:
            own = {file.path: file for file in (_remote(path, kind, key) if is_url(path) else _local(path, kind, key))}
        except RunError as error:
            problems += error.problems
            continue
        found |= own
    files = [found[path] for path in sorted(found) if found[path].size != 0]
    if found and not files and not problems:
        which = f"{min(found)} is empty" if len(found) == 1 else f"all {len(found)} files are empty (first {min(found)})"
        problems.append(f"{key}: {which}; name files that hold text.")
    if problems:
        raise RunError(problems)
    return files


def _local(path: str, kind: str, key: str) -> Iterator[SourceFile]:
    if not path.strip():
        raise RunError([f'{key} holds an empty path; write "." for the working directory.'])
    tried = os.path.abspath(os.path.expanduser(path))
    # A name that exists is never a pattern, whatever brackets it holds.
    matches = [tried] if os.path.lexists(tried) else sorted(glob.glob(tried, recursive=True))
    if not matches:
        raise RunError(
            [
                f'{key}: "{path}" matches no file or folder (tried {tried}); '
                "correct it, or start in the folder it is relative to."
            ]
        )
    inside = [file for match in matches for file in (_walk(match, kind, key) if os.path.isdir(match) else [match])]
    if not inside:
        wanted = f"none named {', '.join(_SUFFIXES[kind])}" if kind in _SUFFIXES else "none"
        raise RunError([f'{key}: "{path}" holds no files to read, {wanted} (looked through {tried}); put some there.'])
    for file in inside:
        try:
            if not os.path.isfile(file):
                raise OSError(0, "neither a file nor a folder" if os.path.exists(file) else "there is no such file")
            if not os.access(file, os.R_OK):
                raise OSError(0, "permission denied")
            status = os.stat(file)
        except OSError as error:
            raise RunError([f"{key}: {file} cannot be read ({error.strerror}); make it readable or leave it out."]) from None
        yield SourceFile(file, status.st_size, str(status.st_mtime_ns))


def _walk(top: str, kind: str, key: str) -> list[str]:
    """Hidden names are left out, as globs do; links to folders too: they may form a loop."""

    def refuse(error: OSError) -> None:
        raise RunError([f"{key}: {error.filename} cannot be read ({error.strerror}); make it readable or leave it out."])

    files = []
    for folder, folders, names in os.walk(top, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(folder, name) for name in names if not name.startswith(".") and _wanted(name, kind)]
    return files


def _remote(path: str, kind: str, key: str) -> Iterator[SourceFile]:
    system, inner = filesystem(path)
    with reachable(path, key):
        if glob.has_magic(inner):
            listed: dict[str, dict[str, Any]] = system.glob(inner, detail=True)
            infos = [info for _, info in sorted(listed.items()) if info["type"] == "file"]
        elif system.isdir(inner):
            listed = system.find(inner, detail=True)
            infos = [i for name, i in sorted(listed.items()) if _wanted(name.rsplit("/", 1)[-1], kind)]
        else:
            infos = [system.info(inner)]
    if not infos:
        raise RunError([f'{key}: "{path}" matches no file to read; correct it, or put files there.'])
    for info in infos:
        stamp = next(
            (str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "updated", "created") if name in info), ""
        )
        yield SourceFile(system.unstrip_protocol(info["name"]), info.get("size"), stamp)


def _wanted(name: str, kind: str) -> bool:
    return kind not in _SUFFIXES or bare_name(name).endswith(_SUFFIXES[kind])


_INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders inside the standard library's that are not part of it."""


class _Search:
    """Files found so far, and those that were found but cannot be read."""

    def __init__(self, suffix: str = "", skip: frozenset[str] = frozenset()):
        self.sizes: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self._suffix = suffix
        self._skip = skip

    def take(self, path: str) -> bool:
        """Take a file, or all files of a folder; false: there is none in it."""
        if os.path.isdir(path):
            return self._take_folder(path)
        if os.path.isfile(path):
            self._take_file(path, os.path.getsize(path))
        else:
            self.unreadable[path] = "neither a file nor a folder" if os.path.exists(path) else os.strerror(errno.ENOENT)
        return True

    def _take_file(self, path: str, size: int) -> None:
        if os.access(path, os.R_OK):
            self.sizes[path] = size
        else:
            self.unreadable[path] = os.strerror(errno.EACCES)

    def _take_folder(self, top: str) -> bool:
        """Hidden names are left out, as globs do: `.git` is no text. Links to folders are too: they may form a loop."""
        any_file = False
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as found:
                    entries = [e for e in found if not e.name.startswith(".") and e.name not in self._skip]
            except OSError as error:
                self.unreadable[folder] = error.strerror or str(error)
                any_file = True
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.name.endswith(self._suffix):
                    continue
                elif entry.is_file():
                    any_file = True
                    self._take_file(entry.path, entry.stat().st_size)
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    # A link whose target is gone is text somebody believes to be there.
                    any_file = self.take(entry.path)
        return any_file


def stdlib_files(table: str = "data") -> tuple[str, dict[str, int]]:
    """Python's own source code: the folder, and the size of each file in it that is not empty. `table`: of the run file."""
    root = sysconfig.get_paths()["stdlib"]
    search = _Search(".py", _INSTALLED)
    search.take(root)
    sizes = {path: size for path, size in search.sizes.items() if size}
    if not sizes:
        raise RunError(
            [
                f'{table}.source = "stdlib": there is no Python source below {root}; set {table}.source = "text" and {table}.paths.'
            ]
        )
    return root, sizes


def named_files(paths: Sequence[str], key: str = "data.paths") -> tuple[str, dict[str, int]]:
    """The files that `paths` name: the folder they share, and the size of each one that is not empty. `key`: where the run
    file names them."""
    search = _Search()
    problems = []
    for path in paths:
        if not path.strip():
            problems.append(f'{key} holds an empty path; write "." for the working directory.')
            continue
        tried = os.path.abspath(os.path.expanduser(path))
        # A name that exists is never a pattern, whatever brackets it holds.
        matches = [tried] if os.path.lexists(tried) else glob.glob(tried, recursive=True)
        if not matches:
            problems.append(
                f'{key}: "{path}" matches no file or folder (tried {tried}); '
                "correct it, or start the run in the folder it is relative to."
            )
        elif not any([search.take(match) for match in matches]):  # a list: every match is to be taken
            problems.append(f'{key}: "{path}" holds no files (looked through {tried}); put text there or leave it out.')
    if search.unreadable:
        path, reason = min(search.unreadable.items())
        others = f", nor can {len(search.unreadable) - 1} more" if len(search.unreadable) > 1 else ""
        problems.append(f"{key}: {path} cannot be read ({reason}){others}; make it readable or leave it out.")
    sizes = {path: size for path, size in search.sizes.items() if size}
    if search.sizes and not sizes:
        count, first = len(search.sizes), min(search.sizes)
        which = first if count == 1 else f"each of the {count} files (the first is {first})"
        problems.append(f"{key}: {which} is empty; name files that hold text.")
    if problems:
        raise RunError(problems)
    return os.path.commonpath([os.path.dirname(path) for path in sizes]), sizes
