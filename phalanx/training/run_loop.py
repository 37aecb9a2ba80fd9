"""The loop of a run: restore, steps, evaluations, saves, rollbacks and the end, whatever computes a step. `training/trainer` is the loop of a rank of the
torch engine, `xla/xla_trainer` that of the XLA engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.location import Location
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import (
    Evaluated,
    Event,
    Finished,
    ModelPlaced,
    Restored,
    Rewound,
    Sampled,
    Saved,
    SaveFailed,
    Step,
    StepSkipped,
    Stopped,
    Warned,
)
from phalanx.optim.optimizer import learning_rate
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.hooks import Hooks, StepRefused
from phalanx.training.hooks.measurements import HeartbeatHook
from phalanx.training.run_progress import Progress, too_many_rollbacks, too_many_skipped
from phalanx.training.saving import Checkpointer, Tensors
from phalanx.training.step_totals import PAUSE, StopSignal

_MAX_ROLLBACKS = 3
"""Times that a run goes back to the same step."""


class RunLoop(ABC):
    """Trains one process's part of a run. An engine says how its state is built, changed by a step and read."""

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
        self.checkpointer = Checkpointer(run, plan, mesh, checkpoints, self.data, self.reference_logits)
        self.hooks = Hooks(HeartbeatHook(self.heartbeat))
        self.last_record: Step | StepSkipped | None = None
        """The record of the last step, on every rank."""
        self.on_event: Callable[[Event], None] | None = None
        """Called with every event of `restore`, `step`, `evaluate`, `save` and `events`, on this rank."""
        self.rate_of: Callable[[int], float] = lambda step: learning_rate(run.optimizer, step, run.steps)
        """The learning rate of a step, from 0. May be replaced; nothing of it is saved."""
        self.is_built = False
        self.ready = False
        """The state is complete: initialized, loaded or restored."""
        self.has_weights = False
        """The weights of `model.from` have been loaded."""

    # What an engine does.

    @abstractmethod
    def build(self) -> None:
        """Builds the state of step 0 on this process's devices."""

    @abstractmethod
    def tensors(self) -> Tensors:
        """This process's part of the live state by name: what is saved and restored."""

    @abstractmethod
    def _take_step(self, number: int) -> Step | StepSkipped | None:
        """Computes a step and applies it, or skips it. None: a rank was asked to stop, and nothing has changed."""

    @abstractmethod
    def evaluate(self) -> Evaluated | None:
        """Mean loss of the first held-out sequences of each source. None: nothing is held out, or a rank was asked to stop."""

    @abstractmethod
    def sample(self) -> Iterator[Sampled]:
        """Text for each of train.sample_prompts; all ranks call it together. Ends early if a rank was asked to stop."""

    @abstractmethod
    def reference_logits(self) -> ReferenceLogits:
        """The logits that an export of the present state must reproduce."""

    @abstractmethod
    def placement(self) -> ModelPlaced:
        """What a device of this process holds, read from the tensors themselves."""

    @abstractmethod
    def _load_weights(self, *, resumed: bool = False) -> list[Event]:
        """Loads the weights that `model.from` names: into the model and into what is frozen; after a restored checkpoint only into the
        latter."""

    @abstractmethod
    def _on_restored(self) -> None:
        """The tensors hold a checkpoint's values now: brings everything else up to them."""

    @abstractmethod
    def _drop_batches(self) -> None:
        """Drops what was read ahead: the position in the data changes."""

    @abstractmethod
    def close(self) -> None:
        """Ends threads and closes files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, *events: Event) -> None:
        if self.on_event is not None:
            for event in events:
                self.on_event(event)

    # Restore.

    def load_initial_weights(self) -> list[Event]:
        """Loads the weights that `model.from` names, if any: once, before the first step."""
        events = [] if self.ready or self.progress.step else self._load_weights()
        self.ready = True
        return events

    def restore(self, path: Path | Location | None = None, *, until: int | None = None) -> list[Event]:
        """Restores `path`, or the newest valid checkpoint (of step `until` or before); without one, loads the initial weights. Returns
        what it found."""
        self.hooks.on_phase("restoring")
        progress, events = self.checkpointer.restore(self.tensors(), path, until)
        if progress is None:
            events = [*events, *self.load_initial_weights()]
            self._tell(*events)
            return events
        events = [*self._load_weights(resumed=True), *events]
        self.progress = progress
        self._on_restored()
        self.ready = True
        self._drop_batches()
        self.checkpointer.export_restored()
        self._tell(*events)
        return events

    # Step.

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.run.steps

    def step(self) -> Step | StepSkipped | None:
        """Takes one step. None: a rank was asked to stop, and nothing has changed. Raises `StepRefused` if a hook refuses the step."""
        number = self.progress.step + 1
        with self.hooks.around_step(number):
            record = self._take_step(number)
        if record is not None:
            self.hooks.on_step_end(record)
            self._tell(record)
        return record

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
        """As `events`, without closing. `save_only`: saves the present state and stops. `ahead`: the next forward may be launched before a step
        is reported, so whoever takes the events must not change the model."""
        self.heartbeat.begin(self.progress.step)
        self.stop_signal.agreed = 0
        if not save_only:
            self._on_train(ahead)
            yield from self._train()
        if self.stop_signal.agreed != PAUSE:
            yield from self._finish()

    @abstractmethod
    def _on_train(self, ahead: bool) -> None:
        """Called before the first step of `train`, with its `ahead`."""

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
