"""The trainer of one rank. Build, restore, step, evaluate and save are separate calls on plain state: a worker drives it through `train()`, an
embedding program may call `step()`, and recovery builds a new trainer on another mesh. Rare concerns attach to `training/hooks`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import nn

from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.data.dataset import Dataset
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import (
    Evaluated,
    Event,
    ModelPlaced,
    Sampled,
    Step,
    StepSkipped,
    WeightsLoaded,
)
from phalanx.observe.comm_timer import COMM_TIMER, span
from phalanx.optim.optimizer import Optimizer, Resources
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.errors import RunError, toml
from phalanx.spec.hub import missing_message
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.build import TrainState, build
from phalanx.training.evaluate import evaluate
from phalanx.training.exports import reference_logits
from phalanx.training.hooks import StepRefused
from phalanx.training.hooks.measurements import StepAccounting, StepTiming
from phalanx.training.hooks.nonfinite import NonFiniteRetry
from phalanx.training.hooks.replica_check import ReplicaCheck
from phalanx.training.hooks.timeline_hook import TimelineHook
from phalanx.training.micro_batch import BatchFeed, MicroBatch, step_seed
from phalanx.training.run_loop import RunLoop
from phalanx.training.run_progress import step_record
from phalanx.training.sample_text import Sampler
from phalanx.training.step import Stepper, make_stepper

_PUBLIC = (
    "close", "evaluate", "events", "finished", "last_record", "model", "on_event", "plan", "progress", "rate_of", "restore", "run", "save", "step",
    "stop",
)  # fmt: skip
"""What a program uses; `dir` shows these names. The others are for the package."""


class Trainer(RunLoop):
    """Trains one rank's part of a run.

        with px.trainer(run) as trainer:
            trainer.restore()  # the newest checkpoint, if there is one
            while not trainer.finished:
                record = trainer.step()
            trainer.save()

    restore, step, evaluate, save   the parts of a training loop
    events                          the whole loop; yields what happens
    stop, finished, close           ends
    model, run, plan, progress      this rank's part of the model, and what it is about
    on_event                        called with every event
    rate_of                         the learning rate of a step
    """

    # Set by `build`.
    state: TrainState
    stepper: Stepper
    sharded: ShardedModel
    optimizer: Optimizer
    model: nn.Module
    """This rank's part of the model; the first, where a pipeline gives the rank several."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        mesh: Mesh,
        checkpoints: Path,
        dataset: Dataset | None = None,
        heartbeat: Heartbeat | None = None,
    ):
        if run.engine.name != "torch":
            raise RunError(
                f'engine.name = {toml(run.engine.name)} has a trainer of its own, for `phalanx train` and `phalanx verify`: set it to "torch" here.'
            )
        super().__init__(run, plan, mesh, checkpoints, dataset, heartbeat)
        self.feed = BatchFeed(run, plan, mesh, self.data)
        self.sampler = Sampler(run, plan, self.data.tokenizer)
        self._timeline = TimelineHook(checkpoints.parent, mesh, run.watch.timeline_steps) if run.watch.timeline else None
        if self._timeline is not None:
            self.hooks.add(self._timeline)

    def __dir__(self) -> list[str]:
        return sorted(_PUBLIC)

    # Build and restore.

    def build(self) -> None:
        """Builds model, optimizer and hooks at step 0, on this rank's device."""
        self.hooks.on_phase("building")
        self.state = state = build(self.run, self.plan, self.mesh, Resources(self.checkpoints.parent / "offload"))
        self.sharded, self.optimizer, self.model = state.sharded, state.optimizer, state.sharded.parts[0]
        self.stepper = make_stepper(self.run, self.plan, state, state.pipeline(self.run))
        self.stepper.hooks = self.hooks
        if self._timeline is not None:
            self._timeline.attach(self.stepper)
        check = ReplicaCheck(self.run.resilience.check_every, state.sharded, lambda: state.frozen() | state.tensors())
        self.checkpointer.equal_step = lambda: check.last_agreed
        self.hooks.add(
            check,
            self.checkpointer,
            StepAccounting(self.run, state),
            StepTiming(self.run, self.plan, state.sharded),
            self.stepper.recent_loads,
            NonFiniteRetry(self.stepper, state.optimizer, lambda: self.progress.skipped_in_a_row),
        )
        COMM_TIMER.watch(self.mesh.device)
        self.is_built = True

    def tensors(self) -> dict[str, StateTensor]:
        """This rank's part of the live state by name: what is saved and restored."""
        return self.state.tensors()

    def placement(self) -> ModelPlaced:
        return self.state.placement()

    def _load_weights(self, *, resumed: bool = False) -> list[Event]:
        """Loads the weights that `model.from` names: into the model and into what is frozen; after a restored checkpoint only into the
        latter."""
        source = self.run.model.from_
        if source is None or self.has_weights or (resumed and not self.state.frozen()):
            return []
        from phalanx.training import initial_weights  # imports file readers that most runs do not need

        if (why := missing_message(source)) is not None:
            raise RunError(f"model.from = {toml(source)}: {why}")
        started = time.perf_counter()
        # A checkpoint holds the trained model, but nothing that is frozen.
        live = [self.state.frozen()] if resumed or self.sharded.adapters is not None else [self.tensors(), self.state.frozen()]
        for model in live:
            tensors = {name.partition("/")[2]: piece for name, piece in model.items() if name.startswith("model/")}
            if tensors:
                initial_weights.load(tensors, self.state.shapes, origin_folder(source), self.run.model)
        if self.state.outer is not None and self.sharded.adapters is None and not resumed:
            self.state.outer.adopt()
        self._adopt_state()
        self.has_weights = True
        return [WeightsLoaded(path=source, seconds=time.perf_counter() - started)]

    def _on_restored(self) -> None:
        self.stepper.scale.restore(self.progress.loss_scale)
        self._adopt_state()

    def _drop_batches(self) -> None:
        self.feed.close()

    def reference_logits(self) -> ReferenceLogits:
        """The logits that an export of the present state must reproduce, on all ranks together."""
        return reference_logits(self.stepper, self.run, self.plan)

    def _adopt_state(self) -> None:
        """Brings every copy of the parameters up to values that the optimizer did not write."""
        self.sharded.engine.updated()
        if self.state.reference is not None:
            self.state.reference.engine.updated()
        self.optimizer.adopt()
        self.hooks.on_state_replaced()

    # Step and evaluate.

    def _take_step(self, number: int) -> Step | StepSkipped | None:
        started = time.perf_counter()
        rate = self.rate_of(self.progress.step)
        self.hooks.before_batch(number)
        with span("loading"):
            batches = self.feed.next(self.progress.samples)
        self.stepper.limits = self.progress.limits(self.run.resilience.spike)
        self.stepper.begin(number, step_seed(self.run.train.seed, self.progress.step, self.mesh.replica))
        attempt = partial(self.stepper.step, batches, self.optimizer, rate, self.stop_signal.requested)
        try:
            outcome = self.hooks.on_outcome(attempt(), batches, attempt)
        except StepRefused:
            self.feed.close()  # the step will read the same batch again
            raise
        if outcome.stopped:
            self.feed.close()
            self.stop_signal.agree(outcome.stopped)
            return None
        self.progress.take(outcome, self.run, self.stepper.scale)
        self.hooks.on_step_taken(self.progress.step, outcome)
        record = partial(step_record, self.progress, outcome, rate, run=self.run, plan=self.plan)
        self.last_record = record(seconds=time.perf_counter() - started)  # the step counts even if a rank is lost below
        self._share_update()
        self.last_record = record(seconds=time.perf_counter() - started)
        return self.last_record

    def _share_update(self) -> None:
        """Exchanges the new parameters after the update: between ranks that shard them, and every few steps between DiLoCo replicas."""
        replicas = self.mesh.size("data") * self.mesh.size("shard")
        with span("data" if replicas > 1 else "other"):
            outer = self.state.outer
            if outer is not None and outer.due(self.progress.step):
                self.stepper.update_incomplete = True
                outer.step()
                self._adopt_state()
                self.stepper.update_incomplete = False
            elif not self.stepper.weights_written:
                self.sharded.engine.updated(stepped=True)

    def evaluate(self) -> Evaluated | None:
        """Mean loss of the first held-out sequences of each source. None: nothing is held out, or a rank was asked to stop."""
        self.hooks.before_evaluate(self.progress.step)
        evaluated = evaluate(self.data.eval, self.stepper, self.feed, self.progress.step, self.stop_signal)
        if evaluated is not None:
            self._tell(evaluated)
        return evaluated

    def sample(self) -> Iterator[Sampled]:
        """Text for each of train.sample_prompts; all ranks call it together. Ends early if a rank was asked to stop."""
        return self.sampler.samples(
            self.stepper, self.progress.step, self.stop_signal, lambda: self.hooks.on_phase("evaluating")
        )

    # Run.

    def _on_train(self, ahead: bool) -> None:
        # A program that is called between two steps may change the weights that the next forward reads.
        alone = self.mesh.ranks == 1 and self.state.outer is None and self.on_event is None
        self.stepper.next_batch = self._next_batch if ahead and alone else None

    def _next_batch(self) -> tuple[MicroBatch, int] | None:
        """Of the step after the one in progress, if it is read already."""
        batches = self.feed.peek() if self.progress.step + 1 < self.run.steps else None
        return (
            None if batches is None else (batches[0], step_seed(self.run.train.seed, self.progress.step + 1, self.mesh.replica))
        )

    def close(self) -> None:
        """Ends threads and closes files. Offloaded optimizer states in files are lost."""
        self.feed.close()
        self.checkpointer.close()
        if self._timeline is not None:
            self._timeline.close()
        if self.is_built:
            self.optimizer.close()
