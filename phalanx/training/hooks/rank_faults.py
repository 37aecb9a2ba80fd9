"""Strikes the faults of `--chaos` inside a rank. The trainer says at each point of a step where it is; without faults that costs a
look at an empty table. What takes nodes, links and the disk is struck by the node's supervisor (`spec.chaos.of_agent`)."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phalanx.checkpointing.state_tensor import OffloadedTensor
from phalanx.events.fault_log import DISK, FaultClaims, fault_record
from phalanx.events.records import FaultInjected
from phalanx.faults.grammar import Fault, Point, is_node_fault
from phalanx.parallel.owned_param import OwnedParam

_BETWEEN = ("save", "evaluate")  # points that not every step has: a fault strikes at the first one from its step on
_LONG = 3600.0
_LOW_EXPONENT = {torch.float32: (torch.int32, 23), torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10)}
"""The lowest bit of the exponent, by format. A value doubles or halves: wrong, and nothing that overflows and so tells itself."""


class Injected(RuntimeError):
    """What `raise` raises."""


class Faults:
    """The faults of one rank."""

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        rank: int = 0,
        node: int = 0,
        done: FaultClaims | None = None,
        report: Callable[[FaultInjected], object] = lambda event: None,
    ):
        """`faults`: all of the run's, those of `random` drawn; a fault's place among them is its number in `done`. `report` writes
        the record, before the fault strikes."""
        assert not any(fault.kind == "random" for fault in faults), "spec.chaos_draw.expand first"
        self.rank, self.node = rank, node
        self._done, self._report = done, report
        self._mine: dict[str, list[tuple[int, Fault]]] = {}
        for number, fault in enumerate(faults):
            if fault.rank == rank and not is_node_fault(fault):
                self._mine.setdefault(_where(fault), []).append((number, fault))
        self._parts: Sequence[nn.Module] = ()
        self._hooks: list[RemovableHandle] = []
        self._again = False
        self._planted: set[int] = set()
        """Those that gave this process a NaN."""
        if done is not None and any(fault.kind == "fill-disk" for fault in faults):
            DISK.watch(done.run_dir)

    def see(self, parts: Sequence[nn.Module]) -> None:
        """The model has been built: a NaN will be planted in one of its modules."""
        self._unhook()
        self._parts = parts if self._mine else ()  # `NONE` outlives them

    def at(self, point: Point, step: int) -> None:
        """The rank is at this point of `step`, or after it where it saves or evaluates. It may not come back."""
        if not self._mine:
            return
        if self._hooks and point != "collective":  # recomputation runs forwards until then
            self._unhook()
        for number, fault in self._mine.get(point, ()):
            late = point in _BETWEEN and step > fault.step
            if (step == fault.step or late) and self._claim(number, fault, step):
                _strike(fault)
        if point == "compute":
            for number, fault in self._mine.get("nan", ()):
                if step == fault.step:
                    self._plant(number, fault)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A step is repeated in this process to find out what happened in it: what this process was struck with then strikes again."""
        self._again = True
        try:
            yield
        finally:
            self._again = False
            self._unhook()

    def weights(self, step: int, held: Iterable[OwnedParam]) -> None:
        """Before the forward: flip a bit of one weight, where that is due."""
        self._corrupt("weights", step, lambda: [one.value.detach() for one in held])

    def gradients(self, step: int, held: Iterable[OwnedParam]) -> None:
        """When all gradients are complete: of one of them."""
        self._corrupt("gradients", step, lambda: [one.gradient for one in held if one.gradient is not None])

    def optimizer(self, step: int, states: Callable[[], Mapping[str, Tensor | OffloadedTensor]]) -> None:
        """Before the forward: of one optimizer state. `states` is asked only where that is due."""
        self._corrupt("optimizer", step, lambda: list(states().values()))

    def slowness(self, step: int) -> float:
        """How many times as long this rank is to take; 1: as long as it takes."""
        factor = 1.0
        for number, fault in self._mine.get("slow", ()):
            if fault.step <= step <= (fault.to or step):
                self._claim(number, fault, step)  # it lasts, through recoveries too; it is told once
                factor *= fault.factor or 1.0
        return factor

    def drag(self, step: int, seconds: float) -> None:
        """This rank has worked for so long in `step`: where it is slow, it takes longer."""
        if self._mine and (factor := self.slowness(step)) > 1:
            time.sleep((factor - 1) * seconds)

    def _claim(self, number: int, fault: Fault, step: int) -> bool:
        """Whether it strikes now, and never again."""
        assert self._done is not None, "faults need a place to write down that they have struck"
        if not self._done.claim(number):
            return False
        self._report(fault_record(fault, step))
        return True

    def _plant(self, number: int, fault: Fault) -> None:
        module = _module(self._parts, fault.layer)
        if module is None:
            return  # another stage has it
        if self._again and number in self._planted:
            self._hooks.append(module.register_forward_hook(_with_nan))
        elif not self._again and self._claim(number, fault, fault.step):
            self._planted.add(number)
            self._hooks.append(module.register_forward_hook(_with_nan))

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _corrupt(self, what: str, step: int, tensors: Callable[[], Sequence[Tensor | OffloadedTensor]]) -> None:
        for number, fault in self._mine.get(f"corrupt {what}", ()):
            if step == fault.step and self._claim(number, fault, step):
                _flip_one(tensors())


NONE = Faults()
"""Of a run that nobody disturbs."""


def _where(fault: Fault) -> str:
    """Under what it is looked up."""
    if fault.kind == "corrupt":
        return f"corrupt {fault.what}"
    return fault.kind if fault.kind in ("slow", "nan") else fault.point


def _strike(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "raise":
        raise Injected(f"injected by --chaos: {fault}")
    else:
        _hang(fault.seconds)


def _hang(seconds: float | None) -> None:
    """As real ones, it heeds nobody: only an exception that a signal handler raises gets through."""
    end = math.inf if seconds is None else time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LONG))


def _module(parts: Sequence[nn.Module], layer: str | None) -> nn.Module | None:
    """The module of that name in any part; without a name the first block, or the whole where there are none."""
    if layer is None:
        inside = (block for part in parts for block in getattr(part, "blocks", nn.ModuleList()).children())
        return next(inside, parts[0] if parts else None)
    return next((module for part in parts for name, module in part.named_modules() if name == layer), None)


def _with_nan(module: nn.Module, given: Any, output: Any) -> Any:
    """A forward hook: the output with its first number missing. Added and not written, as the backward may need what was there."""
    if isinstance(output, tuple):
        first, *rest = output
        return (_with_nan(module, given, first), *rest)
    if not isinstance(output, Tensor) or not output.is_floating_point() or not output.numel():
        return output
    planted = output.new_zeros(output.shape)
    planted.view(-1)[:1] = math.nan
    return output + planted


@torch.no_grad()
def _flip_one(tensors: Sequence[Tensor | OffloadedTensor]) -> None:
    """One bit of the largest number of the first tensor that is not all zeros, or of the first where all are."""
    found: tuple[Tensor | OffloadedTensor, Tensor] | None = None
    for tensor in tensors:
        values = tensor if isinstance(tensor, Tensor) else tensor.read()
        if values.ndim and values.numel() and values.dtype in _LOW_EXPONENT:
            found = found or (tensor, values)
            if values.any():
                found = (tensor, values)
                break
    if found is None:
        return
    tensor, values = found
    kind, bit = _LOW_EXPONENT[values.dtype]
    place = int(values.abs().argmax())
    bits = values.view(-1).view(kind)
    bits[place] = bits[place] ^ (1 << bit)
    if not isinstance(tensor, Tensor):
        tensor.write(values)
