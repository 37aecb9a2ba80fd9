"""What all ranks know together about one step: its sums over them. Filled by `training/step` while the micro-batches are computed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.accelerator import resident_bytes
from phalanx.observe import comm_timer
from phalanx.parallel.expert import Loads
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.training.micro_batch import MicroBatch

PAUSE, STOP = 1, 2
"""What a rank may be told between steps; where ranks were told both, they stop."""


class Totals:
    """Loss, tokens and experts' loads of the global batch, whether any rank was told to stop, and the ranks' largest memory.

    What several ranks know alike is said by one of them.
    """

    def __init__(self, placed: ShardedModel, loads: Loads | None = None):
        self._placed, self._mesh, self._loads = placed, placed.mesh, loads or Loads({}, {})
        # fp64: the order in which ranks and micro-batches are added does not show, and sums of checksums and counts are exact.
        self._sums = torch.zeros(3 + self._loads.size, dtype=torch.float64, device=self._mesh.device)
        self._flags = torch.zeros(2, dtype=torch.float64)
        self._own = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        self.own_loss = self._own
        """Sum of this rank's losses alone, before it was added to the others'."""
        self._works: list[dist.Work | None] | None = None

    @property
    def loss(self) -> Tensor:
        return self._sums[0]

    @property
    def tokens(self) -> Tensor:
        return self._sums[1]

    @property
    def own_tokens(self) -> Tensor:
        """Of the ranks that take this step together: all, unless replicas go their own way for some steps."""
        return self._own if self._placed.step_group.size < self._mesh.ranks else self.tokens

    @property
    def digest(self) -> Tensor:
        return self._sums[2]

    @property
    def loads(self) -> dict[str, Tensor]:
        """Tokens of each expert, by the router's name."""
        return self._loads.split(self._sums[3:])

    @property
    def stopped(self) -> int:
        return int(self._flags[0].item())

    @property
    def memory(self) -> int:
        return int(self._flags[1].item())

    def add(self, loss: Tensor, batch: MicroBatch) -> None:
        self.add_loss(loss, batch)
        self.see(batch)

    def add_loss(self, loss: Tensor, batch: MicroBatch) -> None:
        if self._placed.reports_loss:
            self._sums[0] += loss
            self._sums[1] += batch.counted

    def see(self, batch: MicroBatch) -> None:
        if self._mesh.is_replica_leader:
            self._sums[2] += batch.digest

    def stop(self, told: int = STOP) -> None:
        self._flags[0] = told

    def start(self) -> None:
        """Begin to sum over the ranks; once per step, before the gradients, in the same order on every rank."""
        if self._works is None:
            on_gpu = self._mesh.device.type == "cuda"
            self._loads.put(self._sums[3:])
            self.own_loss = self._sums[0].clone()
            self._flags[1] = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
            if self._placed.step_group.size < self._mesh.ranks:
                self._own = self._placed.step_group.all_reduce(self._sums[1].clone())
            self._works = [self._mesh.start_all_reduce(self._sums), self._mesh.start_all_reduce(self._flags, dist.ReduceOp.MAX)]

    def wait(self) -> None:
        for work in self._works or []:
            if work is not None:
                comm_timer.wait(work)
