"""The blocks of a decoder as JAX sees them: equal ones are one function that `jax.lax.scan` repeats over their stacked parameters, so that the time to
compile does not grow with the number of layers; and a block that is computed again in the backward is a function of its own. `xla/model_seams` calls
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
from phalanx.models.moe import Router
from phalanx.spec.run import Memory
from phalanx.xla.bridge import call_jax, call_part


class StackPlaces(Protocol):
    """Where parameters lie that blocks have in common; given are the name of the first one and an array."""

    def stacked(self, name: str, stack: jax.Array, /) -> jax.Array:
        """The parameters of all blocks."""
        ...

    def gathered(self, name: str, value: jax.Array, /) -> jax.Array:
        """That of the block which computes."""
        ...


_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What `memory.recompute` stores of a block."""
_LONGEST = 8  # blocks after which a pattern repeats, such as one with all keys after five with a window


def install(model: nn.Module, memory: Memory, places: StackPlaces) -> None:
    """Replace the forwards of blocks that are repeated or recomputed."""
    blocks = dict(model.get_submodule("blocks").named_children())
    policies = {
        name: _POLICIES[memory.recompute] if memory.recomputes and index % memory.recompute_every == 0 else None
        for index, name in enumerate(blocks)
    }
    kinds = [(_kind(model, name, block), policies[name]) for name, block in blocks.items()]
    for first, period, times in runs(kinds):
        names = list(blocks)[first : first + period * times]
        if times > 1 or policies[names[0]] is not None:
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
            x, counts = self._once(x, layers[0])
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
        gather = self._places.gathered
        whole = [
            {key: gather(f"{name}.{key}", value) for key, value in values.items()}
            for (name, _), values in zip(self._layers[0], layer, strict=True)
        ]
        return self._once(x, whole)

    def _once(self, x: jax.Array, layer: list[Values]) -> tuple[jax.Array, list[Values]]:
        counts = []
        for part, arguments, policy, values in zip(self._parts, self._arguments, self._policies, layer, strict=True):
            function = partial(_block, part, arguments)
            if policy is not None:
                function = jax.checkpoint(function, policy=policy, prevent_cse=len(self._layers) == 1)  # type: ignore[assignment]
            x, count = function(x, values)
            counts.append(count)
        return x, counts


def _unchanged(x_BSD: Tensor, *arguments: Any) -> Tensor:
    return x_BSD


def _values(block: nn.Module) -> dict[str, Tensor]:
    """What a block reads. Counts begin at zero in it, and are added to those of the router afterwards."""
    counters = _counters(block)
    return {name: value for name, value in (*block.named_parameters(), *block.named_buffers()) if name not in counters}


def _counters(block: nn.Module) -> Mapping[str, int]:
    """Buffers in which routers count tokens, and how many experts they have."""
    named = block.named_modules()
    return {f"{name}.counts": module.moe.experts for name, module in named if isinstance(module, Router)}


def _block(part: _Part, arguments: tuple[Any, ...], x: jax.Array, values: Values) -> tuple[jax.Array, Values]:
    counts = {name: jnp.zeros(size, jnp.int32) for name, size in _counters(part.block).items()}
    given = {f"block.{name}": value for name, value in {**values, **counts}.items()}
    out, after = call_part(part, given, x, arguments, [f"block.{name}" for name in counts])
    return out, {name: after[f"block.{name}"] for name in counts}
