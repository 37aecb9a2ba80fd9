"""Everything that differs between kinds of devices: streams, events, pinned memory, memory statistics, backends, number formats.

The only file that names `torch.cuda`. Rooms ask `of(device)`. They look at `device.type` only where torch takes it (autocast, DeviceMesh), for
what one kernel of torch supports, and to tell the host, the GPU and tensors without memory apart, as a rehearsal does. To add a kind of
device, write one class and `register` it; the planner needs an entry in its catalogue besides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

_MEMORY_EVENTS = 1_000_000  # newest allocations of a memory history that are kept


class Accelerator:
    """The CPU, and the interface of every other kind of device.

    On the CPU an operation is complete when it returns: there are no streams and nothing to wait for.
    """

    type: ClassVar[str] = "cpu"
    """As `torch.device.type` says it."""
    backend: ClassVar[str] = "gloo"
    """Process-group backends; small sums of the host go over gloo on every machine."""
    shared_backend: ClassVar[str] = "gloo"
    """Process-group backends of ranks that share a device."""
    asynchronous: ClassVar[bool] = False
    """Whether the host runs ahead of the device, so that time is measured with events and copies need pinned memory."""
    compute: ClassVar[str] = "fp32"
    """Default of `precision.compute`."""

    def available(self) -> bool:
        """Whether this machine and this build of torch have such a device."""
        return True

    def count(self) -> int:
        """Number of such devices that this process sees. The CPU is one, which any number of ranks share."""
        return 1

    def device(self, index: int = 0) -> torch.device:
        """The device of the rank with this number on its node."""
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """Make it the calling thread's device."""

    def name(self, device: torch.device | None = None) -> str:
        """The device's name as its driver prints it."""
        return "CPU"

    def capability(self, device: torch.device | None = None) -> tuple[int, int]:
        """NVIDIA's compute capability; (0, 0) for devices that have none."""
        return (0, 0)

    def seed(self, seed: int) -> None:
        """Begin the default random numbers of the host and of the calling thread's device anew. `torch.manual_seed` also formats the stack once for
        every other kind of device that torch knows, in every step."""
        torch.default_generator.manual_seed(seed)

    # Memory.

    def memory_allocated(self) -> int:
        """Bytes in use: of tensors on the device; of this process on the CPU."""
        return resident_bytes()

    def max_memory_allocated(self) -> int:
        """Largest number of bytes in use since `reset_peak_memory`. The CPU knows only what is in use now."""
        return resident_bytes()

    def max_memory_reserved(self) -> int:
        """Largest number of bytes that torch has held since `reset_peak_memory`, with what is cached and fragmented."""
        return self.max_memory_allocated()

    def allocation_retries(self) -> int:
        """How often an allocation had to give cached blocks back to the driver first."""
        return 0

    def reset_peak_memory(self) -> None:
        """Forget earlier peaks."""

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""

    def record_memory_history(self, on: bool) -> bool:
        """Begin or end to record every allocation with its stack; False where torch's allocator does not."""
        return False

    def memory_snapshot(self) -> Any:
        """What was recorded, as a table that https://pytorch.org/memory_viz shows when it is pickled."""
        return None

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor in page-locked memory, from which copies to the device run in parallel with the host's work."""
        return tensor

    def register_host_memory(self, pointer: int, size: int) -> Callable[[], object] | str:
        """Page-lock memory that torch did not allocate; returns what unlocks it, or why it cannot be locked."""
        return lambda: None

    def copy_to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start a copy to the host; the function that is returned waits for it, not for what the device begins afterwards."""
        return lambda: tensor

    # Order and time.

    def record(self, module: nn.Module, inputs: tuple[Tensor, ...], pool: Any = None) -> Callable[..., Any] | None:
        """Record forward and backward of a module as graphs of the device. Returns what replays them with other values of the inputs, as an operation
        that autograd knows; None where devices have no graphs. `pool`: memory of other records, of which none is in use at the same time."""
        return None

    def record_pool(self) -> Any:
        """Memory that records can share; None where devices have no graphs."""
        return None

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until the device has done everything that was begun."""

    def stream(self, device: torch.device) -> Any:
        """A new stream; None where there are none."""
        return None

    def current_stream(self, device: torch.device | None = None) -> Any:
        """The stream that operations go to; None where there are none."""
        return None

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, operations go to the stream."""
        return nullcontext()

    def event(self, *, timing: bool = False) -> Any:
        """An event that can be recorded in a stream; None where there are none."""
        return None


class Cuda(Accelerator):
    """NVIDIA GPUs, and AMD's where torch is built for ROCm."""

    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    shared_backend = "cpu:gloo,cuda:gloo"  # NCCL refuses two ranks on one GPU
    asynchronous = True
    compute = "bf16"

    def available(self) -> bool:
        return torch.cuda.is_available()

    def count(self) -> int:
        return torch.cuda.device_count()

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cuda", index)

    # Methods, not references to torch's functions: a rehearsal replaces those.

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def name(self, device: torch.device | None = None) -> str:
        return torch.cuda.get_device_name(device)

    def capability(self, device: torch.device | None = None) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.cuda.manual_seed(seed)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def max_memory_reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def allocation_retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def record_memory_history(self, on: bool) -> bool:
        # Stacks of Python only: those of C++ take many times as long, and name nothing that a model's author knows.
        if on:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MEMORY_EVENTS)
        else:
            torch.cuda.memory._record_memory_history(enabled=None)
        return True

    def memory_snapshot(self) -> Any:
        return torch.cuda.memory._snapshot()

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def register_host_memory(self, pointer: int, size: int) -> Callable[[], object] | str:
        # Not torch's pinned tensors: those take up to twice the memory, as sizes are rounded up to powers of two.
        cudart = torch.cuda.cudart()
        if error := int(cudart.cudaHostRegister(pointer, size, 1)):  # 1: for all devices of this process
            return f"CUDA error {error}"
        return lambda: cudart.cudaHostUnregister(pointer)

    def copy_to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> Tensor:
            copied.synchronize()
            return host

        return read

    def record(self, module: nn.Module, inputs: tuple[Tensor, ...], pool: Any = None) -> Callable[..., Any] | None:
        # The nodes that receive gradients are made while recording and belong to its stream: replays wait for that stream, which is idle.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        # One warm-up: whatever is done once per process was done by the steps before. Frozen parameters have no gradient.
        return torch.cuda.make_graphed_callables(module, inputs, num_warmup_iters=1, allow_unused_input=True, pool=pool)

    def record_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.cuda.synchronize(device)

    def stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device | None = None) -> Any:
        return torch.cuda.current_stream(device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self, *, timing: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timing)


class Meta(Accelerator):
    """Tensors without memory, of a rank that is only planned: sizes follow the rules for GPUs."""

    type = "meta"
    asynchronous = True

    def available(self) -> bool:
        return False

    def device(self, index: int = 0) -> torch.device:
        return torch.device("meta")


_KINDS = {kind.type: kind for kind in (Accelerator(), Cuda(), Meta())}


def register(kind: Accelerator) -> None:
    """Make a kind of device known under its type."""
    _KINDS[kind.type] = kind


def of(device: torch.device | str) -> Accelerator:
    """What is to be known about a device's kind."""
    kind = device if isinstance(device, str) else device.type
    return _KINDS[kind.partition(":")[0]]


def kinds() -> tuple[str, ...]:
    """Types of all devices that are known."""
    return tuple(_KINDS)


def default() -> Accelerator:
    """The kind that a program without a run file computes on: the first that this machine has, other than the CPU."""
    return next((kind for kind in _KINDS.values() if kind.type != "cpu" and kind.available()), _KINDS["cpu"])


def resident_bytes() -> int:
    """Memory of this process in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
