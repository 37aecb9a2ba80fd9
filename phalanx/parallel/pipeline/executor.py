"""Pipeline parallelism: executes one rank's list of actions of a schedule. Training drives it once per step, with its micro-batches.

Shapes of messages are computed, never negotiated, so micro-batches may differ in size. If a rank fails, the others wait for its
messages until the timeout of the process group.
"""

from __future__ import annotations

import timeit
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx import accelerator
from phalanx.observe.comm_timer import message_began, message_sent, timed_collective, wait
from phalanx.parallel import overlap
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.split_backward import backward_input, backward_weight
from phalanx.schedules.actions import Action, Schedule
from phalanx.schedules.makers import forward_only, resized
from phalanx.schedules.pairs import overlapped_pairs
from phalanx.spec.errors import RunFailed

Boundary = Callable[[int], tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of the activations between stages, of a micro-batch."""
Forward = Callable[[int, Tensor | None, int], Any]
"""Runs a stage: (index of the rank's stage, output of the previous stage or None for the first, micro-batch) → output."""
LossOf = Callable[[Any, int], Tensor]
"""From the last stage's output and the micro-batch, the scalar to differentiate."""

_AHEAD = 2
"""How many actions before its use a message is requested, so that it travels meanwhile."""
_REPEATS = 5
"""Timed runs of a measured stage."""


@dataclass(frozen=True, slots=True)
class RankAction:
    """An action and its messages. A message, an activation or a gradient, is named by the action that produces it."""

    kind: str
    stage: int
    micro_batch: int
    part: int
    """Index of the stage among the rank's own."""
    receives: tuple[tuple[int, Action], ...]
    """Messages to request before it, as (sender, message), in the order in which they are sent."""
    consumes: Action | None
    """Its input; None: tokens, a loss, or what the stage has saved."""
    produces: Action | None
    """Its result; None if no other stage needs it."""
    receiver: int | None
    """The rank that the result goes to; None: this rank."""


def rank_actions(schedule: Schedule, rank: int) -> tuple[RankAction, ...]:
    actions = schedule.actions[rank]
    parts = {stage: part for part, stage in enumerate(schedule.stages_of(rank))}
    # Messages between two ranks arrive in the order in which they are sent, so they must be requested in it.
    queues = [deque(action for action in row if _receiver(schedule, action) == rank) for row in schedule.actions]
    requested: set[Action] = set()
    result = []
    for index, action in enumerate(actions):
        receives: list[tuple[int, Action]] = []
        for coming in actions[index : index + 1 + _AHEAD]:
            message = _consumed(schedule, coming)
            while message is not None and (peer := schedule.rank_of(message.stage)) != rank and message not in requested:
                receives.append((peer, queues[peer].popleft()))
                requested.add(receives[-1][1])
        consumes, receiver = _consumed(schedule, action), _receiver(schedule, action)
        produces, receiver = None if receiver is None else action, None if receiver == rank else receiver
        result.append(RankAction(*action, parts[action.stage], tuple(receives), consumes, produces, receiver))
    return tuple(result)


def _in_pairs(actions: Sequence[RankAction], pairs: Collection[int]) -> list[tuple[RankAction, ...]]:
    """`pairs`: positions of actions that run next to the following one."""
    seconds = {place + 1 for place in pairs}
    return [tuple(actions[place : place + 1 + (place in pairs)]) for place in range(len(actions)) if place not in seconds]


def connections(schedule: Schedule) -> list[tuple[int, int]]:
    """All pairs (sender, receiver) that may communicate, in the same order on all ranks."""
    hops = [(schedule.rank_of(stage), schedule.rank_of(stage + 1)) for stage in range(schedule.stages - 1)]
    return sorted({pair for a, b in hops if a != b for pair in ((a, b), (b, a))})


def _receiver(schedule: Schedule, action: Action) -> int | None:
    """The rank that needs the result of an action; None: no other stage does."""
    to = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1}.get(action.kind, -1)
    return schedule.rank_of(to) if 0 <= to < schedule.stages else None


def _consumed(schedule: Schedule, action: Action) -> Action | None:
    return next((need for need in schedule.needs(action) if need.stage != action.stage), None)


class PipelineObserver:
    """Sees every action of a pipeline. This one does nothing; a rehearsal installs its own as `Pipeline.observer`."""

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        """Runs one action and returns its result."""
        return run()

    def end(self) -> None:
        """Called when all actions of a step have run."""


class Pipeline:
    """This rank's stages of a model."""

    def __init__(
        self, parts: Sequence[nn.Module], schedule: Schedule, mesh: Mesh, *, halves: bool = True, overlaps: bool = False
    ):
        """`parts`: in the order of `schedule.stages_of`. All ranks of the pipeline create theirs at the same time.

        `halves`: False where a graph can be traversed only once, as with selective recomputation. Then the input half of a backward
        computes all of it. `overlaps`: run forwards and backwards side by side where the schedule is made for it.
        """
        self.schedule, self._rank, self._halves, self._overlaps = schedule, mesh.coordinate("pipeline"), halves, overlaps
        self._device = mesh.device
        assert len(parts) == len(schedule.stages_of(self._rank))
        self.observer = PipelineObserver()
        # FSDP2's modules, recognized by a method: importing their class takes seconds.
        modules = [module for part in parts for module in part.modules()]
        self._fsdp_modules: list[Any] = [module for module in modules if hasattr(module, "set_requires_gradient_sync")]
        self._actions: dict[tuple[int, bool], list[tuple[RankAction, ...]]] = {}
        """By number of micro-batches, and whether passes run side by side: single actions and pairs."""
        self._forwards = rank_actions(forward_only(schedule), self._rank)
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None, Tensor | None]] = {}
        """By stage and micro-batch: input, output and, of a loss, the gradient one. The output itself is not kept."""
        self._deferred: dict[tuple[int, int], Callable[[], None]] = {}
        """Weight backwards that are still to come."""
        self._p2p = P2P(mesh)
        self._p2p.connect(connections(schedule))

    def run(self, count: int, forward: Forward, loss: LossOf, boundary: Boundary, after_weight: Callable[[int], None]) -> None:
        """Forward and backward of `count` micro-batches. `after_weight`: called with the stage's index each time that gradients have
        been added to all its weights."""
        self._begin()
        side_by_side = self._overlaps and overlap.possible()
        if (count, side_by_side) not in self._actions:
            schedule = resized(self.schedule, count)
            pairs = overlapped_pairs(schedule)[self._rank] if side_by_side else frozenset()
            self._actions[count, side_by_side] = _in_pairs(rank_actions(schedule, self._rank), pairs)
        for actions in self._actions[count, side_by_side]:
            inputs = [self._receive(action, boundary) for action in actions]
            passes = [
                partial(self.observer.action, action, partial(self._execute, action, given, forward, loss))
                for action, given in zip(actions, inputs, strict=True)
            ]
            results = overlap.run_side_by_side(self._device, *passes) if len(passes) == 2 else (passes[0](),)
            for action, result in zip(actions, results, strict=True):
                if action.produces is not None:
                    assert result is not None
                    self._pass_on(action, result, boundary)
                if action.kind in "BW":
                    after_weight(action.part)
        self.observer.end()
        self._p2p.finish()

    @torch.no_grad()
    def evaluate(self, forward: Forward, result: Callable[[Any], None], boundary: Boundary) -> None:
        """Forward of one micro-batch, number 0; on the last stage, `result` receives the output."""
        self._begin()
        for action in self._forwards:
            output = forward(action.part, self._receive(action, boundary), 0)
            if action.produces is not None:
                self._pass_on(action, output, boundary)
            else:
                result(output)
        self._p2p.finish()
        for module in self._fsdp_modules:  # no backward follows that would, and gathered weights would outlive the next update
            module.reshard()

    def _begin(self) -> None:
        self._saved.clear()
        self._deferred.clear()
        self._p2p.reset()
        for module in self._fsdp_modules:
            # Only the engine knows which backward of a stage is the last, and split backwards do not run FSDP2's hooks.
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_is_last_backward(False)

    def _receive(self, action: RankAction, boundary: Boundary) -> Tensor | None:
        for sender, message in action.receives:
            self._p2p.start_receive(message, sender, *boundary(message.micro_batch))
        return None if action.consumes is None else self._p2p.receive(action.consumes)

    def _pass_on(self, action: RankAction, result: Tensor, boundary: Boundary) -> None:
        assert action.produces is not None
        if action.receiver is None:
            self._p2p.keep(action.produces, result)
            return
        shape, dtype = boundary(action.micro_batch)
        if result.shape != torch.Size(shape) or result.dtype != dtype:
            actual, expected = f"{list(result.shape)} of {result.dtype}", f"{list(shape)} of {dtype}"
            raise RunFailed(f"pipeline stage {action.stage} returned {actual}, but the next rank expects {expected}")
        self._p2p.send(action.produces, result, action.receiver)

    def _execute(self, action: RankAction, received: Tensor | None, forward: Forward, loss: LossOf) -> Tensor | None:
        if action.kind == "F":
            return self._forward(action, received, forward, loss)
        if action.kind != "W":
            return self._backward(action, received)
        self._deferred.pop((action.stage, action.micro_batch))()
        return None

    def _forward(self, action: RankAction, received: Tensor | None, forward: Forward, loss: LossOf) -> Tensor | None:
        if received is not None:
            received.requires_grad_()
        output = forward(action.part, received, action.micro_batch)
        gradient = None
        if action.produces is None:
            output = loss(output, action.micro_batch)
            gradient = torch.ones_like(output)
        # Without a trained weight before it, an output has no gradient; the one that comes back is then dropped.
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._saved[action.stage, action.micro_batch] = received, edge, gradient
        return None if action.produces is None else output.detach()

    def _backward(self, action: RankAction, gradient: Tensor | None) -> Tensor | None:
        """A whole backward, or its input half."""
        key = action.stage, action.micro_batch
        input_, output, one = self._saved.pop(key)
        gradient = one if gradient is None else gradient
        if action.kind == "B":
            _backward_whole(output, gradient)
        elif input_ is None:
            self._deferred[key] = partial(_backward_whole, output, gradient)  # no stage waits for it
        elif output is None or not self._halves:
            _backward_whole(output, gradient)
            self._deferred[key] = lambda: None
        else:
            self._deferred[key] = partial(backward_weight, backward_input(output, gradient, input_))
        if input_ is None:
            return None
        return torch.zeros_like(input_) if input_.grad is None else input_.grad


def _backward_whole(output: GradientEdge | None, gradient: Tensor | None) -> None:
    if output is not None:
        torch.autograd.backward([output], [gradient])


class P2P:
    """Sends and receives tensors between the ranks of a pipeline.

    There are two groups, one for each direction. In a group, a rank either sends to another rank or receives from it, in an order that
    both know from the schedule. So no two ranks can wait to send to each other.
    """

    def __init__(self, mesh: Mesh):
        down = mesh.group("pipeline", use="pipeline")
        up = mesh.group_of(down.ranks, use="pipeline")
        self._rank, self._device = mesh.coordinate("pipeline"), mesh.device
        self._groups = down, up
        self._local: dict[Action, Tensor] = {}
        self._receiving: dict[Action, tuple[dist.Work, Tensor, int]] = {}
        self._sending: deque[tuple[dist.Work, Tensor, int]] = deque()

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Send one small message per (sender, receiver) pair, in the same order on all ranks.

        The first message between two GPUs creates their connection, for which both sides wait. In the middle of a schedule, ranks
        could wait for each other in a circle.
        """
        token = self._groups[0].incoming([1], torch.float32, self._device).zero_()
        for sender, receiver in pairs:
            if self._rank == sender:
                timed_collective(dist.send, token, group_dst=receiver, group=self._group(sender, receiver).handle)
            elif self._rank == receiver:
                timed_collective(dist.recv, token, group_src=sender, group=self._group(sender, receiver).handle)

    def reset(self) -> None:
        """Forget the messages of a step that failed."""
        self._local.clear()
        self._receiving.clear()
        self._sending.clear()

    def start_receive(self, message: Action, sender: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Begin to receive. Messages of one sender must be started in the order in which it sends them."""
        group = self._group(sender, self._rank)
        buffer = group.incoming(shape, dtype, self._device)
        work = dist.irecv(buffer, group_src=sender, group=group.handle)
        assert work is not None
        message_began(work, group.ranks[sender], group.ranks[self._rank], _name(message), receives=True)
        self._receiving[message] = work, buffer, sender

    def receive(self, message: Action) -> Tensor:
        """Wait for a message; on a GPU the device waits."""
        if message in self._local:
            return self._local.pop(message)
        work, buffer, sender = self._receiving.pop(message)
        group = self._group(sender, self._rank)
        wait(work, group, group.ranks[sender])
        return group.received(buffer, self._device)

    def keep(self, message: Action, tensor: Tensor) -> None:
        """Store a message for another stage of this rank."""
        self._local[message] = tensor

    def send(self, message: Action, tensor: Tensor, receiver: int) -> None:
        """Begin to send. The tensor must not change until it is sent."""
        while self._sending and self._sending[0][0].is_completed():
            message_sent(self._sending.popleft()[0])
        group = self._group(self._rank, receiver)
        tensor = group.outgoing(tensor)
        work = dist.isend(tensor, group_dst=receiver, group=group.handle)
        assert work is not None
        message_began(work, group.ranks[self._rank], group.ranks[receiver], _name(message), receives=False)
        self._sending.append((work, tensor, receiver))

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            work, _, receiver = self._sending.popleft()
            group = self._group(self._rank, receiver)
            wait(work, group, group.ranks[receiver])
        assert not self._local and not self._receiving, "every message of a schedule is received"

    def _group(self, sender: int, receiver: int) -> Group:
        return self._groups[sender > receiver]


def _name(action: Action | RankAction) -> str:
    """As schedules print it: "0F1" is the forward of micro-batch 1 in stage 0."""
    return f"{action.stage}{action.kind}{action.micro_batch}"


def tied_group(mesh: Mesh, schedule: Schedule) -> Group | None:
    """The ranks of first and last stage, which both hold a tied embedding; None on other ranks, and if they are the same rank.

    All ranks of the pipeline call it at the same time.
    """
    ranks = mesh.group("pipeline", use="pipeline").ranks
    ends = {schedule.rank_of(0), schedule.rank_of(schedule.stages - 1)}
    if len(ends) == 1 or mesh.coordinate("pipeline") not in ends:
        return None
    return mesh.group_of(tuple(ranks[index] for index in sorted(ends)), use="tied")


def measure_costs(kinds: Mapping[str, Callable[[], Tensor]], mesh: Mesh) -> dict[str, float]:
    """Seconds of forward and backward of each kind of block, for cutting a model into stages by measured time. Rank 0 measures, so
    that all ranks cut alike.

    Each callable runs one forward at the sizes of the run and returns its output, whose sum is differentiated.
    """
    seconds = {name: measure_seconds(forward, mesh.device) for name, forward in kinds.items()} if mesh.rank == 0 else None
    return mesh.broadcast_object(seconds)


def measure_seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """The median of a few runs, after one to warm up."""

    def run() -> None:
        output = forward()
        if output.requires_grad:
            output.sum().backward()
        accelerator.of(device).synchronize(device)

    return median(timeit.repeat(run, number=1, repeat=1 + _REPEATS)[1:])
