"""Traces a loss or gradient that is not finite to the module that made it, and retries the step. A hook that acts after the first
skipped step in a row; good steps do not know of it.

All ranks repeat the step together while a probe looks at the output of every module and, in the backward, at the gradient of every
module's input: if that is the first gradient that is not finite, this module's backward made it so. Compiled blocks run uncompiled
meanwhile. Then the step is taken once more: a fault that has passed costs no data and no update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from phalanx.events.records import Event, NotFinite
from phalanx.optim.optimizer import Optimizer
from phalanx.training.hooks import StepContext, StepHook
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import Stepper
from phalanx.training.step_totals import NOT_FINITE, Outcome


class NonFiniteRetry(StepHook):
    """Traces and retries a step that is not finite."""

    def __init__(self, stepper: Stepper, optimizer: Optimizer, skipped_in_a_row: Callable[[], int]):
        """`skipped_in_a_row`: skipped steps before this one."""
        self._stepper, self._optimizer, self._skipped_in_a_row = stepper, optimizer, skipped_in_a_row
        self._events: list[Event] = []

    def on_outcome(self, outcome: Outcome, batches: Sequence[MicroBatch], retry: Callable[[], Outcome]) -> Outcome:
        # A loss scale above 1 is lowered after a step that is not finite: that is no fault.
        if outcome.stopped or outcome.verdict != NOT_FINITE or self._skipped_in_a_row() or self._stepper.scale.value > 1:
            return outcome
        event = trace(self._stepper, self._optimizer, batches)
        self._stepper.begin(self._stepper.number, self._stepper.seed)
        outcome = retry()
        if outcome.good:
            message = f"{event.message} Taken once more, the step was finite and was applied: the fault has passed."
            event = replace(event, message=message)
        self._events.append(event)
        return outcome

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """The first non-finite tensor on a rank. The smallest of all ranks' findings is the first, as no value travels against this order."""

    micro_batch: int
    backward: bool
    stage: int
    """The pipeline stage, in the order of computation: negative in the backward."""
    look: int
    """Counts the tensors that were looked at."""
    layer: str
    kind: str


Report = tuple[Finding | None, str | None, bool]
"""One rank's report: its finding; the name of its first parameter whose reduced gradient is not finite; whether its loss was finite
in the first attempt."""


def trace(stepper: Stepper, optimizer: Optimizer, batches: Sequence[MicroBatch]) -> NotFinite:
    """Repeats the step in progress under a probe, on all ranks together."""
    model, own_loss = stepper.sharded, stepper.own_loss.item()
    context = StepContext(stepper.number, model, optimizer, partial(stepper.repeat, batches))
    with ExitStack() as stack:
        stack.enter_context(_restored_buffers(model.parts))
        stack.enter_context(stepper.uncompiled())
        stack.enter_context(stepper.hooks.around_repeat())
        # Before the probe: a fault planted in a module's output counts as that module's output.
        stepper.hooks.before_forward(context)
        probe = stack.enter_context(Probe(model.parts, stepper.stages))
        stack.enter_context(stepper.hooks.with_hook(probe))
        stepper.repeat(batches)
    gradients = ((param.name, param.gradient) for param in model.owned if param.gradient is not None)
    summed = next((name for name, gradient in gradients if not torch.isfinite(gradient).all()), None)
    return conclude(stepper.number, model.mesh.gather_objects((probe.finding, summed, math.isfinite(own_loss))))


class Probe(StepHook):
    """Looks at the tensors of one rank's modules while they compute."""

    allows_ahead = False

    def __init__(self, parts: Sequence[nn.Module], stages: Sequence[int]):
        """`stages`: the pipeline stage of each part."""
        self._parts, self._stages = parts, stages
        self._handles: list[Any] = []
        self._micro_batches = [0] * len(parts)
        self._looks: dict[tuple[int, int, bool], int] = {}
        self._readers = WeakTensorKeyDictionary()
        self._parameters: set[int] = set()
        self.finding: Finding | None = None

    def __enter__(self) -> Probe:
        for number, part in enumerate(self._parts):
            for name, module in part.named_modules():
                # Before and after the hooks of parallelism: a reduction in the backward hides which rank's gradient is bad.
                self._handles += [
                    module.register_forward_pre_hook(partial(self._before_hooks, number, name), prepend=True),
                    module.register_forward_pre_hook(partial(self._after_hooks, number, name)),
                    module.register_forward_hook(partial(self._on_output, number, name)),
                ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_loss(self, loss: Tensor) -> None:
        self._look(len(self._parts) - 1, None, False, ["the loss"], loss)

    def _before_hooks(self, number: int, name: str, module: nn.Module, given: Any) -> None:
        if not name:
            self._micro_batches[number] += 1
        self._watch_gradients(given, number, name)

    def _after_hooks(self, number: int, name: str, module: nn.Module, given: Any) -> None:
        self._watch_gradients(given, number, name)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters.add(id(parameter))
                self._handles.append(parameter.register_hook(partial(self._look, number, None, True, [name])))

    def _on_output(self, number: int, name: str, module: nn.Module, given: Any, output: Any) -> None:
        for tensor in _floats(output):
            self._look(number, None, False, [name or "the model's end"], tensor)
        if not name:
            reader = "the loss" if getattr(module, "is_last_stage", True) else "a later stage"
            self._watch_gradients(output, number, reader)

    def _watch_gradients(self, given: Any, number: int, reader: str) -> None:
        """Looks at the gradients of the tensors that a module reads; several modules may read one."""
        for tensor in _floats(given):
            if tensor in self._readers:
                self._readers[tensor].append(reader)
            elif tensor.requires_grad:
                self._readers[tensor] = [reader]
                tensor.register_hook(partial(self._look, number, self._micro_batches[number], True, self._readers[tensor]))

    @torch.no_grad()
    def _look(self, number: int, micro_batch: int | None, backward: bool, readers: list[str], tensor: Tensor) -> None:
        """Looks at an output, or at the gradient of a tensor that these modules read. `micro_batch`: None for the present one."""
        micro_batch = self._micro_batches[number] if micro_batch is None else micro_batch
        key = (number, micro_batch, backward)
        self._looks[key] = look = self._looks.get(key, 0) + 1
        if self.finding is not None and (micro_batch, backward) >= (self.finding.micro_batch, self.finding.backward):
            return  # every look waits for the device
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
        if not torch.isfinite(local).all():
            stage = -self._stages[number] if backward else self._stages[number]
            kind = "NaN" if torch.isnan(local).any() else "an infinite number"
            self.finding = Finding(micro_batch, backward, stage, look, common_module(readers), kind)


def conclude(step: int, reports: Sequence[Report]) -> NotFinite:
    """Finds the first cause among the reports of all ranks."""
    findings = sorted((finding, rank) for rank, (finding, _, _) in enumerate(reports) if finding is not None)
    what = f"The loss or the gradient of step {step} is not finite"
    if findings:
        first, rank = findings[0]
        direction = "backward" if first.backward else "forward"
        where = first.layer if first.layer.startswith("the ") else f"the {direction} of {first.layer}"
        if first.layer == "the loss" and first.backward:
            where = "the backward of the loss"
        same = [other for finding, other in findings[1:] if finding == first]
        others = f", as on {len(same)} other ranks" if same else ""
        message = (
            f"{what}: {first.kind} first appeared in {where} on rank {rank}{others}, in its micro-batch {first.micro_batch}."
        )
        return NotFinite(step=step, rank=rank, layer=first.layer, message=message)
    summed = [(name, rank) for rank, (_, name, _) in enumerate(reports) if name is not None]
    if summed:
        name, rank = summed[0]
        message = f"{what}: every micro-batch is, but not the sum of the gradients of {name} over micro-batches and ranks."
        return NotFinite(step=step, rank=rank, layer=name, message=message)
    blamed = [rank for rank, (_, _, finite) in enumerate(reports) if not finite]
    then = f"; in the first attempt the loss was not finite on rank {', '.join(map(str, blamed))}" if blamed else ""
    message = f"{what}, but a repetition of the step was: a transient fault{then}."
    return NotFinite(step=step, rank=blamed[0] if len(blamed) == 1 else None, layer="", message=message)


def common_module(names: Sequence[str]) -> str:
    """The innermost module that contains all of these readers of one tensor."""
    inner = [name for name in dict.fromkeys(names) if not any(_contains(name, other) for other in names)]
    paths = [name.split(".") for name in inner]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared) or "the model"


def _contains(module: str, other: str) -> bool:
    return other != module and (not module or other.startswith(f"{module}."))


def _floats(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())


@contextmanager
def _restored_buffers(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restores buffers that a forward changes."""
    before = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
