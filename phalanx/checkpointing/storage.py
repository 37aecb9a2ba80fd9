"""A prefix of an object store as a `Location`, through fsspec: s3://, gs:// and whatever else has a library. `location.at` makes it.

Every operation is tried again where the network fails. Where a store is and who may enter it is told to its library by the
environment and its own files, never by the run file. Nothing is kept of a store before a process first asks it something, so what a
process was forked with cannot be in the way.
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

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"}
"""Stores in which a folder is nothing but the beginning of names."""
_S3 = {"config_kwargs": {"read_timeout": 60, "retries": {"total_max_attempts": 1}}}
"""Trying again is done here; and a part of a slow upload is not given up after the 15 seconds of s3fs."""


_FILE = "file://"


def open_location(place: Location | Path | str) -> Location:
    """A path, or an fsspec URL such as s3://bucket/folder."""
    if isinstance(place, str) and place.startswith(_FILE):
        return Local(Path(place.removeprefix(_FILE)))  # a file system can do more than fsspec asks of it
    if isinstance(place, str) and "://" in place:
        return Remote(place)
    return Local(Path(place)) if isinstance(place, str | Path) else place


class Remote:
    """In an object store."""

    renames = False

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
    def _path(self) -> str:
        return str(self._fs._strip_protocol(self.url))

    def _try(self, what: str, action: Callable[[], T], pauses: tuple[float, ...] | None = None) -> T:
        return retry(f"{self.url} cannot be {what}", action, pauses)

    def _listing(self, pauses: tuple[float, ...] | None = None) -> dict[str, int | None]:
        """Names directly inside, with the bytes of files."""

        def look() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()  # others write here too
            return list(self._fs.ls(self._path, detail=True))

        own = self._path.strip("/")
        try:
            found = self._try("listed", look, pauses)
        except FileNotFoundError:
            return {}
        inside = {
            entry["name"].strip("/"): entry["size"] if entry["type"] == "file" else None for entry in found if entry["name"]
        }
        return {name.rsplit("/", 1)[1]: size for name, size in inside.items() if name.startswith(f"{own}/")}

    def is_folder(self) -> bool:
        return bool(self._listing())

    def entries(self) -> list[str]:
        return sorted(self._listing())

    def sizes(self) -> dict[str, int]:
        return {name: size for name, size in self._listing().items() if size is not None}

    def size(self) -> int | None:
        def look() -> dict[str, Any]:
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.info(self._path)
            return found

        try:
            found = self._try("looked at", look)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

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
                    return b""  # a store refuses to read behind the end
                raise

        return self._try("read", get)

    def make(self) -> None:
        """Nothing, in stores whose folders are only names."""
        if self.protocol not in _BUCKETS:
            self._try("made", lambda: self._fs.makedirs(self._path, exist_ok=True))

    def sink(self) -> Sink:
        self.parent.make()
        return Parts(self._fs, self._path) if hasattr(self._fs, "call_s3") else Stream(self._fs, self._path)

    def sync(self) -> None:
        """Nothing: a store answers when it has what it was given."""

    def rename(self, to: Location) -> None:
        raise AssertionError(f"{self} cannot become {to} in one instant")

    def remove(self) -> None:
        def away() -> None:
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                if self.protocol not in _BUCKETS:
                    self._fs.rm(self._path, recursive=True)
                elif files := self._fs.find(self._path):  # where there are none, that is all it asks
                    self._fs.rm(files)

        self._try("removed", away)
        for upload in self._uploads():
            file = {"Bucket": upload["Bucket"], "Key": upload["Key"], "UploadId": upload["UploadId"]}
            try:
                self._try("removed", functools.partial(self._fs.call_s3, "abort_multipart_upload", **file))
            except FileNotFoundError:
                continue  # it ended meanwhile

    def unfinished(self) -> list[str]:
        """Names of what is directly inside and holds files that were begun, of which a store keeps the parts without showing them."""
        own = self._path.strip("/").partition("/")[2]
        return sorted({upload["Key"][len(own) :].strip("/").split("/")[0] for upload in self._uploads()})

    def _uploads(self) -> list[dict[str, Any]]:
        """Begun here or below, and neither completed nor called off."""
        if not hasattr(self._fs, "call_s3"):
            return []
        bucket, key, _ = self._fs.split_path(self._path)
        found: list[dict[str, Any]] = []
        ask = {"Bucket": bucket, "Prefix": key}
        while True:
            answer = self._try("listed", functools.partial(self._fs.call_s3, "list_multipart_uploads", **ask))
            found += [
                upload | {"Bucket": bucket}
                for upload in answer.get("Uploads", [])
                if upload["Key"] == key or upload["Key"].startswith(f"{key}/" if key else "")
            ]
            if not answer.get("IsTruncated"):
                return found
            ask |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def attempt(self) -> None:
        """List, write and remove something, with little patience: Unreachable, or FileNotFoundError, where that cannot be done."""
        few = PAUSES[:2]
        file = self / f".writable-{uuid.uuid4().hex[:8]}"
        self._listing(few)
        self.make()
        file._try("written", lambda: file._fs.pipe_file(file._path, b"\n"), few)
        file._try("removed", lambda: file._fs.rm_file(file._path), few)


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """Of this process: connections and the thread that serves them do not survive a fork."""
    given = _S3 if protocol in ("s3", "s3a") else {}
    import fsspec  # most runs never need it

    fs = fsspec.filesystem(protocol, use_listings_cache=False, **given)
    if given:
        fs.retries = 1
    return fs


PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0)
"""Seconds before each further try."""
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidRegionError")

T = TypeVar("T")


class Unreachable(RunFailed, OSError):
    """A place that does not answer, or refuses. What lies there may be whole: it must not be taken for damaged."""

    def __init__(self, message: str):
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[Unreachable], tuple[str]]:
        return Unreachable, (str(self),)


def retry(what: str, action: Callable[[], T], pauses: tuple[float, ...] | None = None) -> T:
    """Do it, again where it fails for a reason that may pass. FileNotFoundError where nothing is there; else Unreachable."""
    for pause in (*(PAUSES if pauses is None else pauses), None):
        try:
            return action()
        except (FileNotFoundError, PhalanxError):
            raise
        except Exception as error:  # of libraries that share no class: botocore, aiohttp, those of other stores
            if pause is None or not _may_pass(error):
                raise Unreachable(f"{what}: {error_text(error)}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, (*_FINAL, NotImplementedError, TypeError)) and type(error).__name__ not in _HOPELESS


def error_text(error: BaseException) -> str:
    """In words, on one line."""
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
    return " ".join(text.split()).removesuffix(".")


PART = 16 << 20
_AT_ONCE = 4  # parts on their way; so many and the one being filled are in memory
_EVEN = 5000
"""So many parts have the same size, then they are larger, as a store takes 10,000 of one file."""
_LARGER = 8


class Parts:
    """A file of an S3 store, through the calls that s3fs makes itself."""

    def __init__(self, fs: Any, path: str):
        self._fs, self._path = fs, path
        bucket, key, _ = fs.split_path(path)
        self._file = {"Bucket": bucket, "Key": key}
        self._upload: str | None = None
        self._filling = bytearray()
        self._begun: list[Future[str]] = []
        self._pool: ThreadPoolExecutor | None = None

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            size = PART if len(self._begun) < _EVEN else PART * _LARGER
            taken = left[: size - len(self._filling)]
            self._filling += taken
            left = left[len(taken) :]
            if len(self._filling) == size:
                self._send()

    def _send(self) -> None:
        if self._pool is None:
            self._upload = self._call("create_multipart_upload")["UploadId"]
            self._pool = ThreadPoolExecutor(_AT_ONCE)
        number, part, self._filling = len(self._begun) + 1, self._filling, bytearray()
        self._begun.append(self._pool.submit(self._part, number, part))
        for earlier in self._begun[:-_AT_ONCE]:
            earlier.result()  # also so that a failure is told now, not after all the rest

    def _part(self, number: int, part: bytearray) -> str:
        sent = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=bytes(part))
        return str(sent["ETag"])

    def _call(self, method: str, **arguments: Any) -> Any:
        return retry(f"{self._path} cannot be written", lambda: self._fs.call_s3(method, **self._file, **arguments))

    def close(self) -> None:
        """A store answers when it has it."""
        if self._upload is None:
            self._call("put_object", Body=bytes(self._filling))
            return
        if self._filling:
            self._send()
        tags = [part.result() for part in self._begun]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        self._complete({"Parts": parts}, len(parts))
        self._upload = None
        self._end()

    def _complete(self, parts: dict[str, Any], count: int) -> None:
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts)
        except FileNotFoundError:
            # The answer to an earlier try may have been lost: then there is no such upload any more, and the file is there. Its
            # tag ends in the number of its parts, which an older file of the same name would hardly share; checksums tell for sure.
            found = self._call("head_object")
            if not str(found.get("ETag", "")).strip('"').endswith(f"-{count}"):
                raise

    def abandon(self) -> None:
        """Parts that were sent take up room, unseen, until the upload is called off."""
        for part in self._begun:
            part.cancel()
        self._end()
        if self._upload is not None:
            with contextlib.suppress(Exception):
                self._fs.call_s3("abort_multipart_upload", **self._file, UploadId=self._upload)
            self._upload = None

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class Stream:
    """A file of any other store."""

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
        with self._once():
            self._file.write(bytes(data))

    def close(self) -> None:
        if self._file is None:  # small enough to be sent anew as a whole
            retry(f"{self._path} cannot be written", lambda: self._fs.pipe_file(self._path, bytes(self._first)))
        else:
            with self._once():
                self._file.close()

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """Which bytes of a block have arrived when its sending fails, only the store's library knows, which has tried again itself.
        Whoever has all the bytes still may begin anew."""
        try:
            yield
        except PermissionError:
            raise
        except Exception as error:
            raise ConnectionError(f"{self._path} cannot be written: {error_text(error)}") from error

    def abandon(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True  # so that nothing writes the rest when it is collected
        self._file = None
