"""The trainer of one rank. Build, restore, step, evaluate and save are separate calls on plain state: a worker drives it through `train()`, an
embedding program may call `step()`, and recovery builds a new trainer on another mesh. Rare concerns attach to `training/hooks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import nn

from phalanx.checkpointing.location import Location
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import (
    Evaluated,
    Event,
    Finished,
    Restored,
    Rewound,
    Sampled,
    Saved,
    SaveFailed,
    Step,
    StepSkipped,
    Stopped,
    Warned,
    WeightsLoaded,
)
from phalanx.observe.comm_timer import COMM_TIMER, span
from phalanx.optim.optimizer import Optimizer, Resources, learning_rate
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.errors import RunError, RunFailed, toml
from phalanx.spec.hub import missing_message
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.build import TrainState, build
from phalanx.training.evaluate import evaluate
from phalanx.training.exports import reference_logits
from phalanx.training.hooks import Hooks, StepRefused
from phalanx.training.hooks.measurements import HeartbeatHook, StepAccounting, StepTiming
from phalanx.training.hooks.nonfinite import NonFiniteRetry
from phalanx.training.hooks.replica_check import ReplicaCheck
from phalanx.training.hooks.timeline_hook import TimelineHook
from phalanx.training.micro_batch import BatchFeed, MicroBatch, step_seed
from phalanx.training.run_progress import Progress, step_record, too_many_rollbacks, too_many_skipped
from phalanx.training.sample_text import Sampler
from phalanx.training.saving import Checkpointer
from phalanx.training.step import Stepper, make_stepper
from phalanx.training.step_totals import PAUSE, StopSignal

_MAX_ROLLBACKS = 3
"""Times that a run goes back to the same step."""


_PUBLIC = (
    "close", "evaluate", "events", "finished", "last_record", "model", "on_event", "plan", "progress", "rate_of", "restore", "run", "save", "step",
    "stop",
)  # fmt: skip
"""What a program uses; `dir` shows these names. The others are for the package."""


class Trainer:
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
        self.run, self.plan, self.mesh, self.checkpoints = run, plan, mesh, checkpoints
        self.data = dataset or open_dataset(run.data, run.train.sequence_length, run.train.seed)
        self.progress = Progress()
        self.heartbeat = heartbeat or Heartbeat()
        self.stop_signal = StopSignal()
        self.checkpointer = Checkpointer(
            run, plan, mesh, checkpoints, self.data, lambda: reference_logits(self.stepper, run, plan)
        )
        self.feed = BatchFeed(run, plan, mesh, self.data)
        self.sampler = Sampler(run, plan, self.data.tokenizer)
        self.hooks = Hooks(HeartbeatHook(self.heartbeat))
        self._timeline = TimelineHook(checkpoints.parent, mesh, run.watch.timeline_steps) if run.watch.timeline else None
        if self._timeline is not None:
            self.hooks.add(self._timeline)
        self.last_record: Step | StepSkipped | None = None
        """The record of the last step, on every rank."""
        self.on_event: Callable[[Event], None] | None = None
        """Called with every event of `restore`, `step`, `evaluate`, `save` and `events`, on this rank."""
        self.rate_of: Callable[[int], float] = lambda step: learning_rate(run.optimizer, step, run.steps)
        """The learning rate of a step, from 0. May be replaced; nothing of it is saved."""
        self.is_built = False
        self.ready = False
        """The state is complete: initialized, loaded or restored."""
        self._has_weights = False
        """The weights of `model.from` have been loaded."""

    def __dir__(self) -> list[str]:
        return sorted(_PUBLIC)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, *events: Event) -> None:
        if self.on_event is not None:
            for event in events:
                self.on_event(event)

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

    def load_initial_weights(self) -> list[Event]:
        """Loads the weights that `model.from` names, if any: once, before the first step."""
        events = [] if self.ready or self.progress.step else self._load_weights()
        self.ready = True
        return events

    def _load_weights(self, *, resumed: bool = False) -> list[Event]:
        """Loads the weights that `model.from` names: into the model and into what is frozen; after a restored checkpoint only into the
        latter."""
        source = self.run.model.from_
        if source is None or self._has_weights:
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
                initial_weights.load(tensors, self.state.shapes, origin_folder(source))
        if self.state.outer is not None and self.sharded.adapters is None and not resumed:
            self.state.outer.adopt()
        self._adopt_state()
        self._has_weights = True
        return [WeightsLoaded(path=source, seconds=time.perf_counter() - started)]

    def restore(self, path: Path | Location | None = None, *, until: int | None = None) -> list[Event]:
        """Restores `path`, or the newest valid checkpoint (of step `until` or before); without one, loads the initial weights. Returns
        what it found."""
        self.hooks.on_phase("restoring")
        progress, events = self.checkpointer.restore(self.tensors(), path, until)
        if progress is None:
            events = [*events, *self.load_initial_weights()]
            self._tell(*events)
            return events
        if self.state.frozen():
            events = [*self._load_weights(resumed=True), *events]
        self.progress = progress
        self.stepper.scale.restore(self.progress.loss_scale)
        self._adopt_state()
        self.ready = True
        self.feed.close()
        self.checkpointer.export_restored()
        self._tell(*events)
        return events

    def _adopt_state(self) -> None:
        """Brings every copy of the parameters up to values that the optimizer did not write."""
        self.sharded.engine.updated()
        if self.state.reference is not None:
            self.state.reference.engine.updated()
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
            self._tell(record)
        return record

    def _step(self, number: int) -> Step | StepSkipped | None:
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

    # Save.

    def save(self) -> Saved:
        """Writes a checkpoint and waits until it is complete; all ranks call it together. Raises RunFailed if it cannot be written."""
        if not self.run.checkpoint.save:
            raise RunFailed(
                f"Step {self.progress.step} is not saved: checkpoint.save = false. Remove the key to save checkpoints."
            )
        events = list(self._save(wait=True))
        self._tell(*events)
        saved = events[-1]
        assert isinstance(saved, Saved)
        return saved

    def _save(self, *, wait: bool) -> Iterator[Event]:
        """As `save`, or, without `wait`, in the background where that is possible; yields the events of earlier saves too. Does nothing
        in a run that saves no checkpoints."""
        if not self.run.checkpoint.save:
            return
        self.hooks.before_save(self.progress.step)
        for event in self.checkpointer.save(self.progress, self.tensors(), wait=wait):
            yield event
            if wait and isinstance(event, SaveFailed) and event.step == self.progress.step:
                raise RunFailed(f"Step {event.step} could not be saved: {event.reason}.")

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
            for event in self.train(ahead=False):
                if not isinstance(event, Step | StepSkipped | Evaluated):  # these were told when they happened
                    self._tell(event)
                yield event
        finally:
            self.close()

    def train(self, *, save_only: bool = False, ahead: bool = True) -> Iterator[Event]:
        """As `events`, without closing. `save_only`: saves the present state and stops. `ahead`: with CUDA graphs, the next forward is launched
        before a step is reported, so whoever takes the events must not change the model."""
        self.heartbeat.begin(self.progress.step)
        self.stop_signal.agreed = 0
        if not save_only:
            # A program that is called between two steps may change the weights that the next forward reads.
            alone = self.mesh.ranks == 1 and self.state.outer is None and self.on_event is None
            self.stepper.next_batch = self._next_batch if ahead and alone else None
            yield from self._train()
        if self.stop_signal.agreed != PAUSE:
            yield from self._finish()

    def _train(self) -> Iterator[Event]:
        """Steps, evaluations and saves, until the run is finished or all ranks have agreed to stop."""
        self.checkpointer.prepare(self.tensors())
        while not self.finished:
            try:
                record = self.step()
            except StepRefused as refused:
                yield from refused.events
                raise
            if record is None:
                return
            yield record
            yield from self.hooks.take_events()
            yield from self.checkpointer.ended()
            yield from self._after_bad_steps()
            if self.progress.step < record.step:
                continue  # the run was rolled back
            if self._is_due(self.run.train.eval_every) or self.finished:
                if (evaluated := self.evaluate()) is not None:
                    yield evaluated
                if self.stop_signal.agreed:
                    return
            if self._is_due(self.run.train.sample_every) or (self.finished and self.run.train.sample_every is not None):
                yield from self.sample()
                if self.stop_signal.agreed:
                    return
            if not self.finished:
                self.checkpointer.copy(self.progress, self.tensors)
            if self.run.checkpoint.save and self._is_due(self.run.checkpoint.every) and not self.finished:
                self.hooks.on_phase("saving")
                yield from self._save(wait=False)

    def _next_batch(self) -> tuple[MicroBatch, int] | None:
        """Of the step after the one in progress, if it is read already."""
        batches = self.feed.peek() if self.progress.step + 1 < self.run.steps else None
        return (
            None if batches is None else (batches[0], step_seed(self.run.train.seed, self.progress.step + 1, self.mesh.replica))
        )

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _finish(self) -> Iterator[Event]:
        """Saves the final state, unless the run saves none, and waits for everything in the background."""
        self.hooks.on_phase("saving")
        yield from self.checkpointer.settle()
        if self.checkpointer.step != self.progress.step:
            yield from self._save(wait=True)
        self.hooks.on_phase("ending")
        yield from self.checkpointer.finish()
        if self.finished:
            yield Finished(step=self.progress.step)
        else:
            saved = self.run.checkpoint.save
            yield Stopped(step=self.progress.step, reason=self.stop_signal.reason, saved=saved)

    def close(self) -> None:
        """Ends threads and closes files. Offloaded optimizer states in files are lost."""
        self.feed.close()
        self.checkpointer.close()
        if self._timeline is not None:
            self._timeline.close()
        if self.is_built:
            self.optimizer.close()

    # Roll back.

    def _after_bad_steps(self) -> Iterator[Event]:
        """After too many skipped steps in a row, rolls back or ends the run."""
        limits = self.run.resilience
        if limits.rollback_after is not None and self.progress.skipped_in_a_row >= limits.rollback_after:
            yield from self._roll_back()
        if self.progress.skipped_in_a_row > limits.max_skipped:
            yield from self._save(wait=True)
            raise RunFailed(too_many_skipped(self.progress, self.run, self.checkpoints.parent / "run.toml"))

    def _roll_back(self) -> Iterator[Event]:
        """Restores the last good checkpoint and skips the data read since; all ranks together. Without a checkpoint, does nothing.

        No resumption may find checkpoints of the steps that were undone. So the restored state is saved at once, with the new position
        in the data, and only when that save is complete are the later checkpoints removed.
        """
        before = self.progress
        yield from self.checkpointer.settle()
        events = self.restore(until=before.last_good)
        yield from events
        if not events or not isinstance(restored := events[-1], Restored):
            if before.skipped_in_a_row == self.run.resilience.rollback_after:
                message = f"There is no checkpoint of step {before.last_good} or before to go back to: bad steps are skipped."
                yield Warned(message=message)
            return
        step = self.progress.step
        self.progress = after = before.back_to(self.progress)
        if sum(to == step for _, _, to in after.left_out) > _MAX_ROLLBACKS:
            raise RunFailed(too_many_rollbacks(before, step, self.run))
        yield from self._save(wait=True)
        self.checkpointer.remove_after(step)
        first, beyond, _ = after.left_out[-1]
        yield Rewound(step=before.step, to_step=step, skipped_samples=[first, beyond], path=restored.path)
