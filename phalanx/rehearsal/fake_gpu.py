"""A GPU that is not there, for as long as a rehearsal lasts: tensors without memory that say they lie on it, its streams and events,
and the choices that libraries would make on it. `rehearsal/rehearse` opens it around the real program.

torch's own fake tensors can say "cuda" only where torch was built for it. So two readers are told two things: whoever asks a tensor
in Python where it lies is told the GPU, as the program's own decisions hang on that; torch's C++ side is told the CPU, whose
autograd and formats every build has. Nothing is allocated on either, and the same is rehearsed on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.amp
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.rehearsal import attention_kernels

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")


class Inside:
    """Whether torch itself is at work on an operation: then tensors tell the truth."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = False


INSIDE = Inside()


class Current:
    """The stream that allocations are made on: an allocator keeps streams apart."""

    __slots__ = ("count", "now")

    def __init__(self) -> None:
        self.now = self.count = 0


STREAM = Current()
_device = FakeTensor.device


def placed(tensor: Tensor) -> bool:
    """Whether a tensor is taken to lie on the GPU."""
    return getattr(tensor, "_on_gpu", False)


def _told(self: Any) -> torch.device:
    if INSIDE.now or self.fake_mode.in_kernel_invocation or not placed(self):
        found: torch.device = _device.__get__(self)
        return found
    return GPU


class _Stream:
    """In order and at once: what matters of streams here is only that they are asked for."""

    def __init__(self, *_: Any, **__: Any):
        self.device = GPU
        self.number, self._before = 0, 0
        if type(self) is _Stream:
            self.number = STREAM.count = min(STREAM.count + 1, 127)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        self._before, STREAM.now = STREAM.now, self.number
        return self

    def __exit__(self, *_: object) -> None:
        STREAM.now = self._before

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
_STREAM.number = STREAM.count = 0


def _as_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same question about the device that plays the GPU's part."""

    def asked(device_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return function("cpu" if device_type in (None, "cuda") else device_type, *args, **kwargs)

    return asked


def _rms_norm(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """GPUs have a kernel that keeps one number per row; elsewhere torch puts it together from parts, which keeps more."""

    def norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if not placed(x):
            return real(x, shape, weight, eps)
        if weight is not None and weight.dtype != x.dtype:
            x, weight = (part.to(torch.promote_types(x.dtype, weight.dtype)) for part in (x, weight))
        return _RmsNorm.apply(x, weight, len(shape))

    return norm


class _RmsNorm(torch.autograd.Function):
    """What the kernel takes, keeps and gives; not what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = torch.empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return torch.empty_like(x) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, None


_CUDA: dict[str, Any] = {
    "Stream": _Stream,
    "Event": _Event,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": lambda stream: stream or _STREAM,
    "set_stream": lambda stream: None,
    "synchronize": lambda device=None: None,
    "max_memory_allocated": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
}


@contextlib.contextmanager
def gpu(card: attention_kernels.Card) -> Iterator[None]:
    """While it is open, fake tensors that the program made on "cuda" are on a GPU of this kind as far as Python can tell."""
    STREAM.now = STREAM.count = 0  # or a rehearsal would hang on how many there were before
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        for name, value in _CUDA.items():
            patch(torch.cuda, name, value)
        patch(torch.cuda, "get_device_capability", lambda device=None: card.capability)
        patch(torch.cuda, "get_device_name", lambda device=None: card.name)
        patch(FakeTensor, "device", property(_told))
        patch(FakeTensor, "is_cuda", property(placed))
        patch(FakeTensor, "record_stream", lambda self, stream: None)
        patch(FakeTensor, "get_device", lambda self: 0 if placed(self) else -1)
        autocast = _as_cpu(torch.autocast)
        patch(torch, "autocast", autocast)
        patch(torch.amp, "autocast", autocast)
        patch(torch.amp.autocast_mode, "autocast", autocast)
        patch(torch, "is_autocast_enabled", _as_cpu(torch.is_autocast_enabled))
        patch(torch, "get_autocast_dtype", _as_cpu(torch.get_autocast_dtype))
        patch(torch, "rms_norm", _rms_norm(torch.rms_norm))
        patch(F, "scaled_dot_product_attention", attention_kernels.chosen(F.scaled_dot_product_attention, card, placed))
        yield
