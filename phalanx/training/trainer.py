"""The trainer of one rank. Build, restore, step, evaluate and save are separate calls on plain state, so it can be entered halfway.

A worker drives it through `train()`; an embedding program may call `step()` in its own loop; recovery builds a new trainer on another
mesh, in the same process, and goes on. Rare concerns attach to `training/hooks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from torch import nn

from phalanx.checkpointing.location import Location
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import Evaluated, Event, ModelPlaced, Saved, SaveFailed, Step, StepSkipped, WeightsLoaded
from phalanx.observe.comm_timer import COMM_TIMER, span
from phalanx.optim.optimizer import Optimizer, learning_rate
from phalanx.optim.param_optimizer import Resources
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.errors import RunFailed
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training import loop
from phalanx.training.build import TrainState, build
from phalanx.training.evaluate import EvalSize, EvaluationStopped, evaluate
from phalanx.training.exports import reference_logits
from phalanx.training.hooks import Hooks, StepRefused
from phalanx.training.hooks.measurements import HeartbeatHook, StepAccounting, StepTiming
from phalanx.training.hooks.nonfinite import NonFiniteRetry
from phalanx.training.hooks.replica_check import ReplicaCheck
from phalanx.training.hooks.spikes import SpikeGuard
from phalanx.training.micro_batch import BatchFeed, step_seed
from phalanx.training.run_progress import Progress, step_record
from phalanx.training.saving import Checkpointer
from phalanx.training.step import Stepper
from phalanx.training.step_totals import StopSignal


class Trainer:
    """Trains one rank's part of a run."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        mesh: Mesh,
        checkpoints: Path,
        dataset: Dataset | None = None,
        heartbeat: Heartbeat | None = None,
    ):
        self.run, self.plan, self.mesh, self.checkpoints = run, plan, mesh, checkpoints
        self.data = dataset or open_dataset(run.data, run.train.sequence_length, run.train.seed)
        self.progress = Progress()
        self.heartbeat = heartbeat or Heartbeat()
        self.stop_signal = StopSignal()
        self.checkpointer = Checkpointer(run, plan, mesh, checkpoints, self.data)
        self.feed = BatchFeed(run, plan, mesh, self.data)
        self.hooks = Hooks([HeartbeatHook(self.heartbeat)])
        self.last_record: Step | StepSkipped | None = None
        """The record of the last step, on every rank."""
        self.ready = False
        """The state is complete: initialized, loaded or restored."""
        self._built: tuple[TrainState, Stepper] | None = None
        self._loaded_weights = False

    # Build and restore.

    def build(self) -> None:
        """Builds model, optimizer and hooks at step 0, on this rank's device."""
        self.hooks.on_phase("building")
        state = build(self.run, self.plan, self.mesh, Resources(self.checkpoints.parent / "offload"))
        stepper = Stepper(self.run, self.plan, state.sharded, state.experts, state.pipeline(self.run))
        compiled = self.run.memory.compile
        self.hooks.add(
            ReplicaCheck(self.run.resilience.check_every, state.sharded, state.tensors),
            SpikeGuard(lambda: self.progress.limits(self.run.resilience.spike)),
            self.checkpointer,
            StepAccounting(state.placement, state.tensors, enabled=not compiled),
            StepTiming(self.plan, compiled=compiled),
            NonFiniteRetry(stepper, state.optimizer, lambda: self.progress.skipped_in_a_row),
        )
        self.hooks.on_build(state.sharded)
        stepper.hooks = self.hooks
        COMM_TIMER.watch(self.mesh.device)
        self._built = state, stepper

    @property
    def is_built(self) -> bool:
        return self._built is not None

    @property
    def state(self) -> TrainState:
        assert self._built is not None, "call build() first"
        return self._built[0]

    @property
    def stepper(self) -> Stepper:
        assert self._built is not None, "call build() first"
        return self._built[1]

    @property
    def sharded(self) -> ShardedModel:
        return self.state.sharded

    @property
    def optimizer(self) -> Optimizer:
        return self.state.optimizer

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model; the first, where a pipeline gives the rank several."""
        return self.sharded.parts[0]

    def tensors(self) -> dict[str, StateTensor]:
        """This rank's part of the live state by name: what is saved and restored."""
        return self.state.tensors()

    def placement(self) -> ModelPlaced:
        """What this rank holds, read from its tensors."""
        return self.state.placement()

    def load_initial_weights(self) -> list[Event]:
        """Loads the weights that `model.from` names, if any: once, before the first step."""
        source = self.run.model.from_
        if source is None or self._loaded_weights or self.progress.step:
            return []
        from phalanx.training import initial_weights  # imports file readers that most runs do not need

        started = time.perf_counter()
        tensors = {name.partition("/")[2]: piece for name, piece in self.tensors().items() if name.startswith("model/")}
        initial_weights.load(tensors, self.state.shapes, origin_folder(source))
        if self.state.outer is not None:
            self.state.outer.adopt()
        self._adopt_state()
        self._loaded_weights = True
        return [WeightsLoaded(path=source, seconds=time.perf_counter() - started)]

    def restore(self, path: Path | Location | None = None) -> list[Event]:
        """Restores `path` or the newest valid checkpoint; without one, loads the initial weights. Returns what it found."""
        self.hooks.on_phase("restoring")
        progress, events = self.checkpointer.restore(self.tensors(), path)
        if progress is None:
            loaded = self.load_initial_weights()
            self.ready = True
            return [*events, *loaded]
        self.progress = progress
        self.stepper.scale.restore(self.progress.loss_scale)
        self._adopt_state()
        self.ready = True
        self.feed.close()
        if self.checkpointer.lacks_export():
            self._record_reference()
            self.checkpointer.export_restored()
        return events

    def _adopt_state(self) -> None:
        """Brings every copy of the parameters up to values that the optimizer did not write."""
        self.sharded.engine.updated()
        self.optimizer.adopt()
        self.hooks.on_state_replaced()

    # Step and evaluate.

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.run.steps

    def step(self) -> Step | StepSkipped | None:
        """Takes one step. None: a rank was asked to stop, and nothing has changed. Raises `StepRefused` if a hook refuses the step."""
        number = self.progress.step + 1
        with self.hooks.around_step(number):
            record = self._step(number)
        if record is not None:
            self.hooks.on_step_end(record)
        return record

    def _step(self, number: int) -> Step | StepSkipped | None:
        started = time.perf_counter()
        rate = learning_rate(self.run.optimizer, self.progress.step, self.run.steps)
        self.hooks.before_batch(number)
        with span("loading"):
            batches = self.feed.next(self.progress.samples)
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
            else:
                self.sharded.engine.updated()

    def evaluate(self) -> Evaluated | None:
        """Mean loss of the first held-out sequences of each source. None: nothing is held out, or a rank was asked to stop."""
        self.hooks.before_evaluate(self.progress.step)
        try:
            size = EvalSize(self.run.train.eval_sequences, self.plan.micro_batch)
            requested = self.stop_signal.requested
            return evaluate(self.data.eval, self.stepper, self.feed.prepare, size, self.progress.step, requested)
        except EvaluationStopped as stopped:
            self.stop_signal.agree(stopped.request)
            return None

    def take_measurement(self) -> Event | None:
        """What a hook measured in an early step on this rank: traffic and memory, or time by part. Returned once."""
        return self.hooks.take_measurement()

    # Save.

    def save(self) -> Saved:
        """Writes a checkpoint and waits until it is complete; all ranks call it together. Raises RunFailed if it cannot be written."""
        (*_, saved) = self.save_now()
        assert isinstance(saved, Saved)
        return saved

    def save_now(self) -> Iterator[Event]:
        """As `save`; yields the events of earlier saves too."""
        self._before_save()
        for event in self.checkpointer.save(self.progress, self.tensors(), wait=True):
            yield event
            if isinstance(event, SaveFailed) and event.step == self.progress.step:
                raise RunFailed(f"Step {event.step} could not be saved: {event.reason}.")

    def start_save(self) -> Iterator[Event]:
        """Starts to write a checkpoint in the background; yields the events of earlier saves."""
        self._before_save()
        yield from self.checkpointer.save(self.progress, self.tensors(), wait=False)

    def _before_save(self) -> None:
        self.hooks.before_save(self.progress.step)
        self._record_reference()

    def _record_reference(self) -> None:
        """Computes the reference logits that an export of the next checkpoint is compared with; all ranks together."""
        if self.run.checkpoint.export_hf:
            self.checkpointer.expect(self.progress.step, reference_logits(self.stepper, self.run, self.plan))

    # Run.

    def stop(self, reason: str) -> None:
        """Asks all ranks to save and stop before the next step is applied. Safe to call from a signal handler."""
        self.stop_signal.stop(reason)

    def pause(self) -> None:
        """Asks all ranks to stop before the next step is applied, without saving: other ranks will take the same step."""
        self.stop_signal.pause()

    def events(self) -> Iterator[Event]:
        """Trains to the end or until a rank is asked to stop, then closes. Yields what happens."""
        try:
            yield from self.train()
        finally:
            self.close()

    def train(self, *, save_only: bool = False) -> Iterator[Event]:
        """As `events`, without closing. `save_only`: saves the present state and stops."""
        self.heartbeat.begin(self.progress.step)
        self.stop_signal.agreed = 0
        if not save_only:
            yield from loop.train(self)
        yield from loop.end(self)

    def close(self) -> None:
        """Ends threads and closes files. Offloaded optimizer states in files are lost."""
        self.feed.close()
        self.checkpointer.close()
        if self._built is not None:
            self.optimizer.close()
