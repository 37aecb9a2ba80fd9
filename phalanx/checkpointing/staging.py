"""Host memory that a save is copied into, so that training goes on while it is written: one copy of what this rank writes, made
ready ahead and used again by every save. On GPUs it is pinned, and copies into it run at the speed of the link."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

from phalanx.checkpointing.blocks import BLOCK
from phalanx.checkpointing.files import raw
from phalanx.checkpointing.pieces import Part


class Staging:
    """The copy of one rank's parts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._memory: Tensor | None = None
        self._ready: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def prepare(self, parts: list[Part]) -> None:
        """Get the memory in the background: touching every page of it, and pinning it, takes seconds that no step should wait for."""
        size = sum(part.bytes for part in parts)
        self._ready = threading.Thread(target=self._allocate, args=(size,), name="staging", daemon=True)
        self._ready.start()

    def _allocate(self, size: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # Touched at once. From the system rather than from torch, which would round up to a power of two where it pins.
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        memory = torch.frombuffer(area, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)
        if self._device.type == "cuda" and size:
            problem = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
            if int(problem) != 0:
                raise RuntimeError(f"the copy of the state, {size} bytes, cannot be pinned in memory: {problem}")
        self._memory = memory

    def take(self, parts: list[Part]) -> None:
        """Copy the parts as they are now. Returns when they may be changed."""
        size = sum(part.bytes for part in parts)
        if self._ready is not None:
            self._ready.join()
            self._ready = None
        if self._memory is None or self._memory.numel() != size:
            self._release()
            self._allocate(size)
        assert self._memory is not None
        begin = 0
        for part in parts:
            found = part.piece.tensor
            values = part.of(found.detach() if isinstance(found, Tensor) else found.read())
            region = self._memory[begin : begin + part.bytes].view(values.dtype).view(values.shape)
            region.copy_(values, non_blocking=True)
            begin += part.bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def chunks(self) -> list[memoryview]:
        """What was copied, in order."""
        assert self._memory is not None
        return [raw(block) for block in self._memory.split(BLOCK)] if self._memory.numel() else []

    def _release(self) -> None:
        if self._memory is not None and self._device.type == "cuda" and self._memory.numel():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = None

    def close(self) -> None:
        if self._ready is not None:
            self._ready.join()
        self._release()
