"""Bytes of the state on their way to a file: copied into host memory first (`Staging`), or read from the live tensors (`live_bytes`).

The host copy is allocated in advance and reused, pinned on GPUs. Nothing that is saved changes between two optimizer steps, so the copy runs
while the next forward and backward compute, and only the optimizer step after them waits for it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.checkpointing.format import BLOCK
from phalanx.checkpointing.replicas.shm_slots import free_memory
from phalanx.checkpointing.state_tensor import WrittenBox


def raw_bytes(values: Tensor) -> memoryview:
    """The bytes of a tensor in host memory; a copy if it is not contiguous."""
    return values.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def live_bytes(boxes: list[WrittenBox]) -> Iterator[memoryview]:
    """The bytes of boxes as they are now, in full blocks of the same memory: use each before requesting the next. Blocks are whole
    pages, so that they can be written with direct I/O."""
    devices = [box.state.tensor.device for box in boxes if isinstance(box.state.tensor, Tensor)]
    device = next((device for device in devices if accelerator.of(device).asynchronous), torch.device("cpu"))
    if accelerator.of(device).asynchronous:
        block = accelerator.of(device).pin(torch.empty(BLOCK, dtype=torch.uint8))
    else:
        block = torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8)
    filled = 0
    for box in boxes:
        rest = box.values().contiguous().view(-1).view(torch.uint8)
        while len(rest):
            count = min(len(rest), BLOCK - filled)
            block[filled : filled + count].copy_(rest[:count])
            rest, filled = rest[count:], filled + count
            if filled == BLOCK:
                yield raw_bytes(block)
                filled = 0
    if filled:
        yield raw_bytes(block[:filled])


class Staging:
    """The host copy of one rank's boxes."""

    def __init__(self, device: torch.device, *, pin: bool = True):
        self._device, self._accelerator = device, accelerator.of(device)
        self._pin = pin and self._accelerator.asynchronous
        self._memory: Tensor | None = None
        self._unpin: Callable[[], object] | None = None
        self._allocating: threading.Thread | None = None
        self._copying: threading.Thread | None = None
        self._released = False
        self._stream: Any = None
        self._error: BaseException | None = None
        self._wait_events: tuple[Any, Any] | None = None

    def prepare(self, boxes: list[WrittenBox]) -> None:
        """Allocate the memory in the background: touching every page, and pinning, takes seconds."""
        size = sum(box.bytes for box in boxes)
        self._allocating = threading.Thread(target=self._allocate, args=(size,), name="staging", daemon=True)
        self._allocating.start()

    def _allocate(self, size: int) -> str | None:
        """Returns why the memory is not available, or None."""
        self._accelerator.set_device(self._device)
        try:
            memory = self._map_memory(size)
        except (OSError, MemoryError) as error:
            return str(error)
        if self._pin and size:
            unpin = self._accelerator.register_host_memory(memory.data_ptr(), size)
            if isinstance(unpin, str):
                return f"{size / 1e9:.2f} GB cannot be pinned ({unpin})"
            self._unpin = unpin
        self._memory = memory
        return None

    def _map_memory(self, size: int) -> Tensor:
        if size > (free := free_memory()):
            raise MemoryError(f"{size / 1e9:.2f} GB are needed for it, and {free / 1e9:.2f} GB are free")
        # From the system and not from torch, which rounds pinned sizes up to powers of two. In huge pages, each touched once now, so
        # that no copy into them waits for the system.
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(area, dtype=torch.uint8, count=size).zero_() if size else torch.empty(0, dtype=torch.uint8)

    def begin(self, boxes: list[WrittenBox]) -> str | None:
        """Start copying the boxes as they are now. Until `release` returns, only buffers may change. Returns why no copy is possible,
        or None."""
        size = sum(box.bytes for box in boxes)
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None
        if self._memory is None or self._memory.numel() != size:
            self._free()
            if (problem := self._allocate(size)) is not None:
                return problem
        assert self._memory is not None
        self._error, self._released = None, False
        later, begin = [], 0
        for box in boxes:
            region = self._memory[begin : begin + box.bytes].view(box.dtype).view(box.box.shape)
            begin += box.bytes
            if box.state.is_buffer:
                _copy(box, region)
            else:
                later.append((box, region))
        stream = self._accelerator.current_stream(self._device)
        computed = None if stream is None else stream.record_event()
        self._copying = threading.Thread(target=self._copy_all, args=(later, computed), name="copying", daemon=True)
        self._copying.start()
        return None

    def _copy_all(self, copies: list[tuple[WrittenBox, Tensor]], computed: Any) -> None:
        """In a thread. `computed`: event after which the device has computed the state; None on the CPU."""
        try:
            if computed is None:
                for box, region in copies:
                    _copy(box, region)
                return
            self._stream = self._stream or self._accelerator.stream(self._device)
            with self._accelerator.use(self._stream):
                self._stream.wait_event(computed)
                for box, region in sorted(copies, key=lambda pair: _on_host(pair[0])):  # start the device's copies first
                    _copy(box, region)
        except BaseException as error:  # raised by `chunks`
            self._error = error

    def release(self) -> None:
        """Wait until the state may change: by this process, or by what it launches on the device from now on."""
        if self._copying is None or self._released:
            return  # called before every optimizer step; only the first one after a save waits
        self._released = True
        self._copying.join()
        if self._stream is not None:
            current = self._accelerator.current_stream(self._device)
            before = current.record_event(self._accelerator.event(timing=True))
            current.wait_stream(self._stream)
            self._wait_events = (before, current.record_event(self._accelerator.event(timing=True)))

    def device_wait(self) -> float:
        """Seconds that the device waited for the copy; waits until that is known."""
        if self._wait_events is None:
            return 0.0
        before, after = self._wait_events
        self._wait_events = None
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000

    def chunks(self) -> list[memoryview]:
        """The copied bytes in order; waits until the copy is complete."""
        assert self._memory is not None and self._copying is not None
        self._copying.join()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            self._stream.synchronize()
        return [raw_bytes(block) for block in self._memory.split(BLOCK)] if self._memory.numel() else []

    def _free(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = None

    def close(self) -> None:
        for thread in (self._allocating, self._copying):
            if thread is not None:
                thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        self._free()


def _on_host(box: WrittenBox) -> bool:
    return isinstance(box.state.tensor, Tensor) and box.state.tensor.is_cpu


def _copy(box: WrittenBox, region: Tensor) -> None:
    region.copy_(box.values(), non_blocking=True)
