"""Chunks of tensors, for optimizers that cannot have all of them in memory, or in fp32, at once; and where offloaded master weights and
moments are kept: in host memory, or in one scratch file per rank, read and written in chunks. A scratch file means something only to the
process that created it: after a crash, the next one fills its own file from the checkpoint."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.optim.optimizer import OptimizerSetup, StateBytes
from phalanx.parallel.sharded_model import OwnedParam
from phalanx.spec.errors import RunFailed

BLOCK = 4096
"""Direct reads and writes begin and end at multiples of this many bytes, in the file and in memory."""
_ALIGNED = BLOCK // 2
"""Elements of two or four bytes that fill whole blocks: the size of every chunk in a file is a multiple."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)  # of network file systems
_HOST_CHUNK = 1 << 22
"""Elements copied at a time if all states are in memory."""
_SLOTS = 3  # one is read ahead, one is updated, one is written back


STRIDE = 64
"""Tensors are cut at multiples of this many elements, and every run begins at a multiple in its chunk. Fused kernels compute the last few
elements of a tensor, those that do not fill a vector, with other instructions, whose results differ in the last bit. Cut at such
multiples, every element is computed as in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one flattened tensor."""

    index: int
    """Index of the tensor."""
    first: int
    length: int
    start: int
    """Where the run begins in its chunk."""

    def of(self, flat: Tensor) -> Tensor:
        """The run in its tensor."""
        return flat.narrow(0, self.first, self.length)

    def within(self, buffer: Tensor) -> Tensor:
        """The run in a buffer that holds its chunk."""
        return buffer.narrow(0, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Chunk:
    runs: tuple[Run, ...]
    size: int
    """Elements, with the gaps between tensors."""


def split_chunks(lengths: Sequence[int], limit: int, multiple: int = STRIDE) -> list[Chunk]:
    """Splits tensors of these lengths, in order, into chunks of at most `limit` elements, each a multiple of `multiple`.

    A tensor is cut only where its chunk is full, so in a sequence of chunks each tensor is contiguous.
    """
    assert multiple % STRIDE == 0
    limit = max(limit // multiple, 1) * multiple
    chunks: list[Chunk] = []
    runs: list[Run] = []
    used = 0
    for index, length in enumerate(lengths):
        first = 0
        while first < length:
            if used == limit:
                chunks.append(Chunk(tuple(runs), used))
                runs, used = [], 0
            taken = min(length - first, limit - used)
            runs.append(Run(index, first, taken, used))
            first += taken
            used += _round_up(taken, STRIDE)
    if runs:
        chunks.append(Chunk(tuple(runs), _round_up(used, multiple)))
    return chunks


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class HostBuffer:
    """Host memory that begins at a page, as direct reads need; page-locked if a device copies from it."""

    def __init__(self, size: int, pin: bool):
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._memory)[:size]
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:size]
        if pin and size:
            unlock = accelerator.default().register_host_memory(self.bytes.data_ptr(), size)
            if isinstance(unlock, str):
                raise RunFailed(f"{size} bytes of this machine's memory cannot be locked for copies to the GPU ({unlock}).")
            weakref.finalize(self, unlock).atexit = False

    def elements(self, dtype: torch.dtype, first: int, count: int) -> Tensor:
        """`count` elements from byte `first` on."""
        return self.bytes.narrow(0, first, count * dtype.itemsize).view(dtype)


Allocate = Callable[[int, bool], Any]
"""Returns a HostBuffer of (size in bytes, whether it is pinned)."""


def trim() -> None:
    """Returns freed memory to the system: glibc keeps tens of MiB otherwise, which is much compared to a buffer."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class ScratchFile:
    """A file with reserved space, read and written without the page cache."""

    def __init__(self, path: Path, size: int):
        """Replaces a file that another process left behind. Raises OSError without space or permission."""
        self.path, self.size = path, size
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = _open(path, size)
        self.direct = self._try_direct()
        self._finalize = weakref.finalize(self, _remove, self._handle, path, os.getpid())

    def close(self) -> None:
        self._finalize()

    def read(self, into: memoryview, offset: int) -> None:
        self._transfer(os.preadv, into, offset)
        if not self.direct:
            os.posix_fadvise(self._handle, offset, len(into), os.POSIX_FADV_DONTNEED)

    def write(self, values: memoryview, offset: int) -> None:
        self._transfer(os.pwritev, values, offset)
        if not self.direct:
            # Only pages that are on disk can be dropped; otherwise the cache would keep the states in memory.
            os.fdatasync(self._handle)
            os.posix_fadvise(self._handle, offset, len(values), os.POSIX_FADV_DONTNEED)

    def _transfer(self, function: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int) -> None:
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
        """Whether the file system supports direct reads; those in memory do not."""
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        trial = HostBuffer(BLOCK, pin=False)
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
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        os.ftruncate(handle, 0)  # drops the states of a process that is gone; the file reads as zeros
        disk = os.fstatvfs(handle)
        if disk.f_bavail * disk.f_frsize < size:  # checked first: a failed reservation leaves others without space for a moment
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(handle, 0, max(size, BLOCK))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # then it belongs to another process
            os.ftruncate(handle, 0)
        os.close(handle)
        raise
    return handle


def _remove(handle: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        path.unlink(missing_ok=True)
    os.close(handle)


def _describe_failure(path: Path, size: int, error: OSError) -> str:
    """Why a scratch file could not be created."""
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
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return "an unknown number of"


@dataclass(slots=True)
class Record:
    """One chunk in host memory. Changes to its tensors are kept."""

    kinds: dict[str, Tensor]
    copied: Any = None
    """Event after the last copy from this memory to the device; None on the host."""


def _dtypes(moments: torch.dtype) -> dict[str, torch.dtype]:
    return {"master": torch.float32, **dict.fromkeys(MOMENTS, moments)}


def _element_bytes(moments: torch.dtype) -> int:
    """Bytes of one element's master weight and moments."""
    return sum(dtype.itemsize for dtype in _dtypes(moments).values())


class HostStore:
    """All states in host memory, each kind contiguous."""

    def __init__(self, chunks: list[Chunk], moments: torch.dtype, *, pin: bool, allocate: Allocate):
        self.chunks, self._pinned = chunks, pin
        *self._starts, total = accumulate((chunk.size for chunk in chunks), initial=0)
        self._buffers = {kind: allocate(total * dtype.itemsize, pin) for kind, dtype in _dtypes(moments).items()}
        self._kinds = {kind: self._buffers[kind].bytes.view(dtype) for kind, dtype in _dtypes(moments).items()}

    def walk(self) -> Iterator[tuple[Chunk, Record]]:
        """Yields every chunk, to be changed in place before the next one is requested."""
        for number, chunk in enumerate(self.chunks):
            yield chunk, Record({kind: self._chunk(number, kind) for kind in self._kinds})

    def put_masters(self, number: int, values: list[Tensor]) -> None:
        """Overwrites the master weights of a chunk, run by run."""
        _put(self.chunks[number], self._chunk(number, "master"), values)

    def state(self, index: int, kind: str, shape: tuple[int, ...]) -> Tensor:
        """One kind of one whole tensor."""
        runs = _runs_of(self.chunks, index)
        if not runs:
            return torch.empty(shape, dtype=self._kinds[kind].dtype)
        number, first = runs[0]
        length = sum(run.length for _, run in runs)  # chunks are contiguous, so the runs of a tensor are
        return self._kinds[kind].narrow(0, self._starts[number] + first.start, length).view(shape)

    def bytes(self) -> StateBytes:
        return StateBytes(host=sum(buffer.bytes.numel() for buffer in self._buffers.values()))

    @property
    def where(self) -> str:
        """The location in words."""
        return f"in {'locked ' if self._pinned else ''}memory of the host, {self.bytes().host} bytes"

    def close(self) -> None:
        pass

    def _chunk(self, number: int, kind: str) -> Tensor:
        return self._kinds[kind].narrow(0, self._starts[number], self.chunks[number].size)


class FileStore:
    """As `HostStore`, with all states in a file: chunk after chunk, each with all its kinds, for long reads and writes. Few chunks are in
    memory at a time."""

    def __init__(self, file: ScratchFile, chunks: list[Chunk], moments: torch.dtype, *, pin: bool, allocate: Allocate):
        self._file, self.chunks, self._dtypes, self.allocate = file, chunks, _dtypes(moments), allocate
        sizes = (dtype.itemsize for dtype in self._dtypes.values())
        *offsets, self._element_bytes = accumulate(sizes, initial=0)
        self._offsets = dict(zip(self._dtypes, offsets, strict=True))
        """Bytes of one element before those of each kind."""
        self._starts = list(accumulate((chunk.size * self._element_bytes for chunk in chunks), initial=0))
        largest = max((chunk.size for chunk in chunks), default=0)
        # At least one: it also serves to read and write single tensors.
        slots = max(min(_SLOTS, len(chunks)), 1)
        self._slots = [allocate(largest * self._element_bytes, pin) for _ in range(slots)]
        self._records: list[Record | None] = [None] * slots
        self._reader, self._writer = ThreadPoolExecutor(1, "read-ahead"), ThreadPoolExecutor(1, "write-back")

    def walk(self) -> Iterator[tuple[Chunk, Record]]:
        if not self.chunks:
            return
        written: dict[int, Future[None]] = {}
        ahead = self._reader.submit(self._read, 0, None)
        for number, chunk in enumerate(self.chunks):
            record = ahead.result()
            if number + 1 < len(self.chunks):
                # The next chunk overwrites memory that must be written back first.
                before = written.pop(number + 1 - len(self._slots), None)
                ahead = self._reader.submit(self._read, number + 1, before)
            yield chunk, record
            written[number] = self._writer.submit(self._write, number)
        for future in written.values():
            future.result()

    def put_masters(self, number: int, values: list[Tensor]) -> None:
        chunk, buffer = self.chunks[number], self._slot(0)
        _put(chunk, buffer.elements(torch.float32, 0, chunk.size), values)
        self._file.write(buffer.view[: chunk.size * torch.float32.itemsize], self._starts[number])

    def state(self, index: int, kind: str, shape: tuple[int, ...]) -> FileTensor:
        return FileTensor(self, _runs_of(self.chunks, index), kind, shape, self._dtypes[kind])

    def read(self, number: int, kind: str, run: Run) -> Tensor:
        """Reads a run into memory that the next call reuses."""
        begin, end, inside = self._blocks(number, kind, run)
        buffer = self._slot(0)
        self._file.read(buffer.view[: end - begin], begin)
        elements: Tensor = buffer.elements(self._dtypes[kind], inside, run.length)
        return elements

    def write(self, number: int, kind: str, run: Run, values: Tensor) -> None:
        begin, end, _ = self._blocks(number, kind, run)
        self.read(number, kind, run).copy_(values)  # blocks are written whole, with what else they hold
        self._file.write(self._slots[0].view[: end - begin], begin)

    def bytes(self) -> StateBytes:
        return StateBytes(files=self._file.size, buffer=sum(slot.bytes.numel() for slot in self._slots))

    @property
    def where(self) -> str:
        direct = "directly" if self._file.direct else "through the page cache, which is emptied each time"
        size = self._file.path.stat().st_size
        return (
            f"in {self._file.path}, {size} bytes, read and written {direct}, in {len(self.chunks)} chunks through "
            f"{self.bytes().buffer} bytes"
        )

    def close(self) -> None:
        self._reader.shutdown()
        self._writer.shutdown()
        self._file.close()

    def _read(self, number: int, before: Future[None] | None) -> Record:
        if before is not None:
            before.result()
        buffer, size = self._slot(number), self.chunks[number].size
        self._file.read(buffer.view[: size * self._element_bytes], self._starts[number])
        kinds = {kind: buffer.elements(dtype, size * self._offsets[kind], size) for kind, dtype in self._dtypes.items()}
        record = self._records[number % len(self._slots)] = Record(kinds)
        return record

    def _write(self, number: int) -> None:
        size = self.chunks[number].size * self._element_bytes
        self._file.write(self._slots[number % len(self._slots)].view[:size], self._starts[number])

    def _slot(self, number: int) -> Any:
        """The memory for a chunk, once its last content is on the device. That of chunk 0 serves single tensors between steps."""
        record = self._records[number % len(self._slots)]
        if record is not None and record.copied is not None:
            record.copied.synchronize()
        return self._slots[number % len(self._slots)]

    def _blocks(self, number: int, kind: str, run: Run) -> tuple[int, int, int]:
        """Begin and end of the blocks that hold a run, and where the run begins in them, in bytes."""
        itemsize = self._dtypes[kind].itemsize
        first = self._starts[number] + self.chunks[number].size * self._offsets[kind] + run.start * itemsize
        begin = first // BLOCK * BLOCK
        return begin, -(-(first + run.length * itemsize) // BLOCK) * BLOCK, first - begin


Store = HostStore | FileStore


def make_store(params: Sequence[OwnedParam], setup: OptimizerSetup) -> Store:
    """The store that `memory.offload` asks for."""
    if setup.memory.offload != "cpu":
        return _file_store(params, setup)
    chunks = split_chunks([param.value.numel() for param in params], _HOST_CHUNK)
    return HostStore(chunks, setup.moments, pin=on_device(params), allocate=setup.resources.host_buffer or HostBuffer)


def _file_store(params: Sequence[OwnedParam], setup: OptimizerSetup) -> Store:
    """States pass through memory.offload_buffer MiB. If a rank cannot create its file, all ranks fail before any step."""
    memory, mesh, moments, resources = setup.memory, setup.mesh, setup.moments, setup.resources
    folder = Path(memory.offload_path).expanduser() if memory.offload_path else resources.folder
    assert folder is not None and mesh is not None, "states in files need a folder and a rank"
    pin = accelerator.of(mesh.device).asynchronous
    extra = (8 if pin else 4) + (8 if moments != torch.float32 else 0)  # bytes of gradients, and of moments in fp32
    limit = (memory.offload_buffer << 20) // (3 * _element_bytes(moments) + extra)
    chunks = split_chunks([param.value.numel() for param in params], limit, _ALIGNED)
    path, size = folder / f"optimizer-{mesh.rank}.states", sum(chunk.size for chunk in chunks) * _element_bytes(moments)
    file, failure = None, None
    try:
        file = (resources.scratch_file or ScratchFile)(path, size)
    except OSError as error:
        failure = _describe_failure(path, size, error)
    failures = [of_rank for of_rank in mesh.gather_objects(failure) if of_rank]
    if failures:
        if file is not None:
            file.close()
        raise RunFailed("\n".join(failures))
    assert file is not None
    return FileStore(file, chunks, moments, pin=pin, allocate=resources.host_buffer or HostBuffer)


def on_device(params: Sequence[OwnedParam]) -> bool:
    """Whether a parameter is on a device that the host runs ahead of."""
    return any(accelerator.of(param.value.device).asynchronous for param in params)


@dataclass(slots=True)
class FileTensor:
    """One state of one parameter in the file: read and written whole, with one chunk in memory at a time."""

    store: FileStore
    runs: list[tuple[int, Run]]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        # Not from torch's allocator, which does not always return freed memory.
        size = math.prod(self.shape) * self.dtype.itemsize
        whole = self.store.allocate(size, False).bytes.view(self.dtype).view(self.shape) if into is None else into
        for number, run in self.runs:
            run.of(whole.view(-1)).copy_(self.store.read(number, self.kind, run))
        return whole

    def write(self, values: Tensor, /) -> None:
        for number, run in self.runs:
            self.store.write(number, self.kind, run, run.of(values.reshape(-1)))


def _runs_of(chunks: list[Chunk], index: int) -> list[tuple[int, Run]]:
    return [(number, run) for number, chunk in enumerate(chunks) for run in chunk.runs if run.index == index]


def _put(chunk: Chunk, target: Tensor, values: list[Tensor]) -> None:
    for run, value in zip(chunk.runs, values, strict=True):
        run.within(target).copy_(value)
