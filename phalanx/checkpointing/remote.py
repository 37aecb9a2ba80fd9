"""A prefix of an object store as a `Location`, through fsspec: s3://, gs:// and whatever else has a library. `location.at` makes it.

Every operation is tried again where the network fails. Where a store is and who may enter it is told to its library by the
environment and its own files, never by the run file. Nothing is kept of a store before a process first asks it something, so what a
process was forked with cannot be in the way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Callable
from typing import Any

import fsspec

from phalanx.checkpointing.location import Location, Sink
from phalanx.checkpointing.multipart import Parts, Stream
from phalanx.checkpointing.retry import PAUSES, T, persist

_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"}
"""Stores in which a folder is nothing but the beginning of names."""
_S3 = {"config_kwargs": {"read_timeout": 60, "retries": {"total_max_attempts": 1}}}
"""Trying again is done here; and a part of a slow upload is not given up after the 15 seconds of s3fs."""


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
        return persist(f"{self.url} cannot be {what}", action, pauses)

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
    fs = fsspec.filesystem(protocol, use_listings_cache=False, **given)
    if given:
        fs.retries = 1
    return fs
