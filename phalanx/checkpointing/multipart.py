"""Files on their way to a store: what was written goes up while the rest is being made, and a connection that drops costs the part
it carried. `remote` opens them.

To S3 in parts, several at once, each tried again on its own: a part replaces itself, so nothing can come twice. To other stores
through fsspec's own files, which have their ways of sending a block again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from phalanx.checkpointing.retry import persist, said

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
        return persist(f"{self._path} cannot be written", lambda: self._fs.call_s3(method, **self._file, **arguments))

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
            self._file = persist(f"{self._path} cannot be written", lambda: self._fs.open(self._path, "wb", block_size=PART))
        with self._once():
            self._file.write(bytes(data))

    def close(self) -> None:
        if self._file is None:  # small enough to be sent anew as a whole
            persist(f"{self._path} cannot be written", lambda: self._fs.pipe_file(self._path, bytes(self._first)))
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
            raise ConnectionError(f"{self._path} cannot be written: {said(error)}") from error

    def abandon(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True  # so that nothing writes the rest when it is collected
        self._file = None
