"""Where a loss or gradient that is not finite first appeared: the step is repeated by all ranks together, and watched. The trainer
calls it after the first bad step in a row; good steps know nothing of it.

A forward is watched at the output of every module. A backward at what enters each: if the gradient of that is not finite, and
nothing before it was not, then the module's backward made it so. Compiled blocks run uncompiled meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.events.records import NotFinite
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import Stepper


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """The first on a rank. Of several ranks' the least is the first, as nothing travels against this order."""

    micro_batch: int
    backward: bool
    stage: int
    """Of the pipeline, in the order in which they compute: backwards from the last."""
    place: int
    """Counts what was looked at."""
    layer: str
    kind: str


class Watch:
    """Looks at one rank's parts while they compute."""

    def __init__(self, parts: Sequence[nn.Module], stages: Sequence[int]):
        """`stages`: the number of each part in the pipeline."""
        self._parts, self._stages = parts, stages
        self._hooks: list[Any] = []
        self._counts = [0] * len(parts)
        self._looks: dict[tuple[int, int, bool], int] = {}
        self._readers = WeakTensorKeyDictionary()
        self._parameters: set[int] = set()
        self.found: Finding | None = None

    def __enter__(self) -> Watch:
        for number, part in enumerate(self._parts):
            for name, module in part.named_modules():
                # Before and behind what techniques do there: a sum over ranks in a backward hides whose gradient it was.
                self._hooks.append(module.register_forward_pre_hook(partial(self._comes, number, name), prepend=True))
                self._hooks.append(module.register_forward_pre_hook(partial(self._enters, number, name)))
                self._hooks.append(module.register_forward_hook(partial(self._leaves, number, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def loss(self, loss: Tensor) -> None:
        """Of the last stage's next micro-batch."""
        number = len(self._parts) - 1
        self._look(loss, number, self._counts[number], backward=False, layer="the loss")

    def _comes(self, number: int, name: str, module: nn.Module, given: Any) -> None:
        if not name:
            self._counts[number] += 1
        self._read(given, number, name)

    def _enters(self, number: int, name: str, module: nn.Module, given: Any) -> None:
        self._read(given, number, name)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters.add(id(parameter))
                self._hooks.append(parameter.register_hook(partial(self._weight, number, name)))

    def _leaves(self, number: int, name: str, module: nn.Module, given: Any, output: Any) -> None:
        for tensor in _numbers(output):
            self._look(tensor, number, self._counts[number], backward=False, layer=name or "the model's end")
            if not name and tensor.requires_grad:
                self._await(tensor, number, "the loss" if getattr(module, "is_last_stage", True) else "a later stage")

    def _read(self, given: Any, number: int, name: str) -> None:
        for tensor in _numbers(given):
            if tensor.requires_grad:
                self._await(tensor, number, name)

    def _await(self, tensor: Tensor, number: int, name: str) -> None:
        """See the gradient of a tensor that this module reads; several may."""
        if tensor in self._readers:
            self._readers[tensor].append(name)
            return
        readers = self._readers[tensor] = [name]
        micro_batch = self._counts[number]
        tensor.register_hook(lambda gradient: self._look(gradient, number, micro_batch, backward=True, layer=_common(readers)))

    def _weight(self, number: int, name: str, gradient: Tensor) -> None:
        self._look(gradient, number, self._counts[number], backward=True, layer=name)

    @torch.no_grad()
    def _look(self, tensor: Tensor, number: int, micro_batch: int, *, backward: bool, layer: str) -> None:
        key = (number, micro_batch, backward)
        self._looks[key] = place = self._looks.get(key, 0) + 1
        if self.found is not None and (micro_batch, backward) >= (self.found.micro_batch, self.found.backward):
            return  # every look waits for the device
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not torch.isfinite(local).all():
            stage = -self._stages[number] if backward else self._stages[number]
            kind = "NaN" if torch.isnan(local).any() else "an infinite number"
            self.found = Finding(micro_batch, backward, stage, place, layer, kind)


def trace(stepper: Stepper, batches: Sequence[MicroBatch]) -> NotFinite:
    """Repeat the step that was bad, all ranks together."""
    placed, own_loss = stepper.sharded, stepper.own_loss.item()
    with ExitStack() as stack:
        stack.enter_context(_kept(placed.parts))
        stack.enter_context(_uncompiled() if stepper.compiles else nullcontext())
        stack.enter_context(stepper.faults.again())
        # Before anything is watched: what is planted in a module's output is its output.
        stepper.faults.at("compute", stepper.number)
        stepper.watch = watch = stack.enter_context(Watch(placed.parts, stepper.stages))
        stack.callback(setattr, stepper, "watch", None)
        stepper.repeat(batches)
    summed = next(
        (one.name for one in placed.owned if one.gradient is not None and not torch.isfinite(one.gradient).all()), None
    )
    return verdict(stepper.number, placed.mesh.gather_objects((watch.found, summed, math.isfinite(own_loss))))


Said = tuple[Finding | None, str | None, bool]
"""A rank's finding; the first of its gradients that is not finite once all were summed; whether its loss was finite at first."""


def verdict(step: int, said: Sequence[Said]) -> NotFinite:
    """Who was first, from what all ranks say."""
    found = sorted((finding, rank) for rank, (finding, _, _) in enumerate(said) if finding is not None)
    what = f"The loss or the gradient of step {step} is not finite"
    if found:
        first, rank = found[0]
        way = "backward" if first.backward else "forward"
        where = first.layer if first.layer.startswith("the ") else f"the {way} of {first.layer}"
        also = [other for finding, other in found[1:] if finding == first]
        others = f", as on {len(also)} other ranks" if also else ""
        if first.layer == "the loss" and first.backward:
            where = "the backward of the loss"
        message = (
            f"{what}: {first.kind} first appeared in {where} on rank {rank}{others}, in its micro-batch {first.micro_batch}."
        )
        return NotFinite(step=step, rank=rank, layer=first.layer, message=message)
    summed = [(name, rank) for rank, (_, name, _) in enumerate(said) if name is not None]
    if summed:
        name, rank = summed[0]
        message = f"{what}: every micro-batch is, but not the sum of the gradients of {name} over micro-batches and ranks."
        return NotFinite(step=step, rank=rank, layer=name, message=message)
    blamed = [rank for rank, (_, _, finite) in enumerate(said) if not finite]
    then = f"; the loss was not finite on rank {', '.join(map(str, blamed))} then" if blamed else ""
    message = f"{what}; when the step was repeated, all was: a passing fault{then}."
    return NotFinite(step=step, rank=blamed[0] if len(blamed) == 1 else None, layer="", message=message)


def _common(names: Sequence[str]) -> str:
    """The innermost module that all of these readers of one tensor are in, or are."""
    inner = [
        name
        for name in dict.fromkeys(names)
        if not any(other.startswith(f"{name}.") or not name for other in names if other != name)
    ]
    if len(inner) == 1:
        return inner[0] or "the model"
    paths = [name.split(".") for name in inner]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or "the model"


def _numbers(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())


@contextmanager
def _kept(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers that a forward changes are as they were, afterwards."""
    before = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _uncompiled() -> AbstractContextManager[Any]:
    stance: Callable[[str], Any] = torch.compiler.set_stance
    return stance("force_eager")
