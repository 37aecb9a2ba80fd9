"""A fake GPU for the duration of a rehearsal: tensors without memory that report it as their device, its streams and events, and the
kernels that torch would choose on it. `rehearsal/rehearsed_rank` opens it around the real program.

torch's own fake tensors can have the device "cuda" only where torch was built for it. So a fake tensor gives two answers: in Python,
where the program decides by device, it reports the GPU; to torch's C++ code it reports the CPU, whose autograd and dtypes every build
has. Nothing is allocated on either, and a rehearsal gives the same result on every machine.

What attention saves for the backward depends on the kernel: from one number per query to the whole table of scores. The rules are those
of torch 2.11 to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), checked on an H200. Memory inside kernels appears in no
operation, yet it can be the peak; its formulas were measured on an H200 with torch 2.11. CPUs have none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.amp
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.kernels import document_attention, sink_attention
from phalanx.observe.comm_timer import replaced

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Card:
    """What libraries ask about a GPU."""

    name: str
    capability: tuple[int, int]
    processors: int = 132
    """Number of streaming multiprocessors, over which sums of many rows are spread."""

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS allocates for each thread that computes matrix products."""
        return 32 << 20 if self.capability >= (9, 0) else (4096 * 2 + 16 * 8) << 10


CARDS = {
    "v100": Card("Tesla V100", (7, 0), 80),
    "a100": Card("NVIDIA A100", (8, 0), 108),
    "h100": Card("NVIDIA H100", (9, 0), 132),
    "h200": Card("NVIDIA H200", (9, 0), 132),
    "b200": Card("NVIDIA B200", (10, 0), 148),
}


def card(name: str) -> Card:
    """The GPU with this catalogue key or driver name; an unknown GPU counts as a Hopper."""
    low = name.lower()
    aliases = {"h800": "h100", "gb200": "b200", "l40": "a100"}
    key = next((key for key in (*CARDS, *aliases) if key in low), "h100")
    return CARDS[aliases.get(key, key)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalDevice:
    """The device that the rehearsed rank runs on."""

    card: Card | None
    """The GPU; None: a CPU."""
    capacity: int | None = None
    """Bytes of the device that this rank may use; None: no limit."""
    node: int = 8
    """Number of devices of a host."""
    island: int = 8
    """Number of devices that share fast links."""

    def tier(self, ranks: list[int]) -> str:
        """The slowest links between these ranks."""
        for name, size in (("node", self.node), ("island", self.island)):
            if min(ranks) // size == max(ranks) // size:
                return name
        return "across"


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


def _device_functions(card: Card) -> dict[str, Any]:
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
def gpu(card: Card) -> Iterator[None]:
    """While this context is open, fake tensors that the program creates on "cuda" appear to be on a GPU of this kind."""
    STATE.stream = STATE.streams = 0  # a rehearsal must not depend on those before it
    autocast = _as_cpu(torch.autocast)
    attention = choosing_attention(F.scaled_dot_product_attention, card, placed)
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


# The kernels of a GPU.


def kernel(card: Card, dtype: torch.dtype, *, widths: tuple[int, int], masked: bool, grouped: bool) -> str:
    """ "cudnn", "flash", "efficient" or "math", in the order in which torch tries them."""
    half, whole = dtype in (torch.float16, torch.bfloat16), all(width % 8 == 0 for width in widths)
    widest = max(widths)
    if half and card.capability >= (9, 0) and whole and widest <= 256:
        return "cudnn"
    if half and card.capability >= (8, 0) and not masked and widest <= 256 and widths[0] == widths[1]:
        return "flash"
    aligned = all(width % (8 if half else 4) == 0 for width in widths) and (
        dtype != torch.bfloat16 or card.capability >= (8, 0)
    )
    if not grouped and aligned and dtype in (torch.float16, torch.bfloat16, torch.float32):
        return "efficient"
    return "math"


def choosing_attention(real: Callable[..., Tensor], card: Card, on_gpu: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """A replacement of F.scaled_dot_product_attention that chooses the kernel as the GPU `card` would."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **how: Any) -> Tensor:
        if not on_gpu(query):
            return real(query, key, value, attn_mask, *rest, **how)
        how = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | how
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(low) for x in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        widths, grouped = (query.shape[-1], value.shape[-1]), query.shape[1] != key.shape[1]
        way = kernel(card, query.dtype, widths=widths, masked=attn_mask is not None, grouped=grouped)
        with torch.autocast("cpu", enabled=False):
            bias = _bias(attn_mask, query)
            return _attend((query, key, value), bias, how.get("is_causal", False), how.get("scale"), way)

    return attend


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A boolean mask as numbers to add, as torch converts it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(number, dtype=q.dtype, device=q.device) for number in (0.0, -math.inf))
    return torch.where(mask, zero, never)


def _attend(qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, causal: bool, scale: float | None, way: str) -> Tensor:
    q, k, v = qkv
    if way == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
    if way == "flash":
        width = q.shape[-1]
        scale = width**-0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, -width % 8)) if width % 8 else x for x in qkv)
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0][..., :width]
    if way == "efficient":
        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
    grouped = q.shape[1] != k.shape[1]
    return _aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=grouped)[0]


_FEW = 3072
"""Up to this many tokens, the backward of an embedding does not sort."""
_SUMMED = 10
"""Rows that it sums at a time."""

Formula = Callable[[tuple[Any, ...], int], int]
"""(arguments of the operation, number of the GPU's multiprocessors) → bytes."""


def workspace_bytes(func: Any, args: tuple[Any, ...], processors: int) -> int:
    """Bytes that the kernel of this operation allocates besides its results and frees before it returns."""
    formula = FORMULAS.get(func)
    return 0 if formula is None else formula(args, processors)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _if_broadcast(gradient: Tensor) -> int:
    """A gradient that is broadcast is copied first."""
    return _bytes(gradient) if 0 in gradient.stride() else 0


def _if_grouped(q: Tensor, k: Tensor, v: Tensor) -> int:
    """With grouped heads, the gradients of keys and values of every query head."""
    return (_bytes(k) + _bytes(v)) // k.shape[1] * q.shape[1] if q.shape[1] != k.shape[1] else 0


def _cudnn_backward(args: tuple[Any, ...], _: int) -> int:
    """The queries' gradient in fp32, and one number per query."""
    gradient, q, k, v = args[:4]
    return q.numel() * 4 + q.numel() // q.shape[-1] * 4 + _if_grouped(q, k, v) + _if_broadcast(gradient)


def _flash_backward(args: tuple[Any, ...], _: int) -> int:
    _, q, k, v = args[:4]
    rows = -(-q.shape[2] // 128) * 128
    return q.shape[0] * q.shape[1] * rows * (-(-q.shape[3] // 32) * 32 + 1) * 4 + _if_grouped(q, k, v)


def _document_backward(args: tuple[Any, ...], _: int) -> int:
    """As flash: with every document's rows filled up to a whole block, for which a block per 1024 tokens is allowed here."""
    _, q, k, v = args[:4]
    batch, length, heads, width = q.shape
    rows = length + 128 * (1 + length // 1024)
    grouped = (_bytes(k) + _bytes(v)) // k.shape[2] * heads if k.shape[2] != heads else 0
    return batch * heads * rows * (-(-width // 32) * 32 + 1) * 4 + grouped


def _efficient_backward(args: tuple[Any, ...], _: int) -> int:
    gradient, q = args[:2]
    return q.numel() * 4 + 2 * (q.numel() // q.shape[-1]) * 4 + _if_broadcast(gradient)


def _embedding_backward(args: tuple[Any, ...], _: int) -> int:
    gradient, indices, rows = args[:3]
    tokens = indices.numel()
    if tokens <= _FEW:
        return 0
    return (tokens // _SUMMED + min(tokens, rows)) * gradient.shape[-1] * 4 + 48 * tokens


def _sum(args: tuple[Any, ...], processors: int) -> int:
    """The sum over all rows of a matrix, such as the gradient of a bias, has partial sums of many blocks."""
    x, dims = args[0], args[1]
    if x.ndim != 2 or list(dims or ()) != [0] or not x.is_contiguous() or x.shape[0] < 256:
        return 0
    blocks = max(1, min(-(-x.shape[0] // 256), -(-processors // -(-x.shape[1] // 512))))
    return 4 * x.shape[1] * blocks * 512 if blocks > 1 else 0


FORMULAS: dict[Any, Formula] = {
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    document_attention.BACKWARD.default: _document_backward,
    sink_attention.BACKWARD.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.logsumexp.default: lambda args, _: _bytes(args[0]),
    _aten._softmax_backward_data.default: lambda args, _: _bytes(args[0]),
    _aten._safe_softmax.default: lambda args, _: args[0].numel(),
    _aten.sum.dim_IntList: _sum,
    _aten.sort.stable: lambda args, _: 2 * _bytes(args[0]) + args[0].numel() * 20,
}
