"""Opens a path or URL as a `Location`, and implements it for object stores (s3://, gs://, …) on top of fsspec.

Every request to a store is retried with growing pauses. Credentials and endpoints come from the environment and the store library's own
files, never from the run file. Of the libraries' own means, s3fs retries fewer kinds of errors, sends the parts of a file one after the
other, and lists unfinished uploads of a whole bucket only; these three things are therefore written here. Does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from phalanx.checkpointing.location import Local, Location, Sink
from phalanx.spec.errors import PhalanxError, RunFailed

PART = 16 << 20
"""Bytes of one part of a multipart upload."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0)
"""Seconds before each further attempt of a request."""

_FILE = "file://"
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

T = TypeVar("T")


def open_location(place: Location | Path | str) -> Location:
    """The location of a path, or of an fsspec URL such as s3://bucket/folder."""
    if isinstance(place, str) and place.startswith(_FILE):
        return Local(Path(place.removeprefix(_FILE)))  # a file system can do more than fsspec offers
    if isinstance(place, str) and "://" in place:
        return Remote(place)
    return Local(Path(place)) if isinstance(place, str | Path) else place


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


class Remote:
    """A prefix of an object store."""

    can_rename = False

    def __init__(self, url: str):
        protocol, _, path = url.partition("://")
        self.url = f"{protocol}://{path.rstrip('/')}"

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def _fs(self) -> Any:
        return _filesystem(self.protocol, os.getpid())

    @property
    def _is_s3(self) -> bool:
        return self.protocol in ("s3", "s3a")

    @property
    def _path(self) -> str:
        return str(self._fs._strip_protocol(self.url))

    def _retry(self, what: str, action: Callable[[], T], pauses: tuple[float, ...] | None = None) -> T:
        return retry(f"{self.url} cannot be {what}", action, pauses)

    def _listing(self, pauses: tuple[float, ...] | None = None) -> dict[str, int | None]:
        """Names directly inside, with the bytes of files."""

        def list_entries() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()  # other processes write here too
            return list(self._fs.ls(self._path, detail=True))

        prefix = f"{self._path.strip('/')}/"
        try:
            entries = self._retry("listed", list_entries, pauses)
        except FileNotFoundError:
            return {}
        sizes = {
            entry["name"].strip("/"): entry["size"] if entry["type"] == "file" else None for entry in entries if entry["name"]
        }
        return {name.rsplit("/", 1)[1]: size for name, size in sizes.items() if name.startswith(prefix)}

    def is_folder(self) -> bool:
        return bool(self._listing())

    def entries(self) -> list[str]:
        return sorted(self._listing())

    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in self._listing().items() if size is not None}

    def size(self) -> int | None:
        def info() -> dict[str, Any]:
            self._fs.invalidate_cache()
            entry: dict[str, Any] = self._fs.info(self._path)
            return entry

        try:
            entry = self._retry("looked at", info)
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

    read_block = read

    def make(self) -> None:
        if self.protocol not in _BUCKETS:
            self._retry("made", lambda: self._fs.makedirs(self._path, exist_ok=True))

    def sink(self) -> Sink:
        self.parent.make()
        return MultipartUpload(self._fs, self._path) if self._is_s3 else _StreamedUpload(self._fs, self._path)

    def sync(self) -> None:
        """Does nothing: a store answers a write when it has the data."""

    def rename(self, to: Location) -> None:
        raise AssertionError(f"{self} cannot be renamed to {to} atomically")

    def remove(self) -> None:
        def remove_files() -> None:
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if self.protocol not in _BUCKETS:
                    self._fs.rm(self._path, recursive=True)
                elif files := self._fs.find(self._path):
                    self._fs.rm(files)

        self._retry("removed", remove_files)
        for upload in self._unfinished_uploads():
            with contextlib.suppress(FileNotFoundError):  # it ended in the meantime
                self._retry("removed", functools.partial(self._fs.call_s3, "abort_multipart_upload", **upload))

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
            answer = self._retry("listed", functools.partial(self._fs.call_s3, "list_multipart_uploads", **request))
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
        pauses = PAUSES[:2]
        file = self / f".writable-{uuid.uuid4().hex[:8]}"
        self._listing(pauses)
        self.make()
        file._retry("written", lambda: file._fs.pipe_file(file._path, b"\n"), pauses)
        file._retry("removed", lambda: file._fs.rm_file(file._path), pauses)


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """The fsspec file system of this process: its connections and their thread do not survive a fork."""
    import fsspec  # most runs never need it

    options = _S3 if protocol in ("s3", "s3a") else {}
    fs = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    if options:
        fs.retries = 1
    return fs


class MultipartUpload:
    """A file on its way to S3: parts are sent while the next are written, several at a time, and each is retried by itself.

    A part that is sent twice replaces itself.
    """

    def __init__(self, fs: Any, path: str):
        self._fs, self._path = fs, path
        bucket, key, _ = fs.split_path(path)
        self._file = {"Bucket": bucket, "Key": key}
        self._upload: str | None = None
        self._buffer = bytearray()
        self._parts: list[Future[str]] = []
        self._pool: ThreadPoolExecutor | None = None

    def write(self, data: memoryview | bytes) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            size = PART if len(self._parts) < _EQUAL_PARTS else PART * _LARGER
            piece = rest[: size - len(self._buffer)]
            self._buffer += piece
            rest = rest[len(piece) :]
            if len(self._buffer) == size:
                self._send()

    def _send(self) -> None:
        if self._pool is None:
            self._upload = self._call("create_multipart_upload")["UploadId"]
            self._pool = ThreadPoolExecutor(_CONCURRENT_PARTS)
        number, part, self._buffer = len(self._parts) + 1, self._buffer, bytearray()
        self._parts.append(self._pool.submit(self._send_part, number, part))
        for earlier in self._parts[:-_CONCURRENT_PARTS]:
            earlier.result()  # raises an earlier part's failure now, not after the rest of the file

    def _send_part(self, number: int, part: bytearray) -> str:
        answer = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=bytes(part))
        return str(answer["ETag"])

    def _call(self, method: str, **arguments: Any) -> Any:
        return retry(f"{self._path} cannot be written", lambda: self._fs.call_s3(method, **self._file, **arguments))

    def close(self) -> None:
        if self._upload is None:
            self._call("put_object", Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send()
        parts = [{"PartNumber": number, "ETag": part.result()} for number, part in enumerate(self._parts, 1)]
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # The answer to an earlier attempt may have been lost: then the upload no longer exists, but the file does. Its ETag ends in
            # its number of parts, which an older file of this name is unlikely to share; checksums decide when it is read.
            if not str(self._call("head_object").get("ETag", "")).strip('"').endswith(f"-{len(parts)}"):
                raise
        self._upload = None
        self._shut_down()

    def abort(self) -> None:
        """Parts that were sent take up space, unlisted, until the upload is aborted."""
        for part in self._parts:
            part.cancel()
        self._shut_down()
        if self._upload is not None:
            with contextlib.suppress(Exception):
                self._fs.call_s3("abort_multipart_upload", **self._file, UploadId=self._upload)
            self._upload = None

    def _shut_down(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class _StreamedUpload:
    """A file on its way to any other store, through the fsspec library's own file object, which resends its blocks itself."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path = fs, path
        self._first = bytearray()
        self._file: Any = None

    def write(self, data: memoryview | bytes) -> None:
        if self._file is None:
            self._first += data
            if len(self._first) < PART:
                return
            data, self._first = bytes(self._first), bytearray()
            self._file = retry(f"{self._path} cannot be written", lambda: self._fs.open(self._path, "wb", block_size=PART))
        with self._no_retry():
            self._file.write(bytes(data))

    def close(self) -> None:
        if self._file is None:  # small enough to be resent as a whole
            retry(f"{self._path} cannot be written", lambda: self._fs.pipe_file(self._path, bytes(self._first)))
        else:
            with self._no_retry():
                self._file.close()

    @contextlib.contextmanager
    def _no_retry(self) -> Iterator[None]:
        """Only the store's library, which has retried itself, knows which bytes of a block have arrived. A ConnectionError tells the
        caller, who still has all bytes, to write the file again from the beginning."""
        try:
            yield
        except PermissionError:
            raise
        except Exception as error:
            raise ConnectionError(f"{self._path} cannot be written: {error_text(error)}") from error

    def abort(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True  # otherwise the garbage collector would write the rest
        self._file = None
