"""Memory and files that hold an optimizer's state outside the device, one file for each rank. Used by `optim/offload/offloaded_adamw`.

A file is scratch: it means something only to the process that made it. What survives a crash is the checkpoint, from which the
next process fills a file of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.spec.errors import RunFailed

BLOCK = 4096
"""Direct reads and writes begin and end at multiples of it, in the file and in memory."""


class Buffer:
    """Memory of the host that begins at a page, as direct reads want it; locked in place where a GPU is to copy from it."""

    def __init__(self, size: int, pin: bool):
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._memory)[:size]
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:size]
        if pin and size:
            # Not torch's pinned tensors: those take up to twice the memory, as sizes are rounded up to powers of two.
            pointer, cudart = self.bytes.data_ptr(), torch.cuda.cudart()
            if error := int(cudart.cudaHostRegister(pointer, size, 1)):  # 1: for all devices of this process
                raise RunFailed(
                    f"{size} bytes of this machine's memory cannot be locked for copies to the GPU (CUDA error {error})."
                )
            weakref.finalize(self, cudart.cudaHostUnregister, pointer).atexit = False

    def numbers(self, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """So many numbers from byte `first` on."""
        return self.bytes.narrow(0, first, count * dtype.itemsize).view(dtype)


def trim() -> None:
    """Hand memory back that this process has let go: glibc keeps tens of MiB of it otherwise, which is much beside a buffer."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class ScratchFile:
    """A file whose space is reserved, read and written past the page cache."""

    def __init__(self, path: Path, size: int):
        """Makes it, in place of one that a process left behind; raises OSError where there is no room or no right to."""
        self.path, self.size = path, size
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = _open(path, size)
        self.direct = self._try_direct()
        self._end = weakref.finalize(self, _remove, self._handle, path, os.getpid())

    def close(self) -> None:
        self._end()

    def read(self, into: memoryview, offset: int) -> None:
        self._all(os.preadv, into, offset)
        if not self.direct:
            os.posix_fadvise(self._handle, offset, len(into), os.POSIX_FADV_DONTNEED)

    def write(self, values: memoryview, offset: int) -> None:
        self._all(os.pwritev, values, offset)
        if not self.direct:
            # Only pages that are on the disk can be let go: else the cache would hold in memory what is to be out of it.
            os.fdatasync(self._handle)
            os.posix_fadvise(self._handle, offset, len(values), os.POSIX_FADV_DONTNEED)

    def _all(self, function: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(view):
                count = function(self._handle, [view[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file is shorter than it was")
                done += count
        except OSError as error:
            raise RunFailed(
                f"{self.path}, which holds optimizer states, cannot be used any more at byte {offset + done}: {error.strerror}. "
                "The newest checkpoint is valid; resume on another disk (memory.offload_path)."
            ) from error

    def _try_direct(self) -> bool:
        """Whether this file system does without the page cache; those in memory do not."""
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        trial = Buffer(BLOCK, pin=False)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._handle, [trial.view], 0)
        except OSError:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags)
            return False
        return True


def _open(path: Path, size: int) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(handle)
        os.ftruncate(handle, 0)  # of a process that is gone: all of it reads as zeros again
        found = os.fstatvfs(handle)
        if found.f_bavail * found.f_frsize < size:  # before trying, which would leave others without space for a moment
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(handle, 0, max(size, BLOCK))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # else it is another's
            os.ftruncate(handle, 0)
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> None:
    """For this process alone, for as long as it lives; not every network file system can."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL):
            raise


def _remove(handle: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked from it
        path.unlink(missing_ok=True)
    os.close(handle)


def problem(path: Path, size: int, error: OSError) -> str:
    """In words, what kept a file from being made."""
    settings = "memory.offload_path names the folder"
    if error.errno in (errno.EAGAIN, errno.EACCES) and path.exists() and os.access(path, os.W_OK):
        return f"{path} holds the optimizer states of another run that is still alive; {settings}: give this run another."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{path} would take {size} bytes for optimizer states, but {_free(path)} bytes are free there; {settings}."
    return (
        f"{path}, {size} bytes for optimizer states, cannot be made: {error.strerror} ({_free(path)} bytes free); {settings}."
    )


def _free(path: Path) -> int | str:
    for folder in path.parents:
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return "an unknown number of"
