"""Host memory that a save is copied into, so that training goes on while it is written: one copy of what this rank writes, made
ready ahead and used again by every save. On GPUs it is pinned, and copies into it run at the speed of the link.

Nothing that is saved changes between two updates of the optimizer, so the copy is made beside the next forward and backward, and
only the update after them waits for its end."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

from phalanx.checkpointing.format import BLOCK
from phalanx.checkpointing.replicas.shm_slots import free_memory
from phalanx.checkpointing.shard_io import raw
from phalanx.checkpointing.state_tensor import Part


class Staging:
    """The copy of one rank's parts."""

    def __init__(self, device: torch.device, *, pin: bool = True):
        self._device, self._pin = device, pin and device.type == "cuda"
        self._memory: Tensor | None = None
        self._ready: threading.Thread | None = None
        self._copying: threading.Thread | None = None
        self._released = False
        self._stream: torch.cuda.Stream | None = None
        self._problem: BaseException | None = None
        self._waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def prepare(self, parts: list[Part]) -> None:
        """Get the memory in the background: touching every page of it, and pinning it, takes seconds that no step should wait for."""
        size = sum(part.bytes for part in parts)
        self._ready = threading.Thread(target=self._allocate, args=(size,), name="staging", daemon=True)
        self._ready.start()

    def _allocate(self, size: int) -> str | None:
        """Why it cannot be had; None where it is there."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            memory = self._obtain(size)
        except (OSError, MemoryError) as error:
            return str(error)
        if self._pin and size:
            problem = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
            if int(problem) != 0:
                return f"{size / 1e9:.2f} GB cannot be pinned ({problem})"
        self._memory = memory
        return None

    def _obtain(self, size: int) -> Tensor:
        if size > (free := free_memory()):
            raise MemoryError(f"{size / 1e9:.2f} GB are needed for it, and {free / 1e9:.2f} GB are free")
        # From the system rather than from torch, which would round up to a power of two where it pins; in large pages, and each
        # touched once now, so that no copy into it waits for the system.
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(area, dtype=torch.uint8, count=size).zero_() if size else torch.empty(0, dtype=torch.uint8)

    def begin(self, parts: list[Part]) -> str | None:
        """Copy the parts as they are now, beside whatever this process does next: until `release`, nothing but what is not steady
        may change. Returns why there can be no copy, if so."""
        size = sum(part.bytes for part in parts)
        if self._ready is not None:
            self._ready.join()
            self._ready = None
        if self._memory is None or self._memory.numel() != size:
            self._release()
            if (problem := self._allocate(size)) is not None:
                return problem
        assert self._memory is not None
        self._problem, self._released = None, False
        later, begin = [], 0
        for part in parts:
            region = self._memory[begin : begin + part.bytes].view(part.piece.tensor.dtype).view(part.shape)
            begin += part.bytes
            if part.piece.is_buffer:
                _copy(part, region)
            else:
                later.append((part, region))
        self._copying = threading.Thread(target=self._copy_all, args=(later, self._now()), name="copying", daemon=True)
        self._copying.start()
        return None

    def _now(self) -> torch.cuda.Event | None:
        """What the device has been told so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _copy_all(self, parts: list[tuple[Part, Tensor]], now: torch.cuda.Event | None) -> None:
        try:
            if now is None:
                for part, region in parts:
                    _copy(part, region)
                return
            # On a stream of its own, beside the next forward and backward. What the device holds is under way first.
            self._stream = self._stream or torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(now)
                for part, region in sorted(parts, key=lambda pair: _on_host(pair[0])):
                    _copy(part, region)
        except BaseException as error:  # told to whoever waits
            self._problem = error

    def release(self) -> None:
        """Wait until the parts may be changed: by this process, or by what it tells the device from now on."""
        if self._copying is None or self._released:
            return  # before every update: it is the first after a save that waits, and whose wait is told
        self._released = True
        self._copying.join()
        if self._stream is not None:
            mine = torch.cuda.current_stream(self._device)
            before = mine.record_event(torch.cuda.Event(enable_timing=True))
            mine.wait_stream(self._stream)
            self._waits = (before, mine.record_event(torch.cuda.Event(enable_timing=True)))

    def waited(self) -> float:
        """Seconds that the device waited for the copy before it went on, known when it did."""
        if self._waits is None:
            return 0.0
        before, after = self._waits
        self._waits = None
        after.synchronize()
        return before.elapsed_time(after) / 1000

    def chunks(self) -> list[memoryview]:
        """What was copied, in order, when it is all there."""
        assert self._memory is not None and self._copying is not None
        self._copying.join()
        if self._problem is not None:
            raise self._problem
        if self._stream is not None:
            self._stream.synchronize()
        return [raw(block) for block in self._memory.split(BLOCK)] if self._memory.numel() else []

    def _release(self) -> None:
        if self._memory is not None and self._pin and self._memory.numel():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = None

    def close(self) -> None:
        for thread in (self._ready, self._copying):
            if thread is not None:
                thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        self._release()


def _on_host(part: Part) -> bool:
    return isinstance(part.piece.tensor, Tensor) and part.piece.tensor.is_cpu


def _copy(part: Part, region: Tensor) -> None:
    found = part.piece.tensor
    region.copy_(part.of(found.detach() if isinstance(found, Tensor) else found.read()), non_blocking=True)
