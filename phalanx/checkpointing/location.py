"""Where checkpoints are stored, as one small set of operations: `Location`, which is a path (`Local`), a URL of an object store (`Remote`, on
top of fsspec) or host memory (`MemoryLocation` in `replicas/replica_index`). The rest of this room never asks which one it has.

Of the store libraries' own means, s3fs retries fewer kinds of errors, sends the parts of a streamed file one after the other, and lists
unfinished uploads of a whole bucket only; so these three things are written here. Credentials and endpoints come from the environment and the
library's own files, never from the run file. Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import mmap
import os
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.events.fault_log import DISK
from phalanx.spec.errors import PhalanxError, RunFailed

PART = 16 << 20
"""Bytes of one part of a multipart upload."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0)
"""Seconds before each further attempt of a request."""

_PAGE = 4096
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"}
"""Stores whose folders are only prefixes of names."""
_S3 = {"config_kwargs": {"read_timeout": 60, "retries": {"total_max_attempts": 1}}}
"""Requests are retried here; and s3fs's read timeout of 15 seconds is too short for a part of a slow upload."""
_CONCURRENT_PARTS = 4  # parts in flight; these and the one being filled are in memory
_EQUAL_PARTS = 5000
"""After this many parts, parts become `_LARGER` times as large, as S3 allows 10,000 parts per file."""
_LARGER = 8

_PERMANENT = (
    FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, NotImplementedError, TypeError,
)  # fmt: skip
_PERMANENT_NAMES = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidRegionError",
)  # fmt: skip

Chunks = Iterable[memoryview | bytes]
T = TypeVar("T")


class Location(ABC):
    """A file or folder, which may or may not exist. It is read-only unless it implements `make`, `write`, `rename` and `remove`."""

    can_rename = False
    """Whether a folder can be renamed atomically. Where it cannot, only the file that is written last shows that all are there."""

    @property
    @abstractmethod
    def name(self) -> str: ...
    @property
    @abstractmethod
    def parent(self) -> Location: ...
    @abstractmethod
    def __truediv__(self, name: str, /) -> Location: ...
    @abstractmethod
    def is_folder(self) -> bool: ...
    @abstractmethod
    def entries(self) -> list[str]:
        """Sorted names of what is directly inside; empty if the folder does not exist."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each file directly inside, by name."""

    @abstractmethod
    def size(self) -> int | None:
        """Bytes of the file; None if it does not exist."""

    @abstractmethod
    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        """Bytes of the file: all of it, or at most `length` from `begin` on. Raises FileNotFoundError or OSError."""

    def read_block(self, begin: int, length: int) -> bytes | memoryview:
        """Like `read`, for many bytes."""
        return self.read(begin, length)

    def unfinished(self) -> list[str]:
        """Names of entries that take up space but are not listed, because their upload was never completed."""
        return []

    def make(self) -> None:
        """Create this folder and its parents."""
        raise self._read_only()

    def write(self, chunks: Chunks) -> None:
        """Write the file. When this returns, the contents survive a crash of the machine. Uses each chunk before it takes the next."""
        raise self._read_only()

    def sync(self) -> None:
        """Make the names inside this folder survive a crash of the machine."""
        return  # a store answers a write when it has the data

    def rename(self, to: Location, /) -> None:
        raise self._read_only()

    def remove(self) -> None:
        """Remove the file, or the folder with everything inside. Does nothing if it does not exist."""
        raise self._read_only()

    def _read_only(self) -> OSError:
        return OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))


def open_location(place: Location | Path | str) -> Location:
    """The location of a path, or of an fsspec URL such as s3://bucket/folder."""
    if isinstance(place, Location):
        return place
    protocol, is_url, path = str(place).partition("://")
    if not is_url:
        return Local(Path(place))
    # A file system can do more than fsspec offers.
    return Local(Path(path)) if protocol == "file" else Remote(f"{protocol}://{path.rstrip('/')}")


@dataclass(frozen=True)
class Local(Location):
    """A path of a file system, of this machine or shared by all."""

    path: Path
    can_rename = True

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> Local:
        return Local(self.path.parent)

    def __truediv__(self, name: str) -> Local:
        return Local(self.path / name)

    def __str__(self) -> str:
        return str(self.path)

    def is_folder(self) -> bool:
        return self.path.is_dir()

    def entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def size(self) -> int | None:
        try:
            return self.path.stat().st_size if self.path.is_file() else None
        except OSError:
            return None

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(-1 if length is None else length)

    def read_block(self, begin: int, length: int) -> memoryview:
        # In mapped memory, which goes back to the system as soon as nobody uses it. The allocator would keep it.
        block = memoryview(mmap.mmap(-1, max(length, 1)))[:length]
        with self.path.open("rb") as file:
            file.seek(begin)
            return block[: file.readinto(block)]

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def write(self, chunks: Chunks) -> None:
        with contextlib.closing(_DirectFile(self.path)) as file:
            for chunk in chunks:
                file.write(chunk)
            file.sync()

    def sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, to: Location) -> None:
        assert isinstance(to, Local)
        self.path.rename(to.path)

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


class _DirectFile:
    """Writes whole pages with direct I/O where the file system supports it: that saves a copy and leaves the page cache to others."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self._direct = False
        self._supports_direct = self._set_direct(True)

    def _set_direct(self, direct: bool) -> bool:
        if direct != self._direct:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | (os.O_DIRECT if direct else 0))
            except OSError:  # a file system in memory, for example
                return False
            self._direct = direct
        return True

    def write(self, data: memoryview | bytes) -> None:
        DISK.check()
        rest = memoryview(data)
        while rest:
            pages = len(rest) // _PAGE * _PAGE
            if self._supports_direct and pages and (_address(rest) | os.lseek(self._fd, 0, os.SEEK_CUR)) % _PAGE == 0:
                self._set_direct(True)
                try:
                    rest = rest[os.write(self._fd, rest[:pages]) :]
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._supports_direct = False  # it accepted the flag, but not the write
            else:
                self._set_direct(False)
                rest = rest[os.write(self._fd, rest) :]
                # Start writing to disk now instead of at the end, and free cached pages that are written.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _address(data: memoryview) -> int:
    import numpy as np  # only writing needs it

    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


# Object stores.


class Unreachable(RunFailed, OSError):
    """A store does not answer, or refuses. Its contents may be intact and must not be treated as damaged."""

    def __init__(self, message: str):
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[Unreachable], tuple[str]]:
        return Unreachable, (str(self),)


def retry(what: str, action: Callable[[], T], pauses: tuple[float, ...] | None = None) -> T:
    """Run `action`, again after each temporary error. Raises FileNotFoundError if nothing is there, otherwise Unreachable."""
    for pause in (*(PAUSES if pauses is None else pauses), None):
        try:
            return action()
        except (FileNotFoundError, PhalanxError):
            raise
        except Exception as error:  # botocore, aiohttp and the libraries of other stores share no base class
            permanent = isinstance(error, _PERMANENT) or type(error).__name__ in _PERMANENT_NAMES
            if pause is None or permanent:
                raise Unreachable(f"{what}: {error_text(error)}") from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def error_text(error: BaseException) -> str:
    """The error's message on one line."""
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    return " ".join(text.split()).removesuffix(".")


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """The fsspec file system of this process: its connections and their thread do not survive a fork. It caches no listings, as other
    processes write there too."""
    import fsspec  # most runs never need it

    options = _S3 if protocol in ("s3", "s3a") else {}
    fs = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    if options:
        fs.retries = 1
    return fs


@dataclass(frozen=True)
class Remote(Location):
    """A prefix of an object store."""

    url: str

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rsplit("/", 1)[0])

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def _fs(self) -> Any:
        return _filesystem(self.protocol, os.getpid())

    @property
    def _is_s3(self) -> bool:
        return self.protocol in ("s3", "s3a")

    @property
    def _path(self) -> str:
        return str(self._fs._strip_protocol(self.url))

    def _retry(self, what: str, action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return retry(f"{self.url} cannot be {what}", lambda: action(*args, **kwargs))

    def _listing(self) -> dict[str, int | None]:
        """Names directly inside, with the bytes of files."""
        prefix = f"{self._path.strip('/')}/"
        try:
            entries = self._retry("listed", self._fs.ls, self._path, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {entry["name"].strip("/"): entry["size"] if entry["type"] == "file" else None for entry in entries}
        return {name.removeprefix(prefix): size for name, size in sizes.items() if name.startswith(prefix)}

    def is_folder(self) -> bool:
        return bool(self._listing())

    def entries(self) -> list[str]:
        return sorted(self._listing())

    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in self._listing().items() if size is not None}

    def size(self) -> int | None:
        try:
            entry = self._retry("looked at", self._fs.info, self._path)
        except FileNotFoundError:
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        whole = begin == 0 and length is None
        limits = {} if whole else {"start": begin, "end": None if length is None else begin + length}

        def get() -> bytes:
            try:
                return bytes(self._fs.cat_file(self._path, **limits))
            except OSError as error:
                if not whole and "range" in str(error).lower():
                    return b""  # a store refuses to read beyond the end
                raise

        return self._retry("read", get)

    def make(self) -> None:
        if self.protocol not in _BUCKETS:
            self._retry("made", self._fs.makedirs, self._path, exist_ok=True)

    def write(self, chunks: Chunks) -> None:
        self.parent.make()
        parts = _parts(chunks)
        first = next(parts, b"")
        if len(first) < PART:  # small enough to be sent again as a whole
            self._retry("written", self._fs.pipe_file, self._path, first)
        elif self._is_s3:
            self._write_multipart(itertools.chain([first], parts))
        else:
            self._write_stream(itertools.chain([first], parts))

    def _write_multipart(self, parts: Iterable[bytes]) -> None:
        """Send parts while the next are read, several at a time, each retried by itself: a part that is sent twice replaces itself."""
        bucket, key, _ = self._fs.split_path(self._path)
        call = functools.partial(self._retry, "written", self._fs.call_s3)
        file = {"Bucket": bucket, "Key": key}
        upload = file | {"UploadId": call("create_multipart_upload", **file)["UploadId"]}
        sent: list[Future[Any]] = []
        try:
            with ThreadPoolExecutor(_CONCURRENT_PARTS) as pool:
                for number, part in enumerate(parts, 1):
                    sent.append(pool.submit(call, "upload_part", **upload, PartNumber=number, Body=part))
                    if number > _CONCURRENT_PARTS:
                        sent[-1 - _CONCURRENT_PARTS].result()  # raises a part's failure now, not after the rest of the file
            tags = [{"PartNumber": number, "ETag": part.result()["ETag"]} for number, part in enumerate(sent, 1)]
            try:
                call("complete_multipart_upload", **upload, MultipartUpload={"Parts": tags})
            except FileNotFoundError:
                # The answer to an earlier attempt may have been lost: then the upload no longer exists, but the file does. Its ETag ends
                # in its number of parts, which an older file of this name is unlikely to share; checksums decide when it is read.
                if not str(call("head_object", **file).get("ETag", "")).strip('"').endswith(f"-{len(tags)}"):
                    raise
        except BaseException:
            with contextlib.suppress(Exception):  # parts that were sent take up space, unlisted, until the upload is aborted
                self._fs.call_s3("abort_multipart_upload", **upload)
            raise

    def _write_stream(self, parts: Iterable[bytes]) -> None:
        """Send a file through the library's own file object, which resends its blocks itself."""
        file = self._retry("written", self._fs.open, self._path, "wb", block_size=PART)
        try:
            for part in parts:
                self._send(file.write, part)
            self._send(file.close)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True  # otherwise the garbage collector would write the rest
            raise

    def _send(self, action: Callable[..., object], *args: bytes) -> None:
        """Only the store's library, which has retried itself, knows which bytes of a block have arrived. A ConnectionError tells the
        caller, who still has all bytes, to write the file again from the beginning."""
        try:
            action(*args)
        except PermissionError:
            raise
        except Exception as error:
            raise ConnectionError(f"{self.url} cannot be written: {error_text(error)}") from error

    def remove(self) -> None:
        self._retry("removed", self._remove_files)
        for upload in self._unfinished_uploads():
            with contextlib.suppress(FileNotFoundError):  # it ended in the meantime
                self._retry("removed", self._fs.call_s3, "abort_multipart_upload", **upload)

    def _remove_files(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.protocol not in _BUCKETS:
                self._fs.rm(self._path, recursive=True)
            elif files := self._fs.find(self._path):
                self._fs.rm(files)

    def unfinished(self) -> list[str]:
        prefix = self._path.strip("/").partition("/")[2]
        return sorted({upload["Key"][len(prefix) :].strip("/").split("/")[0] for upload in self._unfinished_uploads()})

    def _unfinished_uploads(self) -> list[dict[str, str]]:
        """Bucket, Key and UploadId of multipart uploads at or below this prefix that were neither completed nor aborted. S3 keeps
        their parts without listing them."""
        if not self._is_s3:
            return []
        bucket, key, _ = self._fs.split_path(self._path)
        uploads: list[dict[str, str]] = []
        request = {"Bucket": bucket, "Prefix": key}
        while True:
            answer = self._retry("listed", self._fs.call_s3, "list_multipart_uploads", **request)
            uploads += [
                {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                for upload in answer.get("Uploads", [])
                if upload["Key"] == key or upload["Key"].startswith(f"{key}/" if key else "")
            ]
            if not answer.get("IsTruncated"):
                return uploads
            request |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def check_access(self) -> None:
        """List, write and remove something, with few retries. Raises Unreachable or FileNotFoundError if that is impossible."""
        file = self / f".writable-{uuid.uuid4().hex[:8]}"

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):  # a prefix exists as soon as something is written
                self._fs.ls(self._path)
            self.make()
            self._fs.pipe_file(file._path, b"\n")
            self._fs.rm_file(file._path)

        retry(f"{self.url} cannot be listed and written", attempt, PAUSES[:2])


def _parts(chunks: Chunks) -> Iterator[bytes]:
    """The same bytes in parts of equal length, except the last; after many, in larger ones."""
    count, part = 0, bytearray()
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            size = PART if count < _EQUAL_PARTS else PART * _LARGER
            piece = rest[: size - len(part)]
            part += piece
            rest = rest[len(piece) :]
            if len(part) == size:
                yield bytes(part)
                count, part = count + 1, bytearray()
    if part:
        yield bytes(part)
