"""A fake GPU for the duration of a rehearsal: tensors without memory that report it as their device, its streams and events, and the
kernels that torch would choose on it. `rehearsal/rehearsed_rank` opens it around the real program.

torch's own fake tensors can have the device "cuda" only where torch was built for it. So a fake tensor gives two answers: in Python,
where the program decides by device, it reports the GPU; to torch's C++ code it reports the CPU, whose autograd and dtypes every build
has. Nothing is allocated on either, and a rehearsal gives the same result on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.amp
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.observe.comm_timer import replaced
from phalanx.rehearsal import gpu_kernels

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")


class _State:
    """What changes while the fake GPU is open."""

    inside = False
    """Whether torch itself runs an operation: then tensors report the device that they really have."""
    stream = 0
    """Number of the stream that memory is allocated on: an allocator reuses memory only within a stream."""
    streams = 0
    """Streams that were created."""


STATE = _State()
_device = FakeTensor.device


def placed(tensor: Tensor) -> bool:
    """Whether a tensor counts as on the GPU."""
    return getattr(tensor, "_on_gpu", False)


def _reported_device(self: Any) -> torch.device:
    if STATE.inside or self.fake_mode.in_kernel_invocation or not placed(self):
        device: torch.device = _device.__get__(self)
        return device
    return GPU


class _Stream:
    """Every operation is complete when it returns; a stream only tells the allocator where memory belongs."""

    def __init__(self, *_: Any, **__: Any):
        self.device = GPU
        self.number, self._before = 0, 0
        if type(self) is _Stream:
            self.number = STATE.streams = min(STATE.streams + 1, 127)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        self._before, STATE.stream = STATE.stream, self.number
        return self

    def __exit__(self, *_: object) -> None:
        STATE.stream = self._before

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def query(self) -> bool:
        return True


class _Event(_Stream):
    record = wait = _Stream._nothing

    def elapsed_time(self, other: Any) -> float:
        return 0.0


_STREAM = _Stream()
_STREAM.number = STATE.streams = 0


def _as_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that, asked about the GPU, answers for the CPU, on which operations run here."""

    def on_cpu(device_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return function("cpu" if device_type in (None, "cuda") else device_type, *args, **kwargs)

    return on_cpu


def _rms_norm(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """GPUs have a kernel that saves one number per row; elsewhere torch composes it of several operations, which save more."""

    def norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if not placed(x):
            return real(x, shape, weight, eps)
        if weight is not None and weight.dtype != x.dtype:
            x, weight = (part.to(torch.promote_types(x.dtype, weight.dtype)) for part in (x, weight))
        return _RmsNorm.apply(x, weight, len(shape))

    return norm


class _RmsNorm(torch.autograd.Function):
    """Inputs, saved tensors and outputs of the kernel, without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = torch.empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return torch.empty_like(x) if needed[0] else None, torch.empty_like(weight) if needed[1] else None, None


_WITHOUT_EFFECT = (
    *("_lazy_init", "empty_cache", "manual_seed", "manual_seed_all"),
    *("reset_peak_memory_stats", "set_device", "set_stream", "synchronize"),
)


def _device_functions(card: gpu_kernels.Card) -> dict[str, Any]:
    """Functions of torch's device module that the program, FSDP2, autograd and modules of users call."""
    return {
        "Stream": _Stream,
        "Event": _Event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "stream": lambda stream: stream or _STREAM,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
    } | dict.fromkeys(_WITHOUT_EFFECT, lambda *_: None)


@contextlib.contextmanager
def gpu(card: gpu_kernels.Card) -> Iterator[None]:
    """While this context is open, fake tensors that the program creates on "cuda" appear to be on a GPU of this kind."""
    STATE.stream = STATE.streams = 0  # a rehearsal must not depend on those before it
    autocast = _as_cpu(torch.autocast)
    attention = gpu_kernels.choosing_attention(F.scaled_dot_product_attention, card, placed)
    with contextlib.ExitStack() as stack:
        for name, value in _device_functions(card).items():
            stack.enter_context(replaced(torch.get_device_module(GPU), name, value))
        for owner, name, value in (
            (torch.version, "hip", None),
            (FakeTensor, "device", property(_reported_device)),
            (FakeTensor, "is_cuda", property(placed)),
            (FakeTensor, "record_stream", lambda self, stream: None),
            (FakeTensor, "get_device", lambda self: 0 if placed(self) else -1),
            (torch, "autocast", autocast),
            (torch.amp, "autocast", autocast),
            (torch.amp.autocast_mode, "autocast", autocast),
            (torch, "is_autocast_enabled", _as_cpu(torch.is_autocast_enabled)),
            (torch, "get_autocast_dtype", _as_cpu(torch.get_autocast_dtype)),
            (torch, "rms_norm", _rms_norm(torch.rms_norm)),
            (F, "scaled_dot_product_attention", attention),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield
