"""A step of a module with many layers from one with a few: `module_process` rehearses the first layer, the last one, and one of each kind between
them, and repeats what these did.

A step is cut into segments: what comes before the layers, the forward of each layer, and the backward of each layer. Each changes the memory
in use by some bytes, with a peak in between. What comes between two layers belongs to the first of them, and loss and optimizer to the last
layer's forward and the first one's backward, which are never repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from phalanx.models.stages import use_of
from phalanx.rehearsal.ledger import Ledger, ProgramLocation
from phalanx.spec.errors import RunError
from phalanx.tracing.layer_sample import layer_kinds

OUTSIDE = -1
"""In the place of a layer's number: outside of the layers."""


@dataclass(frozen=True, slots=True)
class SampledLayers:
    """Which layers of a module are rehearsed."""

    prefixes: tuple[str, ...]
    """Names of the layers, with a dot at the end."""
    examples: tuple[int, ...]
    """For each layer, the rehearsed one that does the same."""

    @property
    def rehearsed(self) -> frozenset[int]:
        return frozenset(self.examples)

    def number(self, module: str) -> int:
        """Of the layer that a module or parameter is in."""
        return next((number for number in self.rehearsed if f"{module}.".startswith(self.prefixes[number])), OUTSIDE)


def sample_layers(model: nn.Module) -> SampledLayers | None:
    """None if the module does more with its layers than to call each once, in order, so that all of them must be rehearsed."""
    try:
        use = use_of(model)
    except RunError:
        return None
    layers = dict(model.get_submodule(use.path).named_children())
    numbers = {key: number for number, key in enumerate(layers)}
    last, examples = len(layers) - 1, list(range(len(layers)))
    for kind in layer_kinds(layers):
        alike: dict[Any, list[int]] = {}
        for key in kind:
            alike.setdefault(_listed(model, numbers[key], len(layers)), []).append(numbers[key])
        for group in alike.values():
            between = [number for number in group if 0 < number < last]
            for number in between:
                examples[number] = between[0]
    return SampledLayers(tuple(f"{use.path}.{key}." for key in layers), tuple(examples))


def _listed(model: nn.Module, number: int, count: int) -> tuple[str, ...]:
    """What a config of transformers has of one layer in lists, which layers may look up when they are called."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    values = sorted(vars(text).items()) if text is not None else ()
    return tuple(f"{name}={value[number]}" for name, value in values if isinstance(value, list | tuple) and len(value) == count)


@dataclass(frozen=True, slots=True)
class Segment:
    """What the forward or the backward of one layer does to the memory in use."""

    layer: int
    is_forward: bool
    change: int
    peak: int
    """Most bytes in use, compared with the beginning."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What the layers of one rehearsed step do, by their numbers."""

    layers: SampledLayers
    flops: Mapping[int, int]
    parameters: Mapping[int, int]
    segments: tuple[Segment, ...]

    @property
    def total_flops(self) -> int:
        return self._total(self.flops)

    @property
    def total_parameters(self) -> int:
        return self._total(self.parameters)

    def _total(self, numbers: Mapping[int, int]) -> int:
        return numbers.get(OUTSIDE, 0) + sum(numbers.get(example, 0) for example in self.layers.examples)

    def peaks(self) -> list[int] | None:
        """Most bytes in use in each segment of the step with all layers, compared with the beginning of the step. None if the program does not go
        through its layers once forward and once backward."""
        rehearsed = sorted(self.layers.rehearsed)
        order = [
            (OUTSIDE, True),
            *((number, True) for number in rehearsed),
            *((number, False) for number in reversed(rehearsed)),
        ]
        if [(segment.layer, segment.is_forward) for segment in self.segments] != order:
            return None
        known = dict(zip(order, self.segments, strict=True))
        examples = self.layers.examples
        whole = [(OUTSIDE, True), *((number, True) for number in examples), *((number, False) for number in reversed(examples))]
        peaks, now = [], 0
        for key in whole:
            peaks.append(now + known[key].peak)
            now += known[key].change
        return peaks


def profile(
    layers: SampledLayers, ledger: Ledger, built: int, counted: Mapping[ProgramLocation, int], parameters: Mapping[str, int]
) -> StepProfile:
    """`built`: number of events before the step; `counted`: floating-point operations by place; `parameters`: elements by name."""
    flops: Counter[int] = Counter()
    for where, count in counted.items():
        flops[layers.number(where.module)] += count
    elements: Counter[int] = Counter()
    for name, count in parameters.items():
        elements[layers.number(name)] += count
    return StepProfile(layers, dict(flops), dict(elements), tuple(_segments(layers, ledger, built)))


def _segments(layers: SampledLayers, ledger: Ledger, built: int) -> Iterator[Segment]:
    numbers: dict[str, int] = {}
    current, change, peak = (OUTSIDE, True), 0, 0
    for event, where in zip(islice(ledger.events, built, None), islice(ledger.places, built, None), strict=True):
        if where.module not in numbers:
            numbers[where.module] = layers.number(where.module)
        key = numbers[where.module], where.phase == "forward"
        if key[0] != OUTSIDE and key != current:
            yield Segment(*current, change, peak)
            current, change, peak = key, 0, 0
        change += ledger.change(event)
        peak = max(peak, change)
    yield Segment(*current, change, peak)
