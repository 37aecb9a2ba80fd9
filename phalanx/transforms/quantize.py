"""Frozen matrices in 8 or 4 bits below LoRA adapters (QLoRA). `parallel/apply` calls it once matrices are cut and before anything has memory.

    int8   one byte per element; a scale per row of the whole matrix: its largest absolute value / 127
    nf4    half a byte per element, one of the 16 levels of NormalFloat; a scale per 64 consecutive elements of a row: their largest absolute value

A row of a stored matrix holds its codes and then its scales in fp32. Rows are the unit: whatever divides rows, such as FSDP2, divides the stored
matrix. Where columns are divided, scales are still those of the whole matrix: a rank reads the columns around its own as long as they share a scale.
So every layout stores the same numbers, and computes what one process does.

The forward and the backward dequantize a matrix each time and keep the stored form alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from phalanx.spec.cut_plan import Axes
from phalanx.spec.errors import RunError
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.transforms.lora import compute_dtype, layers

Format = Literal["int8", "nf4"]

BLOCK = 64
"""Elements of a row that share a scale in nf4, as in QLoRA."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of NormalFloat: quantiles of the normal distribution (Dettmers et al., 2023, appendix E)."""
_AT_A_TIME = 1 << 24
"""Elements to quantize at a time."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the rows of a matrix are stored on one rank."""

    format: Format
    whole: int
    """Columns of the whole matrix."""
    first: int
    """Where this rank's columns begin."""
    columns: int

    @property
    def source(self) -> tuple[int, int]:
        """Beginning and end of the columns that are needed to quantize this rank's: those that share a scale with one of them."""
        if self.format == "int8":
            return 0, self.whole
        end = -(-(self.first + self.columns) // BLOCK) * BLOCK
        return self.first // BLOCK * BLOCK, min(end, self.whole)

    @property
    def skip(self) -> int:
        """Stored columns before this rank's."""
        return 0 if self.format == "int8" else self.first % BLOCK

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return 1 if self.format == "int8" else -(-(self.skip + self.columns) // BLOCK)

    @property
    def code_bytes(self) -> int:
        """Of a row. A multiple of four, since fp32 scales follow."""
        return -(-self.columns // 4) * 4 if self.format == "int8" else self.blocks * BLOCK // 2

    @property
    def width(self) -> int:
        """16-bit numbers in a stored row."""
        return (self.code_bytes + 4 * self.blocks) // 2


def pack(values: Tensor, how: Packing) -> Tensor:
    """The stored rows, as bytes, of the columns `how.source` of a matrix."""
    values = values.float()
    if how.format == "int8":
        scales = values.abs().amax(-1, keepdim=True) / 127
        own = values[..., how.first : how.first + how.columns]
        codes = (own / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8).view(torch.uint8)
        codes = F.pad(codes, (0, how.code_bytes - how.columns))
    else:
        blocks = F.pad(values, (0, how.blocks * BLOCK - values.shape[-1])).unflatten(-1, (how.blocks, BLOCK))
        scales = blocks.abs().amax(-1)
        normal = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        levels = torch.tensor(LEVELS, device=values.device)
        nearest = torch.bucketize(normal, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(-2)
        codes = nearest[..., ::2] << 4 | nearest[..., 1::2]
    return torch.cat((codes, scales.contiguous().view(torch.uint8)), -1)


def level_pairs(device: torch.device) -> Tensor:
    """The two values of every byte of nf4 codes, [256, 2]."""
    return torch.tensor([(high, low) for high in LEVELS for low in LEVELS], device=device)


def unpack(stored: Tensor, how: Packing, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's columns of the stored rows. `pairs`: from `level_pairs`."""
    data = stored.view(torch.uint8)
    scales = data[..., how.code_bytes :].view(torch.float32)
    if how.format == "int8":
        return (data[..., : how.columns].view(torch.int8) * scales).to(dtype)
    codes = data[..., : how.code_bytes].int()
    # A compiler would keep the result of an embedding for the backward; a GPU would convert indices to 64 bits.
    found = pairs[codes] if torch.compiler.is_compiling() else F.embedding(codes, pairs)
    values = found.view(*scales.shape, BLOCK)
    rows = values.mul_(scales[..., None]).to(dtype).flatten(-2)
    return rows[..., how.skip : how.skip + how.columns]


class _Product(torch.autograd.Function):
    """x · Wᵀ with a stored matrix, which is dequantized in the forward and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, pairs: Tensor, how: Packing) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(stored, pairs)
        return x @ unpack(stored, how, pairs, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        stored, pairs = ctx.saved_tensors
        return gradients[0] @ unpack(stored, ctx.how, pairs, gradients[0].dtype), None, None, None


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is stored: the same module and hooks, with another class."""

    packing: Packing
    pairs: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Without the bias."""
        dtype = compute_dtype(x)
        y: Tensor = _Product.apply(x.to(dtype).flatten(0, -2), self.weight, self.pairs, self.packing)
        return y.unflatten(0, x.shape[:-1])


@dataclass(slots=True)
class QuantizedTensor:
    """A stored matrix of this rank as part of its state: is read and written like a tensor in a file. `write` takes values of the whole matrix that
    `pieces` names."""

    packing: Packing
    cut: TensorSlice
    """The slice of the matrix before anything divides rows further."""
    pairs: Tensor
    stored: Tensor = field(init=False)
    """This rank's rows."""
    slice: TensorSlice = field(init=False)
    """Of the whole matrix, that they hold."""
    dtype: torch.dtype = torch.float32

    def bind(self, stored: Tensor, part: TensorSlice) -> None:
        """`stored`: this rank's rows, a `part` of those of the cut matrix."""
        own = self.cut
        for dim in range(len(part.whole) - 1):
            own = own.narrow(dim, part.offset[dim], part.shape[dim])
        self.stored, self.slice = stored, own

    def read(self, into: Tensor | None = None) -> Tensor:
        values = unpack(self.stored, self.packing, self.pairs, self.dtype)
        return values if into is None else into.copy_(values)

    def write(self, values: Tensor) -> None:
        raise NotImplementedError("scales may depend on columns of other ranks: use `fill`")

    def fill(self, read: Callable[[Tensor, TensorSlice], None]) -> None:
        """Store the matrix. `read` writes a slice of the whole matrix into a tensor."""
        if self.stored.is_meta or is_fake(self.stored):  # dry builds and rehearsals have no memory to fill
            return
        for first, part in self._pieces():
            values = torch.empty(part.shape, device=self.stored.device)
            read(values, part)
            rows = pack(values, self.packing)
            self.stored[first : first + len(rows)].view(torch.uint8).copy_(rows)

    def _pieces(self) -> Iterator[tuple[int, TensorSlice]]:
        """Rows a few at a time: where they begin here, and what must be read of the whole matrix."""
        begin, end = self.packing.source
        box = self.slice.boxes[0]
        height, *more = box.shape
        each = max(1, _AT_A_TIME // max(1, (end - begin) * (more[0] if len(more) > 1 else 1)))
        for first in range(0, height, each):
            rows = box.narrow(0, first, min(each, height - first))
            offset, shape = (*rows.offset[:-1], begin), (*rows.shape[:-1], end - begin)
            yield first, TensorSlice.of(self.slice.whole, offset, shape)


def apply(
    parts: Sequence[nn.Module],
    slices: Mapping[str, TensorSlice],
    format: Format,
    axes: Axes,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, QuantizedTensor]:
    """Make the linear layers and the experts of all blocks hold their matrices quantized; returns these by parameter name.

    `slices`: what this rank has of each parameter. `dtype`: the 16-bit format in which FSDP2 gathers parameters, so that it does not convert them; the
    bits are ours. Whether it converts integers depends on the version of torch.
    """
    pairs = level_pairs(device)
    matrices: dict[str, QuantizedTensor] = {}
    for part in parts:
        for name, is_stacked in quantized_matrices(part, axes).items():
            owner, _, leaf = name.rpartition(".")
            module, cut = part.get_submodule(owner), slices[name]
            if name in matrices:  # stages may share a module
                continue
            if len(cut.boxes) > 1:
                raise RunError(
                    f"lora.base cannot quantize {name}, a fused matrix of which layout.tensor gives a rank parts of {len(cut.boxes)} segments: "
                    "set layout.tensor = 1, or remove lora.base."
                )
            how = Packing(format, cut.whole[-1], cut.offset[-1], cut.shape[-1])
            matrices[name] = QuantizedTensor(how, cut, pairs)
            empty = torch.empty(*cut.shape[:-1], how.width, dtype=dtype, device="meta")
            module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
            if is_stacked:
                _dequantize_before(module, leaf, matrices[name])
            else:
                module.__class__ = QuantizedLinear
                module.packing, module.pairs = how, pairs  # type: ignore[assignment]
    return matrices


def quantized_matrices(model: nn.Module, axes: Axes) -> dict[str, bool]:
    """Parameters of the blocks that are quantized: whether they are stacked experts, by name. A subclass of nn.Linear computes in its own way, and
    stays as it is."""
    known = {layer: is_stacked for layer, is_stacked in layers(model, axes).items() if layer.startswith("blocks.")}
    stacked = {layer: True for layer, is_stacked in known.items() if is_stacked}
    linear = [
        layer for layer in known if layer not in stacked and type(model.get_submodule(layer)) in (nn.Linear, QuantizedLinear)
    ]
    return {f"{layer}.weight": False for layer in linear} | stacked


def _dequantize_before(module: nn.Module, leaf: str, matrix: QuantizedTensor) -> None:
    """Give the forward of stacked experts a dequantized parameter, which lives until the backward unless the block is recomputed."""
    forward = module.forward

    def dequantized(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = module._parameters
        stored = own[leaf]
        try:
            own[leaf] = unpack(stored, matrix.packing, matrix.pairs, compute_dtype(x))
            return forward(x, *args, **kwargs)
        finally:
            own[leaf] = stored

    module.forward = dequantized


def applied(parts: Sequence[nn.Module], matrices: Mapping[str, QuantizedTensor], format: Format) -> str:
    """What was done, read from the parameters."""
    parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    size = sum(parameters[name].numel() * parameters[name].element_size() for name in matrices)
    elements = sum(matrix.cut.numel for matrix in matrices.values())
    return f"{len(matrices)} frozen matrices in {format}: {size:,} bytes of {elements:,} elements"


def rounded(values: Tensor, format: Format) -> Tensor:
    """The values, in fp32, that training computes with in place of whole rows of a frozen matrix."""
    columns = values.shape[-1]
    how = Packing(format, columns, 0, columns)
    return unpack(pack(values, how), how, level_pairs(values.device), torch.float32)
