"""One optimizer step: forward and backward over the micro-batches, the ranks' agreement, the update. Called by the trainer.

Nothing that outlives the step changes before all ranks know that it is good: the same sums and the same gradient norm
stand on every rank when the update is made or refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.models.moe import routers
from phalanx.observe.comm_timer import WAITED
from phalanx.optim.optimizer import Optimizer
from phalanx.parallel.expert import Loads, imbalance
from phalanx.parallel.pipeline.executor import Pipeline
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.hooks import rank_faults, spikes
from phalanx.training.hooks.replica_check import Agreement, Corruption
from phalanx.training.loss import objective
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step_totals import Totals
from phalanx.transforms.precision import LossScale, computing

if TYPE_CHECKING:
    from phalanx.training.hooks.nonfinite_trace import Watch

GOOD, NOT_FINITE, SPIKE = 0, 1, 2
"""What becomes of a step: it is applied, or refused for one of two reasons."""

_RECENT = 20
"""Steps over which the load of experts is reported: that of one small batch is mostly chance."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks agree on about a step."""

    loss: float
    tokens: int
    digest: str
    grad_norm: float
    good: bool
    """Loss and gradient are finite and nothing unusual: the update was made."""
    stopped: int
    """Some rank was told to PAUSE or STOP before the step was complete: nothing was changed, the step is to be taken again."""
    memory: int
    expert_load: float | None = None
    """Load of the fullest expert over the mean, in the worst layer; None where there are no experts."""
    spike: bool = False
    """It was refused as loss or gradient were far above the usual."""

    @property
    def not_finite(self) -> bool:
        """It was refused as loss or gradient were no numbers."""
        return not (self.good or self.spike or self.stopped)


@dataclass(slots=True)
class Pending:
    """A step whose gradients are complete on this rank. Should another rank be lost now, it can still be applied: the norm is summed
    over all ranks, so whoever has it, and goes on to the update, knows that every rank has come this far."""

    totals: Totals
    learning_rate: float
    divisor: Tensor | None = None
    """What gradients are divided by; None until the norm is known."""
    bad: Tensor | None = None
    """GOOD, or why the step is to be skipped; None until all have agreed."""


class Stepper:
    """The parts of a step that stay the same from one to the next."""

    def __init__(
        self, run: Run, plan: Plan, placed: ShardedModel, experts: Mapping[str, int], pipeline: Pipeline | None = None
    ):
        """`experts`: how many each router of the whole model has, by its name."""
        self.sharded, self._mesh, self._pipeline = placed, placed.mesh, pipeline
        self._width = run.model.dim
        self._compute, self._clip, self._ahead_weight = plan.compute, run.train.clip, run.model.mtp_loss_weight
        # Losses are divided by the tokens a batch has room for, a constant; masked ones are corrected for in the update,
        # when their number in the whole global batch is known. So no rank waits for a count before its backward.
        self._room = float(run.batch_tokens) * placed.step_group.size / self._mesh.ranks
        self._routers = {name: router for part in placed.parts for name, router in routers(part).items()}
        self._loads = Loads(experts, {name: router.counts for name, router in self._routers.items()})
        self._recent: deque[Tensor] = deque(maxlen=_RECENT)
        self.before_update: Callable[[], None] = lambda: None
        """Called before anything changes that outlives the step."""
        self.updating: Callable[[], None] = lambda: None
        """Called when that begins, and nothing may interrupt it."""
        self.pending: Pending | None = None
        """The step that could be applied and is not yet known to be."""
        self.applied: Pending | None = None
        """The last that was."""
        self.torn = False
        """An update was begun and not completed: this rank's state is of no step."""
        self.scale = LossScale.of(plan.compute, run.precision.loss_scale)
        self.number = self.seed = 0
        """Of the step that is being taken."""
        self.compiles = run.memory.compile
        self._began = self._waited = 0.0
        self.limits = spikes.NONE
        """What its loss and gradient norm may not exceed."""
        self.faults = rank_faults.NONE
        self.agreement: Agreement | None = None
        """Compares replicas now and then."""
        self.watch: Watch | None = None
        """Sees every loss while a step is traced."""
        self.own_loss = torch.zeros(())
        """This rank's part of the last step's."""
        self.stages = tuple((0,) if pipeline is None else pipeline.schedule.stages_of(self._mesh.coordinate("pipeline")))
        """Of the pipeline, that this rank's parts are."""
        # Where every rank has all gradients, it takes the norm by itself; should its bits be wrong, then so is its norm alone.
        self._alone = all(placed.copies(one.shard) == placed.step_group.size for one in placed.owned if one.shard.counted)

    @torch.no_grad()
    def measure(self, batch: MicroBatch) -> Tensor:
        """Loss of the next token alone and target tokens of a micro-batch, as sums, in fp64; zeros on ranks that have others say it."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        batch = batch.to(self._mesh.device)

        def take(output: Any) -> None:
            loss = self.sharded.loss(output, batch.targets)  # ranks that share logits compute it together
            if self.sharded.reports_loss:
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
        loss = self.sharded.loss(logits, batch.targets)
        if self.watch is not None:
            self.watch.loss(loss)
        return loss, objective(loss, ahead, batch, self._ahead_weight, self.sharded.loss)

    def _forward(self, part: int, given: Tensor | None, batch: MicroBatch) -> Any:
        with computing(self._compute, self._mesh.device):
            return self.sharded.parts[part](batch.tokens if given is None else given, batch.positions, batch.documents)

    def accumulate(self, batches: Sequence[MicroBatch], stopping: Callable[[], int]) -> Totals:
        """Gradients of the whole global batch, summed over its micro-batches and ranks, divided by the room for tokens."""
        totals = Totals(self.sharded, self._loads)
        self.sharded.begin(len(batches), pipelined=self._pipeline is not None)
        self._loads.reset()
        for router in self._routers.values():
            router.loss_scale = self.scale.value / self._room  # what the loss is divided by, the balancing loss is too
        if self._pipeline is not None:
            self._stream(batches, stopping, totals, self._pipeline)
        else:
            self._loop(batches, stopping, totals)
        self.faults.at("collective", self.number)
        self.faults.drag(self.number, time.perf_counter() - self._began - (WAITED.seconds - self._waited))
        totals.start()
        self.sharded.finish()
        totals.wait()
        return totals

    def _loop(self, batches: Sequence[MicroBatch], stopping: Callable[[], int], totals: Totals) -> None:
        for index, batch in enumerate(batches):
            if told := stopping():
                totals.stop(told)
                if not self.sharded.lockstep:
                    break  # the others need nothing of this rank until the gradients are summed
            batch = batch.to(self._mesh.device)
            loss, whole = self.losses(self._forward(0, None, batch), batch)
            totals.add(loss.detach(), batch)
            if index == len(batches) - 1:
                totals.start()  # the ranks' sums travel during the backward
            (whole * (self.scale.value / self._room)).backward()
            self.sharded.after_backward()

    def _stream(self, batches: Sequence[MicroBatch], stopping: Callable[[], int], totals: Totals, pipeline: Pipeline) -> None:
        if told := stopping():
            totals.stop(told)
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
            self.sharded.after_backward,
        )

    def _boundary(self, batches: Sequence[MicroBatch]) -> Callable[[int], tuple[Sequence[int], torch.dtype]]:
        """What travels between stages: the residual stream, which is kept in fp32, of which a tensor rank may have a slice."""
        slices = self._mesh.size("tensor") if self._mesh.layout.sequence else 1

        def shape(index: int) -> tuple[Sequence[int], torch.dtype]:
            rows, length = batches[index].tokens.shape
            return (rows, length // slices, self._width), torch.float32

        return shape

    def begin(self, number: int, seed: int) -> None:
        """The step of this number follows; random numbers of its forwards are drawn from `seed`."""
        self.number, self.seed = number, seed
        self._began, self._waited = time.perf_counter(), WAITED.seconds
        torch.manual_seed(seed)

    def step(
        self, batches: Sequence[MicroBatch], optimizer: Optimizer, learning_rate: float, stopping: Callable[[], int]
    ) -> Outcome:
        self.pending = None
        self.faults.at("compute", self.number)
        self.faults.weights(self.number, self.sharded.owned)
        self.faults.optimizer(self.number, optimizer.state)
        totals = self.accumulate(batches, stopping)
        stopped = totals.stopped
        pending = Pending(totals, learning_rate)
        if not stopped:
            self.faults.gradients(self.number, self.sharded.owned)
            self.pending = pending
        counted = totals.own_tokens.clamp(min=1).float()
        norm = self.sharded.norm() * (self._room / counted / self.scale.value)
        loss = totals.loss / totals.tokens.clamp(min=1)
        # Dividing by this takes the mean over the tokens that counted and clips to the norm, both at once.
        pending.divisor = counted / self._room * self.scale.value * (norm / self._clip).clamp(min=1.0)
        finite, spike = self._judged(loss, norm)
        if not stopped:
            self._compare(finite, lambda: self.repeat(batches))
            pending.bad = torch.where(finite, torch.where(spike, SPIKE, GOOD), NOT_FINITE).float()
            self.before_update()
            self._apply(pending, optimizer)
        self.own_loss = totals.own_loss
        recent = self._loads.split(torch.stack(tuple(self._recent)).sum(0)) if self._recent else {}
        load = [imbalance(recent.values())] if recent else []
        judged = (finite.double(), spike.double())
        values = torch.stack((loss, totals.tokens, totals.digest, norm.double(), *judged, *load)).tolist()
        return Outcome(
            loss=values[0],
            tokens=int(values[1]),
            digest=f"{int(values[2]):x}",
            grad_norm=values[3],
            good=bool(values[4]) and not values[5],
            stopped=stopped,
            memory=totals.memory,
            expert_load=values[6] if load else None,
            spike=bool(values[4]) and bool(values[5]),
        )

    def _judged(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the step is finite, and whether it is a spike; the same on all ranks, and unknown to the host."""
        finite = self._agreed(torch.isfinite(loss) & torch.isfinite(norm))
        if not self.limits.any:
            return finite, torch.zeros_like(finite)
        return finite, ~self._agreed(~self.limits.exceeded(loss, None if self.sharded.is_local_sgd else norm))

    def _compare(self, finite: Tensor, again: Callable[[], object]) -> None:
        """With what the other ranks hold, if that is due. Nothing is left pending where it differs."""
        if self.agreement is None:
            return
        try:
            self.agreement.compare(self.number, finite, again)
        except Corruption:
            self.pending = None
            raise

    def repeat(self, batches: Sequence[MicroBatch]) -> None:
        """The forwards and backwards of this step once more, all ranks together."""
        self.begin(self.number, self.seed)
        self.accumulate(batches, lambda: 0)

    def _apply(self, pending: Pending, optimizer: Optimizer) -> None:
        """Change what outlives the step: all of it or, if this is interrupted, nothing that could be used. No rank is waited for,
        but by Muon and by states that several ranks keep together."""
        assert pending.divisor is not None and pending.bad is not None
        self.torn = True
        self.updating()
        self.faults.at("update", self.number)
        optimizer.step(pending.learning_rate, pending.divisor, (pending.bad != GOOD).float())
        verdict = int(pending.bad.item())
        good = verdict == GOOD
        loads = pending.totals.loads
        if loads:
            self._recent.append(torch.cat(list(loads.values())))
        if good:
            # Every rank has the same counts, so every copy of a router moves alike.
            for name, router in self._routers.items():
                router.rebalance(loads[name])
        if verdict != SPIKE:
            self.scale.update(good)
        if self.agreement is not None:
            self.agreement.updated(self.number)
        self.pending, self.applied, self.torn = None, pending, False

    def roll_forward(self, optimizer: Optimizer, divisor: float, bad: float) -> bool:
        """Apply the pending step as another rank has done, which then was lost or cut off; returns whether it was good."""
        assert self.pending is not None
        self.faults, self.agreement = rank_faults.NONE, None  # whoever was watched or struck, was so before
        if self.pending.divisor is None:
            self.pending.divisor = torch.tensor(divisor, dtype=torch.float32, device=self._mesh.device)
        self.pending.bad = torch.tensor(bad, dtype=torch.float32, device=self._mesh.device)
        self.before_update()
        self._apply(self.pending, optimizer)
        return not bad

    def _agreed(self, good: Tensor) -> Tensor:
        """The same on all ranks: replicas that go their own way for some steps have norms of their own, but skip a step together, and
        a rank whose copy of the gradient is damaged must not go its own way."""
        if self._mesh.ranks == 1 or not (self._alone or self.sharded.is_local_sgd):
            return good
        return self._mesh.all_reduce((~good).double()) == 0


def _first(output: Any) -> Any:
    """What was predicted of the next token."""
    return output[0] if type(output) is tuple else output
