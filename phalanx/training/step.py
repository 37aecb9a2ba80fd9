"""One optimizer step: forward and backward over the micro-batches, agreement of all ranks, update. Nothing that outlives the step changes
before all ranks have agreed on it: every rank has the same sums and the same gradient norm when it applies or skips the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.models.moe import routers
from phalanx.observe.comm_timer import COMM_TIMER, span
from phalanx.optim.optimizer import Optimizer
from phalanx.parallel.expert import Loads
from phalanx.parallel.pipeline.executor import Pipeline
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.parallel.vocab_parallel import token_losses
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.build import TrainState
from phalanx.training.dpo import pair_losses
from phalanx.training.expert_loads import RecentLoads
from phalanx.training.graphs import Graphs
from phalanx.training.hooks import Hooks, StepContext, StepRefused
from phalanx.training.micro_batch import MicroBatch, objective
from phalanx.training.run_progress import NO_LIMITS
from phalanx.training.step_totals import GOOD, NOT_FINITE, SPIKE, Outcome, StepTotals
from phalanx.transforms.precision import LossScale, computing

StopRequest = Callable[[], int]
"""Returns what this rank was asked to do: 0, PAUSE or STOP."""


T = TypeVar("T")
StepPart = Literal["forward", "loss", "backward", "after_backward", "reduce", "optimizer"]


class StepObserver:
    """Sees the parts of a step. This one does nothing; a rehearsal and a timeline install their own as `Stepper.observer`."""

    def run(self, part: StepPart, function: Callable[..., T], *args: Any, micro_batch: int | None = None) -> T:
        """Runs one part and returns its result. `micro_batch`: its number, in forward and backward of a model without a pipeline."""
        return function(*args)


@dataclass(slots=True)
class Pending:
    """A step whose gradients are complete on this rank.

    If another rank is lost now, this rank can still apply it: the norm is summed over all ranks, so a rank that has the norm knows
    that all ranks have complete gradients.
    """

    totals: StepTotals
    learning_rate: float
    divisor: Tensor | None = None
    """The update divides every gradient by it; None until the norm is known."""
    verdict: Tensor | None = None
    """GOOD, NOT_FINITE or SPIKE; None until all ranks have agreed."""
    read_verdict: Callable[[], float] | None = None
    """The verdict on the host; waits for the device, but not for the update."""


_VERDICT = 4
"""Its place among the results of a step."""


def _outcome(totals: StepTotals, results: Sequence[float], *, is_dpo: bool) -> Outcome:
    loss, tokens, digest, norm, verdict, weight, preferred, reward, *load = results
    return Outcome(
        loss=loss,
        tokens=int(tokens),
        digest=f"{int(digest):x}",
        grad_norm=norm,
        verdict=int(verdict),
        stopped=totals.stopped,
        memory=totals.memory,
        expert_load=load[0] if load else None,
        weight=weight,
        preferred=preferred if is_dpo else None,
        reward=reward if is_dpo else None,
    )


class Stepper:
    """Takes the steps of one rank."""

    def __init__(self, run: Run, plan: Plan, model: ShardedModel, experts: Mapping[str, int], pipeline: Pipeline | None = None):
        """`experts`: number of experts of each router of the whole model, by the router's name."""
        self.sharded, self._mesh, self.pipeline = model, model.mesh, pipeline
        self._accelerator = accelerator.of(self._mesh.device)
        self._compute, self._clip = plan.compute, run.train.clip
        self._mtp_weight, self._dim = run.model.mtp_loss_weight, run.model.dim
        # Losses are divided by the number of tokens that fit in the batch, a constant. The update corrects for masked tokens when
        # their number in the global batch is known, so no rank waits for a count before its backward.
        self._capacity = float(run.batch_tokens) * model.step_group.size / self._mesh.ranks
        self._routers = {name: router for part in model.parts for name, router in routers(part).items()}
        self._loads = Loads(experts, {name: router.counts for name, router in self._routers.items()})
        self.recent_loads = RecentLoads(self._loads, run.steps, self._mesh.device)
        self.hooks, self.observer = Hooks(), StepObserver()
        self.limits = NO_LIMITS
        """Of loss and gradient norm in the step in progress: a step above them is a spike and is skipped."""
        self.scale = LossScale.of(plan.compute, run.precision.loss_scale)
        self._compiles = bool(run.memory.compile)
        self._graphs = Graphs(model.parts[0], self._accelerator, self._loss_of) if model.graphed else None
        self._dpo = run.dpo if run.train.objective == "dpo" else None
        self.reference: Stepper | None = None
        """DPO without adapters: computes the forwards of the reference."""
        self._totals: StepTotals | None = None
        self.next_batch: Callable[[], tuple[MicroBatch, int] | None] | None = None
        """The micro-batch of the next step and its seed, if they are known already. Set by a caller that changes no weights between two steps."""
        self.weights_written = False
        """The step has called `engine.updated` itself."""
        if self._dpo is not None:
            self._context = self._mesh.group("context", use="context")
        self.stages = tuple((0,) if pipeline is None else pipeline.schedule.stages_of(self._mesh.coordinate("pipeline")))
        """Pipeline stages of this rank's parts."""
        self.number = self.seed = 0
        """Of the step in progress."""
        self._began = self._waited = 0.0
        self.pending: Pending | None = None
        """The step that could be applied and may not be applied yet."""
        self.applied: Pending | None = None
        """The last step that was applied or skipped."""
        self.update_incomplete = False
        """An update began and did not end: the state of this rank belongs to no step."""
        self.own_loss = torch.zeros(())
        """This rank's part of the last step's loss."""
        # Where every rank has all gradients, each computes the norm alone. If its bits are wrong, its norm alone is wrong.
        counted = [param.shard for param in model.trained if param.shard.counted]  # none on a stage without adapters
        self._norm_is_local = bool(counted) and all(model.copies(shard) == model.step_group.size for shard in counted)

    def begin(self, number: int, seed: int) -> None:
        """Prepares step `number`; random numbers of its forwards follow from `seed`."""
        self.number, self.seed, self.weights_written = number, seed, False
        if self._graphs is not None:
            self._graphs.begin_step()
        self._began, self._waited = time.perf_counter(), COMM_TIMER.seconds
        self._accelerator.seed(seed)

    def step(
        self, batches: Sequence[MicroBatch], optimizer: Optimizer, learning_rate: float, stop_request: StopRequest
    ) -> Outcome:
        """Computes the gradient of the global batch and applies it, or skips the step, on all ranks alike."""
        self.pending = None
        context = StepContext(self.number, self.sharded, optimizer, partial(self.repeat, batches))
        with span("optimizer"), self.hooks.around_compute(self.number):
            self.hooks.before_forward(context)
            totals = self.accumulate(batches, stop_request)
            pending = Pending(totals, learning_rate)
            if not totals.stopped:
                self.hooks.after_backward(context)
                self.pending = pending
                self.recent_loads.add(totals.loads)
            norm, pending.divisor = self._norm_and_divisor(totals)
            loss = totals.loss / totals.weight.clamp(min=1)
            verdict = self._judge(loss, norm)
            # On its way before the update is launched: the host prepares the next step while the device still updates.
            results = self._results(totals, loss, norm, verdict)
            if not totals.stopped:
                context.finite, pending.verdict = verdict != NOT_FINITE, verdict
                pending.read_verdict = lambda: results()[_VERDICT]
                with span("other"):
                    self._before_update(context)
                self._apply(pending, optimizer)
            self.own_loss = totals.own_loss
            return _outcome(totals, results(), is_dpo=self._dpo is not None)

    def accumulate(self, batches: Sequence[MicroBatch], stop_request: StopRequest) -> StepTotals:
        """Gradients of the global batch, summed over micro-batches and ranks and divided by its capacity in tokens."""
        with span("compute"):
            self._totals = totals = StepTotals(self.sharded, self._loads)
            self.sharded.engine.begin(len(batches), pipelined=self.pipeline is not None)
            self._loads.reset()
            for router in self._routers.values():
                router.loss_scale = self.scale.value / self._capacity  # the balancing loss is divided as the loss is
            if self.pipeline is not None:
                self._run_pipeline(batches, stop_request, totals, self.pipeline)
            else:
                self._run_micro_batches(batches, stop_request, totals)
            self.hooks.before_reduce(self.number, time.perf_counter() - self._began - (COMM_TIMER.seconds - self._waited))
            totals.start()
            self.observer.run("reduce", self.sharded.finish)
            totals.wait()
            return totals

    def _run_micro_batches(self, batches: Sequence[MicroBatch], stop_request: StopRequest, totals: StepTotals) -> None:
        for index, batch in enumerate(batches):
            if request := stop_request():
                totals.stop(request)
                if not self.sharded.lockstep:
                    break  # the other ranks need nothing of this one until the gradients are summed
            batch, loss, whole = self.observer.run("forward", self._micro_batch_losses, batch, micro_batch=index)
            totals.add(loss.detach(), batch)
            if index == len(batches) - 1:
                totals.start()  # the ranks' sums overlap with the last backward
            scaled = whole * (self.scale.value / self._capacity)
            self.observer.run("backward", scaled.backward, micro_batch=index)
            self._after_backward()

    def _run_pipeline(
        self, batches: Sequence[MicroBatch], stop_request: StopRequest, totals: StepTotals, pipeline: Pipeline
    ) -> None:
        if request := stop_request():
            totals.stop(request)
        moved = [self._with_reference(batch.to(self._mesh.device)) for batch in batches]
        for batch in moved:
            totals.add_digest(batch)

        def loss_of(output: Any, index: int) -> Tensor:
            loss, whole = self.losses(output, moved[index])
            totals.add_loss(loss.detach(), moved[index])
            return whole * (self.scale.value / self._capacity)

        pipeline.run(
            len(moved),
            lambda part, given, index: self._forward(part, given, moved[index]),
            loss_of,
            partial(self._stage_shape, moved),
            self._after_backward,
        )

    def _after_backward(self, part: int | None = None) -> None:
        self.observer.run("after_backward", self.sharded.engine.after_backward, part)

    def _micro_batch_losses(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor, Tensor]:
        """The micro-batch on the device, its reported loss, and that of the backward."""
        ahead = None if self._graphs is None else self._graphs.take_ahead(batch)
        moved, loss = ahead or (self._with_reference(batch.to(self._mesh.device)), None)
        if loss is None and self._graphs is not None:
            loss = self._graphs.loss(moved)
        if loss is None:
            return moved, *self.losses(self._forward(0, None, moved), moved)
        self.hooks.on_loss(loss)
        return moved, loss, loss

    def _loss_of(self, batch: MicroBatch) -> Tensor:
        """As a graph records it: without what happens on the host."""
        loss: Tensor = self.sharded.loss(self._forward(0, None, batch), batch.targets)
        return loss

    def losses(self, output: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The reported loss, and the loss of the backward, which includes multi-token prediction where the model has it. Both are sums."""
        if self._dpo is not None:
            loss, whole = self._pair_losses(output, batch, self._totals)
            self.hooks.on_loss(loss)
            return loss, whole
        logits, *further = output if type(output) is tuple else (output,)
        loss_of = partial(self.observer.run, "loss", self.sharded.loss)
        loss = loss_of(logits, batch.targets)
        self.hooks.on_loss(loss)
        return loss, objective(loss, further, batch, self._mtp_weight, loss_of)

    def _pair_losses(self, output: Any, batch: MicroBatch, totals: StepTotals | None) -> tuple[Tensor, Tensor]:
        """DPO: the reported loss and that of the backward. Ranks that share windows compute the same loss, and each reports its part of it."""
        pairs, dpo = batch.pairs, self._dpo
        assert pairs is not None and dpo is not None
        of_pairs = self.observer.run("loss", lambda: pair_losses(self._margins(output, batch), pairs, dpo))
        parts = self._context.size
        if totals is not None:
            totals.add_pairs(of_pairs.preferred / parts, of_pairs.reward / parts)
        return of_pairs.loss / parts, of_pairs.loss

    def _margins(self, output: Any, batch: MicroBatch) -> Tensor:
        assert batch.pairs is not None
        logits = output[0] if type(output) is tuple else output
        losses_BS = token_losses(self.sharded.loss, logits, batch.targets)
        return self._context.reduce_from_region(batch.pairs.margins(losses_BS))

    def _with_reference(self, batch: MicroBatch) -> MicroBatch:
        """DPO: with the margins of the reference, which is the frozen model below the adapters, or a model of its own. All ranks call it."""
        if batch.pairs is None:
            return batch
        margins: list[Tensor] = []
        adapters = self.sharded.adapters
        with nullcontext() if adapters is None else adapters.off():
            stepper = self if self.reference is None else self.reference
            stepper.forward(batch, lambda output: margins.append(stepper._margins(output, batch)))
        if self.reference is not None:
            self.reference.sharded.engine.updated(stepped=True)  # frees parameters that its forward has gathered
        return replace(batch, pairs=replace(batch.pairs, reference_BP=margins[0])) if margins else batch

    def _forward(self, part: int, given: Tensor | None, batch: MicroBatch) -> Any:
        if self.sharded.adapters is not None and self.sharded.adapters.dropout is not None:
            self.sharded.adapters.dropout.keys = batch.mask_keys
        # Recorded conversions of weights would not be repeated by a graph that finds them in a cache.
        with computing(self._compute, self._mesh.device, cache=self._graphs is None):
            module, first = self.sharded.parts[part], batch.tokens if given is None else given
            further = {"spans": batch.spans} if batch.spans is not None and getattr(module, "takes_spans", False) else {}
            return module(first, batch.positions, batch.documents, **further)

    def _stage_shape(self, batches: Sequence[MicroBatch], index: int) -> tuple[Sequence[int], torch.dtype]:
        """Shape and dtype of a micro-batch's residual stream between stages; with sequence parallelism a rank has a slice of it."""
        rows, length = batches[index].tokens.shape
        slices = self._mesh.size("tensor") if self._mesh.layout.sequence else 1
        return (rows, length // slices, self._dim), self.sharded.residual

    def _norm_and_divisor(self, totals: StepTotals) -> tuple[Tensor, Tensor]:
        """Norm of the mean gradient, and what the update divides the accumulated gradient g by.

        The backward accumulates       g = loss_scale / capacity · Σ gradient(token)
        The mean over counted tokens   m = g · capacity / (tokens · loss_scale)
        (With preferences, read pairs for tokens.)
        Its norm is                 norm = |g| · capacity / tokens / loss_scale
        Clipping divides m by       clip = max(1, norm / train.clip)
        So the update is         m / clip = g / divisor, with divisor = tokens / capacity · loss_scale · clip
        """
        tokens = totals.own_weight.clamp(min=1).float()
        norm = self.sharded.norm() * (self._capacity / tokens / self.scale.value)
        clip = (norm / self._clip).clamp(min=1.0)
        return norm, tokens / self._capacity * self.scale.value * clip

    def _judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """GOOD, NOT_FINITE or SPIKE: on the device, the same on all ranks."""
        finite = self.agree(torch.isfinite(loss) & torch.isfinite(norm))
        within = torch.ones_like(finite)
        if self.limits != NO_LIMITS:
            within = self.agree(~self.limits.exceeded(loss, None if self.sharded.is_local_sgd else norm))
        return torch.where(finite, torch.where(within, GOOD, SPIKE), NOT_FINITE).float()

    def agree(self, good: Tensor) -> Tensor:
        """True on all ranks if it is true on all ranks.

        Only where ranks can differ: replicas of local SGD have norms of their own but skip a step together, and a rank whose copy of
        the gradient is damaged must not decide alone.
        """
        if self._mesh.ranks == 1 or not (self._norm_is_local or self.sharded.is_local_sgd):
            return good
        return self._mesh.all_reduce((~good).double()) == 0

    def _before_update(self, context: StepContext) -> None:
        try:
            self.hooks.before_update(context)
        except StepRefused:
            self.pending = None
            raise

    def _apply(self, pending: Pending, optimizer: Optimizer) -> None:
        """Changes everything that outlives the step. If it is interrupted, `update_incomplete` remains set.

        Waits for no other rank, except in optimizers and states that several ranks keep together.
        """
        assert pending.divisor is not None and pending.verdict is not None and pending.read_verdict is not None
        self.update_incomplete = True
        self.hooks.on_update(self.number)
        skip = (pending.verdict != GOOD).float()
        self.observer.run("optimizer", optimizer.step, pending.learning_rate, pending.divisor, skip)
        if self._graphs is not None and self.next_batch is not None and self.hooks.all_allow_ahead:
            self._launch_ahead(self._graphs, self.next_batch())
        verdict, loads = int(pending.read_verdict()), pending.totals.loads
        if verdict == GOOD:
            # Every rank has the same counts, so all copies of a router change alike. Those below LoRA adapters are frozen.
            for name, router in self._routers.items() if self.sharded.adapters is None else ():
                router.rebalance(loads[name])
        if verdict != SPIKE:
            self.scale.update(verdict == GOOD)
        self.hooks.after_update(self.number)
        self.pending, self.applied, self.update_incomplete = None, pending, False

    def _launch_ahead(self, graphs: Graphs, following: tuple[MicroBatch, int] | None) -> None:
        """Launches the forward of the next step before the host waits for the results of this one."""
        self.sharded.engine.updated(stepped=True)
        self.weights_written = True
        if following is not None:
            batch, seed = following
            self._accelerator.seed(seed)
            self.observer.run("forward", graphs.launch_ahead, batch, self._mesh.device, micro_batch=0)

    def _results(self, totals: StepTotals, loss: Tensor, norm: Tensor, verdict: Tensor) -> Callable[[], list[float]]:
        """Starts to copy the results of the step to the host; returns what waits for them."""
        load = self.recent_loads.fullest(self.number)
        pairs = (sum_ / totals.weight.clamp(min=1) for sum_ in (totals.preferred, totals.reward))
        agreed = (loss, totals.tokens, totals.digest, norm.double(), verdict.double(), totals.weight)
        values = torch.stack((*agreed, *pairs, *load))
        read = self._accelerator.copy_to_host(values)
        return lambda: read().tolist()

    def repeat(self, batches: Sequence[MicroBatch]) -> None:
        """Computes the gradients of this step again; all ranks call it together."""
        self.begin(self.number, self.seed)
        self.accumulate(batches, lambda: 0)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Blocks run as they are written, without graphs: for forwards of another length, or with hooks."""
        with ExitStack() as stack:
            if self._compiles:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self._graphs is not None:
                self._graphs.pause()
                stack.callback(self._graphs.resume)
            yield

    def roll_forward(self, optimizer: Optimizer, divisor: float, verdict: float) -> bool:
        """Applies the pending step as another rank did before it was lost or cut off; returns whether the step was good."""
        assert self.pending is not None
        self.hooks.on_roll_forward()
        if self.pending.divisor is None:
            self.pending.divisor = torch.tensor(divisor, dtype=torch.float32, device=self._mesh.device)
        self.pending.verdict = torch.tensor(verdict, dtype=torch.float32, device=self._mesh.device)
        self.pending.read_verdict = lambda: verdict
        self.hooks.before_update(StepContext(self.number, self.sharded, optimizer, lambda: None))
        self._apply(self.pending, optimizer)
        return not verdict

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forwards change nothing; a custom model may have dropout."""
        for part in self.sharded.parts:
            part.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part in self.sharded.parts:
                part.train()

    @torch.no_grad()
    def forward(self, batch: MicroBatch, take: Callable[[Any], None]) -> None:
        """Runs the model; `take` gets the next-token logits, or this rank's part of them, on ranks of the last stage."""
        batch = batch.to(self._mesh.device)

        def take_next(output: Any) -> None:
            take(output[0] if type(output) is tuple else output)  # without predictions of tokens further ahead

        if self.pipeline is None:
            take_next(self._forward(0, None, batch))
            return
        self.pipeline.evaluate(
            lambda part, given, _: self._forward(part, given, batch), take_next, partial(self._stage_shape, [batch])
        )

    @torch.no_grad()
    def measure(self, batch: MicroBatch) -> Tensor:
        """Returns (loss_sum, weight) in fp64, where the weight is the number of targets, or of pairs of preferences; zeros on ranks that do
        not report the loss."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        batch = self._with_reference(batch.to(self._mesh.device))

        def take(output: Any) -> None:
            # Ranks that share logits compute it together.
            loss = self.sharded.loss(output, batch.targets) if self._dpo is None else self._pair_losses(output, batch, None)[0]
            if self.sharded.reports_loss:
                sums[0], sums[1] = loss.double(), batch.weight

        self.forward(batch, take)
        return sums


def make_stepper(run: Run, plan: Plan, state: TrainState, pipeline: Pipeline | None) -> Stepper:
    """The stepper of a rank, with that of the reference, if it has one; all ranks make theirs at the same time. `pipeline`: that of the
    trained model."""
    stepper = Stepper(run, plan, state.sharded, state.experts, pipeline)
    if (reference := state.reference) is not None:
        stepper.reference = Stepper(run, plan, reference, {}, state.pipeline(run, reference))
    return stepper
