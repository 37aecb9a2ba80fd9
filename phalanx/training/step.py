"""One optimizer step: forward and backward over the micro-batches, the ranks' agreement, the update. Called by the trainer.

Nothing that outlives the step changes before all ranks know that it is good: the same sums and the same gradient norm
stand on every rank when the update is made or refused.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.pack import Batch
from phalanx.models.moe import routers
from phalanx.parallel.expert import Loads, imbalance
from phalanx.parallel.mesh import resident_bytes
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.placed import Placed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.loss import objective
from phalanx.training.optimizer import Optimizer
from phalanx.transforms.precision import LossScale, computing

_RECENT = 20
"""Steps over which the load of experts is reported: that of one small batch is mostly chance."""


def step_seed(seed: int, step: int, replica: int) -> int:
    """What a replica draws random numbers from in a step (dropout of a module of one's own): of the step alone, so that a resumed
    run draws what an unbroken one does, and the same on all ranks that compute one replica."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {replica}".encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward reads, as tensors."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    """Of whole sequences, also where this rank has only a part of their tokens."""
    counted: int
    """Targets that are predicted."""
    digest: int
    """Sum of the samples' checksums, each over its place in the data and its token ids."""

    @staticmethod
    def prepare(batch: Batch, device: torch.device, document_mask: bool, places: np.ndarray | None = None) -> MicroBatch:
        """From the loader's arrays; runs in its thread. On GPUs the copy is pinned, so that it can run beside the step.

        `places`: the positions of each sequence that are this rank's, where ranks share sequences.
        """

        def tensor(array: np.ndarray) -> Tensor:
            host = torch.from_numpy(array)
            return host.pin_memory() if device.type == "cuda" else host

        def own(array: np.ndarray) -> np.ndarray:
            return array if places is None else np.ascontiguousarray(array[:, places])

        # A window inside one document needs no mask, and GPUs have a much faster kernel for that. On CPU there is
        # nothing to gain, and one kernel for all keeps the numbers free of how windows are grouped.
        masked = document_mask and (batch.has_boundaries or device.type == "cpu")
        return MicroBatch(
            tokens=tensor(own(batch.tokens)),
            targets=tensor(own(batch.targets)),
            positions=tensor(own(batch.positions)),
            documents=tensor(batch.documents) if masked else None,  # of whole sequences: a rank's queries see others' keys
            counted=int((own(batch.targets) >= 0).sum()),
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

    def __init__(self, run: Run, plan: Plan, placed: Placed, experts: Mapping[str, int], pipeline: Pipeline | None = None):
        """`experts`: how many each router of the whole model has, by its name."""
        self.placed, self._mesh, self._pipeline = placed, placed.mesh, pipeline
        self._width = run.model.dim
        self._compute, self._clip, self._ahead_weight = plan.compute, run.train.clip, run.model.ahead_weight
        # Losses are divided by the tokens a batch has room for, a constant; masked ones are corrected for in the update,
        # when their number in the whole global batch is known. So no rank waits for a count before its backward.
        self._room = float(run.batch_tokens) * placed.together.size / self._mesh.ranks
        self._routers = {name: router for part in placed.parts for name, router in routers(part).items()}
        self._loads = Loads(experts, {name: router.counts for name, router in self._routers.items()})
        self._recent: deque[Tensor] = deque(maxlen=_RECENT)
        self.before_update: Callable[[], None] = lambda: None
        """Called before anything changes that outlives the step."""
        self.scale = LossScale.of(plan.compute, run.precision.loss_scale)

    @torch.no_grad()
    def measure(self, batch: MicroBatch) -> Tensor:
        """Loss of the next token alone and target tokens of a micro-batch, as sums, in fp64; zeros on ranks that have others say it."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        batch = batch.to(self._mesh.device)

        def take(output: Any) -> None:
            loss = self.placed.loss(output, batch.targets)  # ranks that share logits compute it together
            if self.placed.speaks:
                sums[0], sums[1] = loss.double(), batch.counted

        self.forward(batch, take)
        return sums

    @torch.no_grad()
    def forward(self, batch: MicroBatch, take: Callable[[Any], None]) -> None:
        """What the model predicts of the next token, whole or this rank's part of it, goes to `take` where the last stage is."""
        batch = batch.to(self._mesh.device)
        if self._pipeline is None:
            take(_first(self._forward(0, None, batch)))
        else:
            boundary = self._boundary([batch])
            self._pipeline.evaluate(
                1, lambda part, given, _: self._forward(part, given, batch), lambda output, _: take(_first(output)), boundary
            )

    def losses(self, output: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The sum that is reported, and the one to go backward from, in which tokens further ahead count too where the model
        predicts them."""
        logits, *ahead = output if type(output) is tuple else (output,)
        loss = self.placed.loss(logits, batch.targets)
        return loss, objective(loss, ahead, batch, self._ahead_weight, self.placed.loss)

    def _forward(self, part: int, given: Tensor | None, batch: MicroBatch) -> Any:
        with computing(self._compute, self._mesh.device):
            return self.placed.parts[part](batch.tokens if given is None else given, batch.positions, batch.documents)

    def accumulate(self, batches: Sequence[MicroBatch], stopping: Callable[[], bool]) -> Totals:
        """Gradients of the whole global batch, summed over its micro-batches and ranks, divided by the room for tokens."""
        totals = Totals(self.placed, self._loads)
        self.placed.begin(len(batches), pipelined=self._pipeline is not None)
        self._loads.reset()
        for router in self._routers.values():
            router.loss_scale = self.scale.value / self._room  # what the loss is divided by, the balancing loss is too
        if self._pipeline is not None:
            self._stream(batches, stopping, totals, self._pipeline)
        else:
            self._loop(batches, stopping, totals)
        totals.start()
        self.placed.finish()
        totals.wait()
        return totals

    def _loop(self, batches: Sequence[MicroBatch], stopping: Callable[[], bool], totals: Totals) -> None:
        for index, batch in enumerate(batches):
            if stopping():
                totals.stop()
                if not self.placed.lockstep:
                    break  # the others need nothing of this rank until the gradients are summed
            batch = batch.to(self._mesh.device)
            loss, whole = self.losses(self._forward(0, None, batch), batch)
            totals.add(loss.detach(), batch)
            if index == len(batches) - 1:
                totals.start()  # the ranks' sums travel during the backward
            (whole * (self.scale.value / self._room)).backward()
            self.placed.after_backward()

    def _stream(self, batches: Sequence[MicroBatch], stopping: Callable[[], bool], totals: Totals, pipeline: Pipeline) -> None:
        if stopping():
            totals.stop()
        moved = [batch.to(self._mesh.device) for batch in batches]
        for batch in moved:
            totals.see(batch)

        def loss_of(output: Any, index: int) -> Tensor:
            loss, whole = self.losses(output, moved[index])
            totals.add_loss(loss.detach(), moved[index])
            return whole * (self.scale.value / self._room)

        pipeline.run(
            len(moved),
            lambda part, given, index: self._forward(part, given, moved[index]),
            loss_of,
            self._boundary(moved),
            self.placed.after_backward,
        )

    def _boundary(self, batches: Sequence[MicroBatch]) -> Callable[[int], tuple[Sequence[int], torch.dtype]]:
        """What travels between stages: the residual stream, which is kept in fp32, of which a tensor rank may have a slice."""
        slices = self._mesh.size("tensor") if self._mesh.layout.sequence else 1

        def shape(index: int) -> tuple[Sequence[int], torch.dtype]:
            rows, length = batches[index].tokens.shape
            return (rows, length // slices, self._width), torch.float32

        return shape

    def step(
        self, batches: Sequence[MicroBatch], optimizer: Optimizer, learning_rate: float, stopping: Callable[[], bool]
    ) -> Outcome:
        totals = self.accumulate(batches, stopping)
        counted = totals.own_tokens.clamp(min=1).float()
        norm = self.placed.norm() * (self._room / counted / self.scale.value)
        loss = totals.loss / totals.tokens.clamp(min=1)
        good = self._agreed(torch.isfinite(loss) & torch.isfinite(norm))
        stopped = totals.stopped
        if not stopped:
            # Dividing by this takes the mean over the tokens that counted and clips to the norm, both at once.
            divisor = counted / self._room * self.scale.value * (norm / self._clip).clamp(min=1.0)
            self.before_update()
            optimizer.step(learning_rate, divisor, (~good).float())
            self.placed.engine.updated()
        loads = totals.loads
        if loads and not stopped:
            self._recent.append(torch.cat(list(loads.values())))
        recent = self._loads.split(torch.stack(tuple(self._recent)).sum(0)) if self._recent else {}
        load = [imbalance(recent.values())] if recent else []
        values = torch.stack((loss, totals.tokens, totals.digest, norm.double(), good.double(), *load)).tolist()
        if values[4] and not stopped:
            # Every rank has the same counts, so every copy of a router moves alike.
            for name, router in self._routers.items():
                router.rebalance(loads[name])
        if not stopped:
            self.scale.update(bool(values[4]))
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

    def _agreed(self, good: Tensor) -> Tensor:
        """Replicas that go their own way for some steps have norms of their own, but skip a step together."""
        if self.placed.together.size == self._mesh.ranks:
            return good
        return self._mesh.sum((~good).double()) == 0


def _first(output: Any) -> Any:
    """What was predicted of the next token."""
    return output[0] if type(output) is tuple else output


class Totals:
    """Loss, tokens and experts' loads of the global batch, whether any rank was told to stop, and the ranks' largest memory.

    What several ranks know alike is said by one of them.
    """

    def __init__(self, placed: Placed, loads: Loads | None = None):
        self._placed, self._mesh, self._loads = placed, placed.mesh, loads or Loads({}, {})
        # fp64: the order in which ranks and micro-batches are added does not show, and sums of checksums and counts are exact.
        self._sums = torch.zeros(3 + self._loads.size, dtype=torch.float64, device=self._mesh.device)
        self._flags = torch.zeros(2, dtype=torch.float64)
        self._own = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
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
        return self._own if self._placed.together.size < self._mesh.ranks else self.tokens

    @property
    def digest(self) -> Tensor:
        return self._sums[2]

    @property
    def loads(self) -> dict[str, Tensor]:
        """Tokens of each expert, by the router's name."""
        return self._loads.split(self._sums[3:])

    @property
    def stopped(self) -> bool:
        return bool(self._flags[0].item())

    @property
    def memory(self) -> int:
        return int(self._flags[1].item())

    def add(self, loss: Tensor, batch: MicroBatch) -> None:
        self.add_loss(loss, batch)
        self.see(batch)

    def add_loss(self, loss: Tensor, batch: MicroBatch) -> None:
        if self._placed.speaks:
            self._sums[0] += loss
            self._sums[1] += batch.counted

    def see(self, batch: MicroBatch) -> None:
        if self._mesh.first_of_replica:
            self._sums[2] += batch.digest

    def stop(self) -> None:
        self._flags[0] = 1

    def start(self) -> None:
        """Begin to sum over the ranks; once per step, before the gradients, in the same order on every rank."""
        if self._works is None:
            on_gpu = self._mesh.device.type == "cuda"
            self._loads.put(self._sums[3:])
            self._flags[1] = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
            if self._placed.together.size < self._mesh.ranks:
                self._own = self._placed.together.sum(self._sums[1].clone())
            self._works = [self._mesh.start(self._sums), self._mesh.start(self._flags, dist.ReduceOp.MAX)]

    def wait(self) -> None:
        for work in self._works or []:
            if work is not None:
                work.wait()
