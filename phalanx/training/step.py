"""One optimizer step: forward and backward over the micro-batches, the ranks' agreement, the update. Called by the trainer.

Nothing that outlives the step changes before all ranks know that it is good: the same sums and the same gradient norm
stand on every rank when the update is made or refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.data.pack import Batch
from phalanx.models.moe import Router, routers
from phalanx.parallel.expert import Loads, imbalance
from phalanx.parallel.mesh import Mesh, resident_bytes
from phalanx.parallel.replicate import Gradients
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.loss import objective, summed_loss
from phalanx.training.optimizer import Optimizer
from phalanx.transforms.precision import computing

_RECENT = 20
"""Steps over which the load of experts is reported: that of one small batch is mostly chance."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward reads, as tensors."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    counted: int
    """Targets that are predicted."""
    digest: int
    """Sum of the samples' checksums, each over its place in the data and its token ids."""

    @staticmethod
    def prepare(batch: Batch, device: torch.device, document_mask: bool) -> MicroBatch:
        """From the loader's arrays; runs in its thread. On GPUs the copy is pinned, so that it can run beside the step."""

        def tensor(array: np.ndarray) -> Tensor:
            host = torch.from_numpy(array)
            return host.pin_memory() if device.type == "cuda" else host

        # A window inside one document needs no mask, and GPUs have a much faster kernel for that. On CPU there is
        # nothing to gain, and one kernel for all keeps the numbers free of how windows are grouped.
        masked = document_mask and (batch.has_boundaries or device.type == "cpu")
        return MicroBatch(
            tokens=tensor(batch.tokens),
            targets=tensor(batch.targets),
            positions=tensor(batch.positions),
            documents=tensor(batch.documents) if masked else None,
            counted=int((batch.targets >= 0).sum()),
            digest=batch.digest,
        )

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks agree on about a step."""

    loss: float
    tokens: int
    digest: str
    grad_norm: float
    good: bool
    """Loss and gradient are finite: the update was made."""
    stopped: bool
    """Some rank was told to stop before the step was complete: nothing was changed, the step is to be taken again."""
    memory: int
    expert_load: float | None = None
    """Load of the fullest expert over the mean, in the worst layer; None where there are no experts."""


class Stepper:
    """The parts of a step that stay the same from one to the next."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, model: nn.Module, gradients: Gradients):
        self._mesh, self._model, self._gradients = mesh, model, gradients
        self._compute, self._clip, self._ahead_weight = plan.compute, run.train.clip, run.model.ahead_weight
        # Losses are divided by the tokens a batch has room for, a constant; masked ones are corrected for in the update,
        # when their number in the whole global batch is known. So no rank waits for a count before its backward.
        self._room = float(run.batch_tokens)
        self._routers: list[Router] = routers(model)
        self._loads = Loads([router.counts for router in self._routers])
        self._recent: deque[Tensor] = deque(maxlen=_RECENT)
        for router in self._routers:
            router.loss_scale = 1.0 / self._room  # what the loss is divided by, the balancing loss is too

    def loss(self, batch: MicroBatch) -> Tensor:
        """Sum of one micro-batch's losses, of the next token alone: what is reported."""
        return summed_loss(self._forward(batch)[0], batch.targets)

    def losses(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """That sum, and the one to go backward from, in which tokens further ahead count too where the model predicts them."""
        logits, *ahead = self._forward(batch)
        loss = summed_loss(logits, batch.targets)
        return loss, objective(loss, ahead, batch.targets, batch.documents, self._ahead_weight)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        with computing(self._compute, self._mesh.device):
            logits = self._model(batch.tokens, batch.positions, batch.documents)
        return logits if isinstance(logits, tuple) else (logits,)

    def accumulate(self, batches: Sequence[MicroBatch], stopping: Callable[[], bool]) -> Totals:
        """Gradients of the whole global batch, summed over its micro-batches and ranks, divided by the room for tokens."""
        totals = Totals(self._mesh, self._loads)
        self._gradients.begin(len(batches))
        self._loads.reset()
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if stopping():
                totals.stop()
                break
            batch = batch.to(self._mesh.device)
            loss, whole = self.losses(batch)
            totals.add(loss.detach(), batch)
            if last:
                totals.start()  # the ranks' sums travel during the backward
            (whole / self._room).backward()
            self._gradients.after_backward()
        totals.start()
        self._gradients.finish()
        totals.wait()
        return totals

    def step(
        self, batches: Sequence[MicroBatch], optimizer: Optimizer, learning_rate: float, stopping: Callable[[], bool]
    ) -> Outcome:
        totals = self.accumulate(batches, stopping)
        counted = totals.tokens.clamp(min=1).float()
        norm = self._gradients.norm() * (self._room / counted)
        loss = totals.loss / counted
        good = torch.isfinite(loss) & torch.isfinite(norm)
        stopped = totals.stopped
        if not stopped:
            # Dividing by this takes the mean over the tokens that counted and clips to the norm, both at once.
            divisor = counted / self._room * (norm / self._clip).clamp(min=1.0)
            optimizer.step(learning_rate, divisor, (~good).float())
        loads = totals.loads
        if loads and not stopped:
            self._recent.append(torch.cat(loads))
        load = [imbalance(self._loads.split(torch.stack(tuple(self._recent)).sum(0)))] if self._recent else []
        values = torch.stack((loss, totals.tokens, totals.digest, norm.double(), good.double(), *load)).tolist()
        if values[4] and not stopped:
            # Every rank has the same counts, so every copy of a router moves alike.
            for router, counts in zip(self._routers, loads, strict=True):
                router.rebalance(counts)
        return Outcome(
            loss=values[0],
            tokens=int(values[1]),
            digest=f"{int(values[2]):x}",
            grad_norm=values[3],
            good=bool(values[4]),
            stopped=stopped,
            memory=totals.memory,
            expert_load=values[5] if load else None,
        )


class Totals:
    """Loss, tokens and experts' loads of the global batch, whether any rank was told to stop, and the ranks' largest memory."""

    def __init__(self, mesh: Mesh, loads: Loads | None = None):
        self._mesh, self._loads = mesh, loads or Loads()
        # fp64: the order in which ranks and micro-batches are added does not show, and sums of checksums and counts are exact.
        self._sums = torch.zeros(3 + self._loads.size, dtype=torch.float64, device=mesh.device)
        self._flags = torch.zeros(2, dtype=torch.float64)
        self._works: list[dist.Work | None] | None = None

    @property
    def loss(self) -> Tensor:
        return self._sums[0]

    @property
    def tokens(self) -> Tensor:
        return self._sums[1]

    @property
    def digest(self) -> Tensor:
        return self._sums[2]

    @property
    def loads(self) -> list[Tensor]:
        """Tokens of each expert, layer by layer."""
        return self._loads.split(self._sums[3:])

    @property
    def stopped(self) -> bool:
        return bool(self._flags[0].item())

    @property
    def memory(self) -> int:
        return int(self._flags[1].item())

    def add(self, loss: Tensor, batch: MicroBatch) -> None:
        self._sums[0] += loss
        self._sums[1] += batch.counted
        self._sums[2] += batch.digest

    def stop(self) -> None:
        self._flags[0] = 1

    def start(self) -> None:
        """Begin to sum over the ranks; once per step, before the gradients, in the same order on every rank."""
        if self._works is None:
            on_gpu = self._mesh.device.type == "cuda"
            self._loads.put(self._sums[3:])
            self._flags[1] = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
            self._works = [self._mesh.start(self._sums), self._mesh.start(self._flags, dist.ReduceOp.MAX)]

    def wait(self) -> None:
        for work in self._works or []:
            if work is not None:
                work.wait()
