"""Pipeline parallelism: one rank's part of a schedule, executed. Training drives it once per step, with its micro-batches.

Shapes of what travels are computed, never asked for, so micro-batches may differ in size. A rank that fails leaves the others
waiting for a message; they give up after the timeout of the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.p2p import P2P
from phalanx.parallel.pipeline.rank_actions import Step, neighbours, program
from phalanx.parallel.pipeline.split_backward import Rest, backward_input, backward_weight
from phalanx.schedules.actions import Schedule
from phalanx.schedules.makers import forward_only, resized
from phalanx.schedules.timing import Timed
from phalanx.spec.errors import RunFailed

Boundary = Callable[[int], tuple[Sequence[int], torch.dtype]]
"""Shape and type of what travels between stages, of a micro-batch."""
Forward = Callable[[int, Tensor | None, int], Any]
"""One of the rank's parts, by number; what the stage before returned, None for the first; micro-batch. The output."""


class _Kept(NamedTuple):
    """Of a forward, for its backward. The output itself need not stay."""

    given: Tensor | None
    output: GradientEdge | None
    gradient: Tensor | None
    """Of a loss: one."""


class _Whole(NamedTuple):
    """The weight half of a first stage's backward is all of it."""

    output: GradientEdge | None
    gradient: Tensor | None


class Pipeline:
    """This rank's stages of a model."""

    def __init__(self, parts: Sequence[nn.Module], schedule: Schedule, mesh: Mesh, *, halves: bool = True):
        """`parts`: in the order of `schedule.stages_of`. All ranks of the pipeline make theirs at the same time.

        `halves`: False where a graph can be gone through only once, as with selective recomputation: what a schedule means
        to be the input half of a backward is then all of it.
        """
        self._halves = halves
        self.schedule, self._mesh, self._rank = schedule, mesh, mesh.coordinate("pipeline")
        assert len(parts) == len(schedule.stages_of(self._rank))
        self._sharded = [module for part in parts for module in part.modules() if isinstance(module, FSDPModule)]
        self._programs: dict[tuple[int, bool], tuple[Step, ...]] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._owed: dict[tuple[int, int], Rest | _Whole] = {}
        self._mail = P2P(mesh)
        self._mail.greet(neighbours(schedule))

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others so far."""
        return self._mail.sent

    def run(
        self,
        count: int,
        forward: Forward,
        loss: Callable[[Any, int], Tensor],
        boundary: Boundary,
        after_weight: Callable[[int], None] = lambda part: None,
    ) -> Trace:
        """Forward and backward of so many micro-batches.

        `loss`: from the last stage's output and the micro-batch, the scalar to go backward from. `after_weight`: called with
        the part's number each time that gradients have been added to all its weights.
        """
        self._begin()
        trace = Trace()
        for step in self._program(count, backward=True):
            given, result = self._receive(step, boundary), None
            start = self._mark()
            if step.kind == "F":
                result = self._forward(step, given, forward, loss)
            elif step.kind == "W":
                self._weight(step)
            else:
                result = self._backward(step, given)
            trace.marks.append((step, start, self._mark()))
            if step.gives is not None:
                assert result is not None
                self._hand_on(step, result, boundary)
            if step.kind in "BW":
                after_weight(step.part)
        self._mail.end()
        return trace

    @torch.no_grad()
    def evaluate(self, count: int, forward: Forward, result: Callable[[Any, int], None], boundary: Boundary) -> None:
        """Forward of so many micro-batches; the last stage's outputs go to `result` there."""
        self._begin()
        for step in self._program(count, backward=False):
            output = forward(step.part, self._receive(step, boundary), step.micro_batch)
            if step.gives is not None:
                self._hand_on(step, output, boundary)
            else:
                result(output, step.micro_batch)
        self._mail.end()
        for module in self._sharded:  # no backward follows that would, and what is gathered would outlive the next update
            module.reshard()

    def _program(self, count: int, *, backward: bool) -> tuple[Step, ...]:
        if (count, backward) not in self._programs:
            schedule = resized(self.schedule, count) if backward else forward_only(self.schedule, count)
            self._programs[count, backward] = program(schedule, self._rank)
        return self._programs[count, backward]

    def _begin(self) -> None:
        self._kept.clear()
        self._owed.clear()
        self._mail.begin()
        for module in self._sharded:
            # Only the engine knows when a stage's last backward was, and halves of backwards do not announce themselves.
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_is_last_backward(False)

    def _receive(self, step: Step, boundary: Boundary) -> Tensor | None:
        for sender, message in step.ask:
            self._mail.ask(message, sender, *boundary(message.micro_batch))
        return None if step.takes is None else self._mail.take(step.takes)

    def _hand_on(self, step: Step, result: Tensor, boundary: Boundary) -> None:
        assert step.gives is not None
        if step.to is None:
            self._mail.keep(step.gives, result)
            return
        shape, dtype = boundary(step.micro_batch)
        if result.shape != torch.Size(shape) or result.dtype != dtype:
            has = f"{list(result.shape)} of {result.dtype}"
            raise RunFailed(f"pipeline stage {step.stage} returned {has}, but the next rank waits for {list(shape)} of {dtype}")
        self._mail.send(result, step.to)

    def _forward(self, step: Step, given: Tensor | None, forward: Forward, loss: Callable[[Any, int], Tensor]) -> Tensor | None:
        if given is not None:
            given.requires_grad_()
        output = forward(step.part, given, step.micro_batch)
        gradient = None
        if step.gives is None:
            output = loss(output, step.micro_batch)
            gradient = torch.ones_like(output)
        # Without a weight to learn before it, an output has no gradient; the one that comes back for it is then dropped.
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._kept[step.stage, step.micro_batch] = _Kept(given, edge, gradient)
        return None if step.gives is None else output.detach()

    def _backward(self, step: Step, gradient: Tensor | None) -> Tensor | None:
        """Whole, or its input half."""
        key = step.stage, step.micro_batch
        given, output, one = self._kept.pop(key)
        gradient = one if gradient is None else gradient
        if step.kind == "B":
            _backward_whole(output, gradient)
        elif given is None:
            self._owed[key] = _Whole(output, gradient)  # nobody waits for it
        elif output is None or not self._halves:
            _backward_whole(output, gradient)
            self._owed[key] = []
        else:
            self._owed[key] = backward_input(output, gradient, given)
        if given is None:
            return None
        return torch.zeros_like(given) if given.grad is None else given.grad

    def _weight(self, step: Step) -> None:
        owed = self._owed.pop((step.stage, step.micro_batch))
        if isinstance(owed, _Whole):
            _backward_whole(*owed)
        else:
            backward_weight(owed)

    def _mark(self) -> float | torch.cuda.Event:
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _backward_whole(output: GradientEdge | None, gradient: Tensor | None) -> None:
    if output is not None:
        torch.autograd.backward([output], [gradient])


class Trace:
    """When this rank did what. `spec.schedule_time.bubble` reads those of all ranks."""

    def __init__(self) -> None:
        self.marks: list[tuple[Step, Any, Any]] = []
        self._begin = time.perf_counter()

    @property
    def timed(self) -> list[Timed]:
        """In seconds of a clock that all processes of a machine share; on a GPU this waits for the device."""
        first = self.marks[0][1]
        if not isinstance(first, float):
            self.marks[-1][2].synchronize()

        def seconds(mark: Any) -> float:
            return mark if isinstance(mark, float) else self._begin + first.elapsed_time(mark) / 1000

        return [Timed(s.kind, s.stage, s.micro_batch, seconds(start), seconds(stop)) for s, start, stop in self.marks]


def tied_group(mesh: Mesh, schedule: Schedule) -> Group | None:
    """The ranks of first and last stage, which both hold a tied embedding; None elsewhere, and where they are the same rank.

    All ranks of the pipeline call it at the same time.
    """
    ranks = mesh.group("pipeline", use="pipeline").ranks
    ends = {schedule.rank_of(0), schedule.rank_of(schedule.stages - 1)}
    if len(ends) == 1 or mesh.coordinate("pipeline") not in ends:
        return None
    return mesh.group_of(tuple(ranks[index] for index in sorted(ends)), use="tied")
