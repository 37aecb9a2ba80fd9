"""What all ranks agree on in a step: its sums, its outcome, and requests to end training. `training/step` fills the sums while it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import accelerator
from phalanx.observe import comm_timer
from phalanx.parallel.expert import Loads
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.training.micro_batch import MicroBatch

PAUSE, STOP = 1, 2
"""Requests, by priority: if ranks have different ones, all ranks follow the larger."""

GOOD, NOT_FINITE, SPIKE = 0, 1, 2
"""Verdicts on a step: it is applied, or skipped for one of two reasons."""


_SUMS = 6
"""Sums besides the loads of experts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks agree on about a step."""

    loss: float
    tokens: int
    digest: str
    """Checksum of the batch: of the samples' indices and token ids."""
    grad_norm: float
    verdict: int
    """GOOD, NOT_FINITE or SPIKE."""
    stopped: int
    """PAUSE or STOP if some rank was asked to end before the step was complete. Then nothing has changed, and the step will be taken
    again; else 0."""
    memory: int
    """Largest memory of any rank, in bytes."""
    expert_load: float | None = None
    """Load of the fullest expert divided by the mean, in the worst layer; None without experts."""
    weight: float = 0.0
    """What the sum of losses was divided by: tokens, or pairs of preferences."""
    preferred: float | None = None
    """Preferences: fraction of the pairs whose chosen answer has gained more than the rejected one; None for other objectives."""
    reward: float | None = None
    """Preferences: mean reward of the chosen answers minus that of the rejected ones."""

    @property
    def good(self) -> bool:
        """The update was applied: loss and gradient are finite and no spike."""
        return self.verdict == GOOD


class StepTotals:
    """Loss, tokens and expert loads of the global batch, the ranks' stop requests and their largest memory.

    Of several ranks that know the same number, one adds it.
    """

    def __init__(self, model: ShardedModel, loads: Loads | None = None):
        self._model, self._mesh, self._loads = model, model.mesh, loads or Loads({}, {})
        # fp64: sums do not depend on the order of ranks and micro-batches; sums of checksums and counts are exact.
        self._sums = torch.zeros(_SUMS + self._loads.size, dtype=torch.float64, device=self._mesh.device)
        self.loss, self.tokens, self.digest, self.weight, self.preferred, self.reward = self._sums[:_SUMS].unbind()
        self._flags = torch.zeros(2, dtype=torch.float64)
        self._group_weight = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        self.own_loss = self._group_weight
        """Sum of this rank's losses alone."""
        self._works: list[dist.Work | None] | None = None

    @property
    def own_weight(self) -> Tensor:
        """Tokens, or pairs of preferences, of the ranks that take this step together: all ranks, except with local SGD."""
        return self._group_weight if self._model.step_group.size < self._mesh.ranks else self.weight

    @property
    def loads(self) -> dict[str, Tensor]:
        """Tokens of each expert, by the router's name."""
        return self._loads.split(self._sums[_SUMS:])

    @property
    def stopped(self) -> int:
        return int(self._flags[0].item())

    @property
    def memory(self) -> int:
        return int(self._flags[1].item())

    def add(self, loss: Tensor, batch: MicroBatch) -> None:
        self.add_loss(loss, batch)
        self.add_digest(batch)

    def add_loss(self, loss: Tensor, batch: MicroBatch) -> None:
        if self._model.reports_loss:
            self.loss += loss
            self.tokens += batch.counted
            self.weight += batch.weight

    def add_pairs(self, preferred: Tensor, reward: Tensor) -> None:
        """Of preferences: how many pairs are preferred, and the sum of their rewards."""
        if self._model.reports_loss:
            self.preferred += preferred
            self.reward += reward

    def add_digest(self, batch: MicroBatch) -> None:
        if self._mesh.is_replica_leader:
            self.digest += batch.digest

    def stop(self, request: int = STOP) -> None:
        self._flags[0] = request

    def start(self) -> None:
        """Starts the reductions, once per step: before those of the gradients, in the same order on every rank."""
        if self._works is None:
            self._loads.put(self._sums[_SUMS:])
            self.own_loss = self.loss.clone()
            self._flags[1] = accelerator.of(self._mesh.device).max_memory_allocated()
            if self._model.step_group.size < self._mesh.ranks:
                self._group_weight = self._model.step_group.all_reduce(self.weight.clone())
            sums = self._mesh.start_all_reduce(self._sums, label="loss and counts")
            self._works = [sums, self._mesh.start_all_reduce(self._flags, dist.ReduceOp.MAX, label="flags")]

    def wait(self) -> None:
        for work in self._works or []:
            if work is not None:
                comm_timer.wait(work)


class StopSignal:
    """What this rank was asked to do, and what all ranks have agreed on."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self.paused = False
        """Training pauses without saving: other ranks will take the same step."""
        self.agreed = 0
        """0, PAUSE or STOP: known to all ranks."""

    def stop(self, reason: str) -> None:
        """Asks all ranks to save and stop. Safe to call from a signal handler."""
        self._reason = reason

    def pause(self) -> None:
        """Asks all ranks to stop without saving."""
        self.paused = True

    def requested(self) -> int:
        """What this rank was asked: 0, PAUSE or STOP."""
        return STOP if self._reason is not None else PAUSE if self.paused else 0

    @property
    def reason(self) -> str:
        """Why the run stops."""
        return self._reason or "asked to stop"

    def agree(self, request: int) -> None:
        """All ranks have learned that some rank has this request."""
        if request == STOP:
            self._reason = self._reason or "another rank was asked to stop"
        self.paused, self.agreed = request == PAUSE, request
