"""Tensors on their way between the ranks of a pipeline. `parallel/pipeline/executor` sends and takes them.

Two groups, one for each direction between ranks: in a group a rank only ever sends to another or only receives from it, in an
order that both know from the schedule. So no rank can wait to send to one that waits to send to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.observe.comm_timer import timed_collective, wait
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.rank_actions import Message


class P2P:
    """One rank's letter box."""

    def __init__(self, mesh: Mesh):
        """All ranks of the pipeline make theirs at the same time."""
        down = mesh.group("pipeline", use="pipeline")
        up = mesh.group_of(down.ranks, use="pipeline")
        self._rank, self._device = mesh.coordinate("pipeline"), mesh.device
        self._groups = down, up
        self._here: dict[Message, Tensor] = {}
        self._asked: dict[Message, tuple[dist.Work, Tensor, int]] = {}
        self._leaving: deque[tuple[dist.Work, Tensor, int]] = deque()
        self.sent = 0
        """Bytes, so far."""

    def greet(self, pairs: Sequence[tuple[int, int]]) -> None:
        """One small message from each first to each second rank, in the same order on all.

        A GPU's connection is made by the first message, for which both sides wait; made in the midst of a schedule, some
        could wait for each other in a circle.
        """
        token = torch.zeros(1, device=self._device)
        for sender, receiver in pairs:
            if self._rank == sender:
                timed_collective(dist.send, token, group_dst=receiver, group=self._group(sender, receiver).handle)
            elif self._rank == receiver:
                timed_collective(dist.recv, token, group_src=sender, group=self._group(sender, receiver).handle)

    def begin(self) -> None:
        """Forget what a run that failed may have left."""
        self._here.clear()
        self._asked.clear()
        self._leaving.clear()

    def ask(self, message: Message, sender: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Let it come while something else is done. Of one sender's messages, ask in the order in which it sends them."""
        place = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(place, group_src=sender, group=self._group(sender, self._rank).handle)
        assert work is not None
        self._asked[message] = work, place, sender

    def take(self, message: Message) -> Tensor:
        """Wait for it; on a GPU the device does."""
        if message in self._here:
            return self._here.pop(message)
        work, place, sender = self._asked.pop(message)
        group = self._group(sender, self._rank)
        wait(work, group, group.ranks[sender])
        return place

    def keep(self, message: Message, tensor: Tensor) -> None:
        """For another stage of this rank."""
        self._here[message] = tensor

    def send(self, tensor: Tensor, receiver: int) -> None:
        """Does not wait; the tensor is held until it has left, and must not change before."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group_dst=receiver, group=self._group(self._rank, receiver).handle)
        assert work is not None
        self._leaving.append((work, tensor, receiver))
        self.sent += tensor.nbytes

    def end(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            work, _, receiver = self._leaving.popleft()
            group = self._group(self._rank, receiver)
            wait(work, group, group.ranks[receiver])
        assert not self._here and not self._asked, "every message of a schedule is taken"

    def _group(self, sender: int, receiver: int) -> Group:
        return self._groups[sender > receiver]
