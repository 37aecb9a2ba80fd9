"""The blocks of a decoder as JAX sees them: equal ones are one function that `jax.lax.scan` repeats over their stacked parameters, so that the
program grows less with the number of layers; and a block that is computed again in the backward is a function of its own. `xla/model_seams` calls
`install`. Names and places of parameters do not change: a forward stacks them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.models.moe import Experts, Router
from phalanx.spec.run import Memory
from phalanx.xla.bridge import call_jax, call_part, products_in


class StackPlaces(Protocol):
    """Where parameters lie that blocks have in common; given are the name of the first one and an array."""

    def stacked(self, name: str, stack: jax.Array, /) -> jax.Array:
        """The parameters of all blocks."""
        ...

    def gathered(self, name: str, value: jax.Array, /) -> jax.Array:
        """That of the block which computes."""
        ...


_KERNELS = ("dot_product_attention_fwd", "pallas_call", "ragged_dot_general")
"""Primitives of the forwards of attention kernels, cuDNN's and TPUs', and of the products of experts."""


def _is_costly(primitive: Any, *inputs: Any, **parameters: Any) -> bool:
    """Whether to store the result of an operation rather than to compute it again: matrix products, also of experts, and attention kernels."""
    is_kernel = primitive.name.removesuffix("_wrapper") in _KERNELS
    return is_kernel or bool(jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *inputs, **parameters))


POLICIES: dict[str, Any] = {"full": jax.checkpoint_policies.nothing_saveable, "selective": _is_costly}
"""What `memory.recompute` stores of a block."""
_LONGEST = 8  # blocks after which a pattern repeats, such as one with all keys after five with a window


def install(model: nn.Module, memory: Memory, places: StackPlaces) -> None:
    """Replace the forwards of blocks. Modules whose Python we do not know keep theirs, but for blocks that are recomputed."""
    blocks = dict(model.get_submodule("blocks").named_children())
    policies = {
        name: POLICIES[memory.recompute] if memory.recomputes and index % memory.recompute_every == 0 else None
        for index, name in enumerate(blocks)
    }
    kinds = [(_kind(model, name, block), policies[name]) for name, block in blocks.items()]
    for first, period, times in runs(kinds):
        names = list(blocks)[first : first + period * times]
        if isinstance(model, Decoder) or policies[names[0]] is not None:
            layers = [
                [(f"blocks.{name}", blocks[name]) for name in names[at : at + period]] for at in range(0, len(names), period)
            ]
            Repeated(layers, [policies[name] for name in names[:period]], places).install()


def _kind(model: nn.Module, name: str, block: nn.Module) -> Hashable:
    """What blocks have in common that are the same function of their parameters. Of modules whose Python we do not know, every block is its own."""
    if not isinstance(model, Decoder):
        return name
    shapes = tuple((part, tuple(value.shape)) for part, value in (*block.named_parameters(), *block.named_buffers()))
    return model.spec.window_of(int(name)), shapes


def runs(kinds: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """Consecutive parts that repeat a pattern: the first place, the length of the pattern, and how often it occurs."""
    first = 0
    while first < len(kinds):
        longest = (1, 1)
        for period in range(1, min(_LONGEST, len(kinds) - first) + 1):
            pattern, times = kinds[first : first + period], 1
            while kinds[first + times * period : first + (times + 1) * period] == pattern:
                times += 1
            if times > 1 and times * period > longest[0] * longest[1]:
                longest = (period, times)
        yield first, *longest
        first += longest[0] * longest[1]


class _Part(nn.Module):
    """A block, called as it was before its forward was replaced."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, x_BSD: Tensor, *rest: Any) -> Tensor:
        out: Tensor = self._forward(x_BSD, *rest)
        return out


Values = dict[str, jax.Array]
"""Parameters and buffers of a block by their names in it."""


class Repeated:
    """Blocks that follow each other: the same pattern of blocks, once or several times. The last block of the first pattern computes all of them, as its
    call knows the arguments of each; the calls of the others return what they were given."""

    def __init__(self, layers: Sequence[Sequence[tuple[str, nn.Module]]], policies: Sequence[Any], places: StackPlaces):
        """`layers`: the blocks of each repetition with their names."""
        self._layers, self._policies, self._places = layers, policies, places
        self._parts = [_Part(block) for _, block in layers[0]]
        self._arguments: list[tuple[Any, ...]] = []

    def install(self) -> None:
        seam: Any
        for repetition, layer in enumerate(self._layers):
            for index, (_, seam) in enumerate(layer):
                seam.forward = partial(self._first, index) if repetition == 0 else _unchanged

    def _first(self, index: int, x_BSD: Tensor, *arguments: Any) -> Tensor:
        self._arguments[index:] = [arguments]
        return x_BSD if index < len(self._parts) - 1 else self._all(x_BSD)

    def _all(self, x_BSD: Tensor) -> Tensor:
        values = [[_values(block) for _, block in layer] for layer in self._layers]
        out: Tensor
        out, counts = call_jax(self._repeat, x_BSD, values)
        if torch.is_grad_enabled():
            for layer, of_layer in zip(self._layers, counts, strict=True):
                for (_, block), of_block in zip(layer, of_layer, strict=True):
                    for name, count in of_block.items():
                        block.get_buffer(name).add_(count)
        self._arguments = []
        return out

    def _repeat(self, x: jax.Array, layers: list[list[Values]]) -> tuple[jax.Array, list[list[Values]]]:
        """The stream after all blocks, and what routers counted in each."""
        if len(layers) == 1:
            x, counts = self._turn(x, layers[0])
            return x, [counts]
        stacks = [
            {
                key: self._places.stacked(f"{name}.{key}", jnp.stack([layer[at][key] for layer in layers]))
                for key in layers[0][at]
            }
            for at, (name, _) in enumerate(self._layers[0])
        ]
        x, stacked = jax.lax.scan(self._turn, x, stacks)
        return x, [jax.tree.map(lambda count, at=at: count[at], stacked) for at in range(len(layers))]

    def _turn(self, x: jax.Array, layer: list[Values]) -> tuple[jax.Array, list[Values]]:
        """One turn of the loop."""
        counts, names = [], [name for name, _ in self._layers[0]]
        for name, part, arguments, policy, values in zip(
            names, self._parts, self._arguments, self._policies, layer, strict=True
        ):
            function = partial(self._block, name, part, arguments)
            if policy is not None:
                function = jax.checkpoint(function, policy=policy, prevent_cse=len(self._layers) == 1)  # type: ignore[assignment]
            x, count = function(x, values)
            counts.append(count)
        return x, counts

    def _block(
        self, name: str, part: _Part, arguments: tuple[Any, ...], x: jax.Array, values: Values
    ) -> tuple[jax.Array, Values]:
        """Parameters are gathered inside, so that a block which is recomputed gathers them again."""
        counts = {key: jnp.zeros(size, jnp.int32) for key, size in _counters(part.block).items()}
        whole = {key: self._places.gathered(f"{name}.{key}", value) for key, value in values.items()}
        given = {f"block.{key}": value for key, value in {**whole, **counts}.items()}
        out, after = call_part(part, given, x, arguments, [f"block.{key}" for key in counts])
        return out, {key: after[f"block.{key}"] for key in counts}


def _unchanged(x_BSD: Tensor, *arguments: Any) -> Tensor:
    return x_BSD


def _values(block: nn.Module) -> dict[str, Tensor]:
    """What a block reads. Counts begin at zero in it, and are added to those of the router afterwards. Matrices are in the format of products already:
    they are stacked and gathered in it."""
    counters, dtype, matrices = _counters(block), products_in(), _matrices(block)
    values = {name: value for name, value in (*block.named_parameters(), *block.named_buffers()) if name not in counters}
    if dtype is None:
        return values
    return {name: call_jax(lambda x: x.astype(dtype), value) if name in matrices else value for name, value in values.items()}


def _matrices(block: nn.Module) -> set[str]:
    """Parameters that only products read, in their format. A router's is none: it computes in fp32."""
    named = list(block.named_modules())
    linear = {f"{name}.weight" for name, module in named if isinstance(module, nn.Linear)}
    return linear | {
        f"{name}.{part}" for name, module in named if isinstance(module, Experts) for part in ("gate", "up", "down")
    }


def _counters(block: nn.Module) -> Mapping[str, int]:
    """Buffers in which routers count tokens, and how many experts they have."""
    named = block.named_modules()
    return {f"{name}.counts": module.moe.experts for name, module in named if isinstance(module, Router)}
