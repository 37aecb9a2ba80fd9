"""Initial weights as a pure function of (seed, parameter name, element index): every layout on every device starts from the same
numbers, and a rank computes only the slice of a tensor that it holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from phalanx.models import custom, hf_module
from phalanx.models.decoder import INITIAL, Decoder
from phalanx.spec.fields import original_tensor
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_slice import Box, TensorSlice

ADAPTERS = {"*lora_a": "adapter", "*lora_b": "zeros"}
"""Initial values of LoRA adapters: name pattern to rule. "adapter" is normal, with the variance that torch gives a linear layer of as many
inputs, which PEFT uses too."""
_CHUNK = 1 << 20  # elements drawn at a time; bounds the 64-bit scratch memory to a few tens of MB


def build(spec: ModelSpec) -> nn.Module:
    """The model on the meta device: names and shapes, no memory. `models/custom` checks a custom module; `models/hf_module` builds those of
    transformers."""
    if spec.config is not None:
        return hf_module.build(spec)
    if spec.module is not None:
        return custom.build(spec, spec.module)
    with torch.device("meta"):
        return Decoder(spec)


def materialize(model: nn.Module, seed: int, device: torch.device) -> nn.Module:
    """Allocate a model from `build` on `device` and set its initial values."""
    model.to_empty(device=device)
    spec = model.spec
    assert isinstance(spec, ModelSpec), "`build` sets the spec"
    initial = table(model)
    for name, parameter in model.named_parameters():
        fill(parameter, seed, name, spec, initial=initial)
    reset_buffers(model)
    return model


def table(model: nn.Module) -> Mapping[str, str]:
    """Initial values of the model's parameters: name pattern to rule."""
    spec = model.spec
    assert isinstance(spec, ModelSpec), "`build` sets the spec"
    if spec.config is not None:
        return hf_module.initial(model)
    return INITIAL if spec.module is None else custom.initial(model, spec.module)


def reset_buffers(model: nn.Module) -> None:
    """Set the value of every buffer, by the method of the module that holds it. Needed after allocating a model from `build`."""
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            module.reset_buffers()  # type: ignore[operator]  # `build` refuses custom modules without it


@torch.no_grad()
def fill(
    tensor: Tensor,
    seed: int,
    name: str,
    spec: ModelSpec,
    part: TensorSlice | None = None,
    initial: Mapping[str, str] = INITIAL,
) -> None:
    """Write the initial values of the named parameter into a tensor; `part`: the slice of the parameter that the tensor holds.

    A rule may carry a number, the value of "constant:0.5" or the standard deviation of "normal:0.01".
    """
    rule = next(rule for pattern, rule in initial.items() if fnmatchcase(name, pattern))
    rule, _, number = rule.partition(":")
    if rule in ("ones", "zeros", "constant"):
        # Of the built-in decoder, ones are the weights of norms, to which a zero-centered norm adds 1.
        one = rule == "ones" and not (spec.is_builtin and spec.norm_zero_centered)
        tensor.fill_(float(number) if number else one)
        return
    # Drawn under the name that the parameter had first: a renamed parameter keeps its initial values bit for bit.
    drawn_as = original_tensor(name) if spec.is_builtin else name
    part = part or TensorSlice.full(tensor.shape)
    match rule:
        case "residual":
            std = spec.init_std / math.sqrt(2 * spec.layers)
        case "adapter":
            std = 1 / math.sqrt(3 * part.whole[-1])
        case _:
            std = float(number) if number else spec.init_std
    for box, local in part.regions():
        if box.numel:
            _draw_box(tensor[local.index], box, part.whole, partial(_drawn, seed, drawn_as), std)


def _draw_box(values: Tensor, box: Box, whole: Sequence[int], draw: Callable[[Tensor], Tensor], std: float) -> None:
    if (
        values.ndim > 2 and not values[0].is_contiguous()
    ):  # one of several boxes along an inner dimension: its rows are no runs of memory
        run = torch.empty_like(values, memory_format=torch.contiguous_format)
        _draw_box(run, box, whole, draw, std)
        values.copy_(run)
        return
    rows = values.view(len(values), -1)
    inner = _flat_indices(box.shape[1:], whole[1:], box.offset[1:], values.device)
    stride = math.prod(whole[1:])
    # Whole rows at a time; rows longer than a chunk in pieces.
    height, width = max(1, _CHUNK // rows.shape[1]), min(_CHUNK, rows.shape[1])
    for top in range(0, len(rows), height):
        outer = torch.arange(top, min(top + height, len(rows)), device=values.device).add_(box.offset[0]).mul_(stride)
        for left in range(0, rows.shape[1], width):
            indices = outer[:, None] + inner[None, left : left + width]
            rows[top : top + height, left : left + width] = draw(indices).mul_(std)


def _flat_indices(shape: Sequence[int], whole: Sequence[int], offset: Sequence[int], device: torch.device) -> Tensor:
    """Index in the flattened parameter of every element of a box, in order."""
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for length, size, first in zip(shape, whole, offset, strict=True):
        indices = indices[..., None] * size + torch.arange(first, first + length, device=device)
    return indices.reshape(-1)


def _drawn(seed: int, name: str, bits: Tensor) -> Tensor:
    """The elements of the named stream of standard normal numbers at the given indices, in fp32; overwrites its argument.

    SplitMix64 of the index, then Box–Muller: no element depends on another.
    """
    bits.mul_(_signed(0x9E3779B97F4A7C15)).add_(_key(seed, name))
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits.bitwise_xor_(_shift(bits, shift)).mul_(_signed(multiplier))
    bits.bitwise_xor_(_shift(bits, 31))
    # 24 bits are exact in fp32; adding a half keeps the logarithm finite.
    radius = (bits & 0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    angle = _shift(bits, 40).float().mul_(2.0**-24 * 2 * math.pi)
    return radius.log_().mul_(-2).sqrt_().mul_(angle.cos_())


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift right; torch's own is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
