"""Injects the faults of `--chaos` inside a rank. A hook: each fault is injected at its point of its step. Faults of nodes, links and disks
are injected by the node's agent (see `faults.grammar.is_node_fault`)."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.checkpointing.state_tensor import OffloadedTensor
from phalanx.events.fault_log import DISK, FaultClaims, fault_record
from phalanx.events.records import FaultInjected
from phalanx.faults.grammar import Fault, Point, is_node_fault
from phalanx.training.hooks import StepContext, StepHook
from phalanx.training.step_totals import Outcome
from phalanx.transforms.blocks import block_list

_IRREGULAR_POINTS = ("save", "evaluate")
"""Points that not every step has: a fault is injected at the first such point from its step on."""
_INSIDE: tuple[Point, ...] = ("compute", "collective", "update")
"""Points inside of a compiled program."""
_LONG_SLEEP = 3600.0
_LOW_EXPONENT_BIT = {torch.float32: (torch.int32, 23), torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10)}
"""The lowest bit of the exponent, by dtype. Flipping it doubles or halves a value: wrong, but it does not overflow and so reveal itself."""


class InjectedFault(RuntimeError):
    """Raised by the fault `raise`."""


class RankFaults(StepHook):
    """The faults of one rank."""

    allows_ahead = False

    def __init__(self, faults: Sequence[Fault], *, rank: int, done: FaultClaims, report: Callable[[FaultInjected], object]):
        """`faults`: all faults of the run, with those of `random` drawn; a fault's index is its number in `done`. `report` writes the
        record before the fault is injected."""
        assert not any(fault.kind == "random" for fault in faults), "expand random faults first"
        self._done, self._report = done, report
        self._faults: dict[str, list[tuple[int, Fault]]] = {}
        for number, fault in enumerate(faults):
            if fault.rank == rank and not is_node_fault(fault):
                self._faults.setdefault(_point(fault), []).append((number, fault))
        self._handles: list[RemovableHandle] = []
        self._repeating = False
        self._planted: set[int] = set()
        """Numbers of the faults that gave this process a NaN."""
        if any(fault.kind == "fill-disk" for fault in faults):
            DISK.watch(done.run_dir)

    def before_batch(self, step: int) -> None:
        self._inject_at("data", step)

    def before_forward(self, context: StepContext) -> None:
        step = context.number
        self._inject_at("compute", step)
        for number, fault in self._faults.get("nan", ()):
            if step == fault.step:
                self._plant_nan(number, fault, context.model.parts)
        self._corrupt("weights", step, lambda: [param.value.detach() for param in context.model.owned])
        self._corrupt("optimizer", step, lambda: list(context.optimizer.state().values()))

    def before_reduce(self, step: int, busy_seconds: float) -> None:
        self._inject_at("collective", step)
        if (factor := self._slowness(step)) > 1:
            time.sleep((factor - 1) * busy_seconds)

    def after_backward(self, context: StepContext) -> None:
        owned = context.model.owned
        self._corrupt("gradients", context.number, lambda: [p.gradient for p in owned if p.gradient is not None])

    def on_update(self, step: int) -> None:
        self._inject_at("update", step)

    def before_evaluate(self, step: int) -> None:
        self._inject_at("evaluate", step)

    def before_save(self, step: int) -> None:
        self._inject_at("save", step)

    @contextmanager
    def around_repeat(self) -> Iterator[None]:
        """A fault that was injected in this step is injected again when the step is repeated."""
        self._repeating = True
        try:
            yield
        finally:
            self._repeating = False
            self._remove_handles()

    def on_roll_forward(self) -> None:
        self._faults.clear()

    def _inject_at(self, point: Point, step: int) -> None:
        """Injects the faults of this point of `step`, or, for saves and evaluations, of the first one after `step`. May not return."""
        if self._handles and point != "collective":  # recomputation runs forwards until then
            self._remove_handles()
        for number, fault in self._faults.get(point, ()):
            if fault.kind == "delay":
                if fault.step <= step <= (fault.to or step):
                    self._claim(number, fault, step)  # it lasts, as `slow` does
                    time.sleep(fault.seconds or 0.0)
                continue
            is_late = point in _IRREGULAR_POINTS and step > fault.step
            if (step == fault.step or is_late) and self._claim(number, fault, step):
                _inject(fault)

    def _slowness(self, step: int) -> float:
        """How many times as long as normal this rank takes."""
        factor = 1.0
        for number, fault in self._faults.get("slow", ()):
            if fault.step <= step <= (fault.to or step):
                self._claim(number, fault, step)  # it lasts, through recoveries too, and is reported once
                factor *= fault.factor or 1.0
        return factor

    def _claim(self, number: int, fault: Fault, step: int) -> bool:
        """Whether the fault has never been injected before; if so, it is reported and marked as done."""
        is_first = self._done.claim(number)
        if is_first:
            self._report(fault_record(fault, step))
        return is_first

    def _plant_nan(self, number: int, fault: Fault, parts: Sequence[nn.Module]) -> None:
        module = _find_module(parts, fault.layer)
        if module is None:
            return  # another stage has it
        if not self._repeating and self._claim(number, fault, fault.step):
            self._planted.add(number)
        elif not (self._repeating and number in self._planted):
            return
        self._handles.append(module.register_forward_hook(_add_nan))

    def _remove_handles(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _corrupt(self, what: str, step: int, tensors: Callable[[], Sequence[Tensor | OffloadedTensor]]) -> None:
        for number, fault in self._faults.get(f"corrupt {what}", ()):
            if step == fault.step and self._claim(number, fault, step):
                _flip_bit(tensors())


class ProgramFaults(RankFaults):
    """The faults of one process whose step is one compiled program: everything between its batch and the next one happens before the program is
    called. `faults/grammar.program_problems` refuses what would need to reach into it."""

    _called, _seconds = 0.0, 0.0
    """When the program was called, and how long it took in the last step."""

    def before_program(self, step: int) -> None:
        for point in _INSIDE:
            self._inject_at(point, step)
        if (factor := self._slowness(step)) > 1:
            time.sleep((factor - 1) * self._seconds)
        self._called = time.perf_counter()

    def on_step_taken(self, step: int, outcome: Outcome) -> None:
        self._seconds = time.perf_counter() - self._called


def _point(fault: Fault) -> str:
    """The key under which a fault is looked up."""
    if fault.kind == "corrupt":
        return f"corrupt {fault.what}"
    return fault.kind if fault.kind in ("slow", "nan") else fault.point


def _inject(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "raise":
        raise InjectedFault(f"injected by --chaos: {fault}")
    # Hangs as real code does: only an exception from a signal handler ends it early.
    end = math.inf if fault.seconds is None else time.monotonic() + fault.seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LONG_SLEEP))


def _find_module(parts: Sequence[nn.Module], layer: str | None) -> nn.Module | None:
    """The module of this name in any part; without a name the first block, or the whole model if it has no blocks."""
    if layer is None:
        blocks = (block for part in parts for block in block_list(part)[1].values())
        return next(blocks, parts[0] if parts else None)
    return next((module for part in parts for name, module in part.named_modules() if name == layer), None)


def _add_nan(module: nn.Module, given: Any, output: Any) -> Any:
    """A forward hook: makes the first value of the output NaN. Not in place, as the backward may need the old values."""
    if isinstance(output, tuple):
        first, *rest = output
        return (_add_nan(module, given, first), *rest)
    if not isinstance(output, Tensor) or not output.is_floating_point() or not output.numel():
        return output
    planted = output.new_zeros(output.shape)
    planted.view(-1)[:1] = math.nan
    return output + planted


@torch.no_grad()
def _flip_bit(tensors: Sequence[Tensor | OffloadedTensor]) -> None:
    """Flips one bit of the largest value of the first tensor that is not all zeros, or of the first tensor if all are."""
    read = ((tensor, tensor if isinstance(tensor, Tensor) else tensor.read()) for tensor in tensors)
    fit = (pair for pair in read if pair[1].ndim and pair[1].numel() and pair[1].dtype in _LOW_EXPONENT_BIT)
    first = next(fit, None)
    if first is None:
        return
    tensor, values = next((pair for pair in chain([first], fit) if pair[1].any()), first)
    dtype, bit = _LOW_EXPONENT_BIT[values.dtype]
    largest = int(values.abs().argmax())
    bits = values.view(-1).view(dtype)
    bits[largest] = bits[largest] ^ (1 << bit)
    if not isinstance(tensor, Tensor):
        tensor.write(values)
