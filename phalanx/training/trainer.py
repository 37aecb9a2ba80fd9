"""The loop. Build, restore, step, evaluate and save are separate calls on plain state, so it can be entered halfway.

A worker drives it through `events()`; an embedding program may call `step()` in a loop of its own; recovery can build it
anew on another mesh, in the same process, and carry on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

from torch import nn

from phalanx.checkpointing.location import Location
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import Evaluated, Event, ModelPlaced, Saved, SaveFailed, Step, StepSkipped, WeightsLoaded
from phalanx.observe.comm_timer import WAITED
from phalanx.optim.learning_rate import learning_rate
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.build import place
from phalanx.training.evaluate import Left, evaluate
from phalanx.training.feed import Feed
from phalanx.training.fixed_prompt import answer
from phalanx.training.hooks.rank_faults import NONE, Faults
from phalanx.training.hooks.replica_check import Agreement, Corruption
from phalanx.training.hooks.retry_nonfinite import once_more
from phalanx.training.hooks.step_accounting import Accounting
from phalanx.training.hooks.step_timing import Timing
from phalanx.training.live_state import pieces, placement
from phalanx.training.loop import end, loop
from phalanx.training.micro_batch import step_seed
from phalanx.training.saving import Saving
from phalanx.training.step import Stepper
from phalanx.training.step_report import Progress, report
from phalanx.training.step_totals import PAUSE, STOP


class Trainer:
    """One rank's training."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, checkpoints: Path, dataset: Dataset | None = None):
        self.run, self.plan, self.mesh, self.checkpoints = run, plan, mesh, checkpoints
        self.data = dataset or open_dataset(run.data, run.train.sequence_length, run.train.seed)
        self.progress = Progress()
        self.heartbeat = Heartbeat()
        """Says to whoever watches this process what it is doing."""
        self.ready = False
        """There is a state: drawn, given or restored."""
        self._stop, self._pause = cast(str | None, None), False
        self.saving = Saving(run, plan, mesh, checkpoints, self.data)
        self.feed = Feed(run, plan, mesh, self.data)
        self._begun = False
        self._faults = NONE
        self._noted: list[Event] = []
        self.taken: Step | StepSkipped | None = None
        """The last step, as it is told: known on every rank."""
        self.heard = 0
        """What some rank was told, as all know: nothing (0), PAUSE or STOP."""

    def build(self) -> None:
        """Model, gradients and optimizer at step 0, on this rank's device."""
        self.heartbeat.enter("building")
        built = place(self.run, self.plan, self.mesh, self.checkpoints.parent / "offload")
        self.sharded, self.optimizer, self.outer, self._shapes = built.sharded, built.optimizer, built.outer, built.shapes
        self.stepper = Stepper(self.run, self.plan, self.sharded, built.experts, built.pipeline(self.run))
        self.stepper.before_update = self.saving.release
        self.stepper.updating = lambda: self.heartbeat.enter("updating")
        self.stepper.agreement = Agreement(self.run.resilience.check_every, self.sharded, self.tensors)
        self.faults = self._faults
        WAITED.watch(self.mesh.device)
        self._accounting = Accounting(self.sharded, self.placement, self.tensors, on=not self.run.memory.compile)
        self._timing = Timing(self)

    def begin(self) -> list[Event]:
        """Take the weights that the run is to start from, where model.from names some; once, and before any step."""
        given = self.run.model.from_
        if given is None or self._begun or self.progress.step:
            return []
        from phalanx.training import initial  # readers of files that most runs never see

        started = time.perf_counter()
        tensors = {name.partition("/")[2]: piece for name, piece in self.tensors().items() if name.startswith("model/")}
        initial.load(tensors, self._shapes, origin_folder(given))
        if self.outer is not None:
            self.outer.adopt()
        self._adopt()
        self._begun = True
        return [WeightsLoaded(path=given, seconds=time.perf_counter() - started)]

    @property
    def faults(self) -> Faults:
        """What --chaos has in store for this rank."""
        return self._faults

    @faults.setter
    def faults(self, given: Faults) -> None:
        self._faults = given
        if hasattr(self, "stepper"):
            self.stepper.faults = given
            given.see(self.sharded.parts)

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop before the next step is applied. Safe to call from a signal handler."""
        self._stop = reason

    def pause(self) -> None:
        """Ask all ranks to end before the next step is applied, without saving: the same step is to be taken by other ranks."""
        self._pause = True

    @property
    def paused(self) -> bool:
        return self._pause

    @property
    def why(self) -> str:
        """Why it was told to stop."""
        return self._stop or "asked to stop"

    @property
    def told(self) -> int:
        """What this rank was told: nothing (0), PAUSE or STOP."""
        return STOP if self._stop is not None else PAUSE if self._pause else 0

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model; the first of them, where a pipeline gives it several."""
        return self.sharded.parts[0]

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.run.steps

    def tensors(self) -> dict[str, StateTensor]:
        """The live state by name, this rank's parts of it: what is saved, and where it is restored to."""
        return pieces(self.sharded, self.optimizer, self.outer)

    def placement(self) -> ModelPlaced:
        """What this rank really holds, and what was done to it."""
        return placement(self.sharded, self.optimizer, self.outer)

    def account(self) -> Event | None:
        """What a step cost this rank in messages and memory, or in time: after those early steps of a launch that are counted."""
        return self._accounting.take() or self._timing.take()

    def _adopt(self) -> None:
        """The values were written by somebody else than the optimizer: whoever keeps copies takes them over."""
        self.sharded.engine.updated()
        self.optimizer.adopt()
        if self.stepper.agreement is not None:
            self.stepper.agreement.forget()

    def restore(self, path: Path | Location | None = None) -> list[Event]:
        """Go on from `path`, or from the newest valid checkpoint; without one, begin. Tells what was found."""
        self.heartbeat.enter("restoring")
        progress, events = self.saving.restore(self.tensors(), path)
        if progress is None:
            begun = self.begin()
            self.ready = True
            return [*events, *begun]
        self.progress = progress
        self.stepper.scale.restore(self.progress.loss_scale)
        self._adopt()
        self.ready = True
        self.feed.close()
        if self.saving.lacks_export():
            self._ask()
            self.saving.export_restored()
        return events

    def step(self) -> Step | StepSkipped | None:
        """Take one step; None if a rank was told to stop, and then nothing has changed. Corruption, where replicas differ."""
        return self._timing.around(self._step)

    def _step(self) -> Step | StepSkipped | None:
        started, number = time.perf_counter(), self.progress.step + 1
        WAITED.take()  # what was waited for between steps
        rate = learning_rate(self.run.optimizer, self.progress.step, self.run.steps)
        self.heartbeat.enter("data")
        self.faults.at("data", number)
        batches = self.feed.next(self.progress.samples)
        self.heartbeat.enter("computing")
        self.stepper.begin(number, step_seed(self.run.train.seed, self.progress.step, self.mesh.replica))
        self.stepper.limits = self.progress.limits(self.run.resilience.spike)
        work = partial(self.stepper.step, batches, self.optimizer, rate, lambda: self.told)
        try:
            outcome = self._accounting.around(number, work)
            if outcome.not_finite and not self.progress.skipped_in_a_row and self.stepper.scale.value <= 1:
                self.heartbeat.enter("computing")
                outcome, found = once_more(self.stepper, batches, work)
                self._noted.append(found)
        except Corruption:
            self.feed.close()  # as below
            raise
        if outcome.stopped:
            self.feed.close()  # the batch that was drawn for this step will be drawn again
            self._heed(outcome.stopped)
            return None
        self.progress.take(outcome, self.run, self.stepper.scale)
        seconds = time.perf_counter() - started
        self.heartbeat.stepped(self.progress.step, seconds, max(seconds - WAITED.take(), 0.0), outcome.memory)
        told = partial(report, self.progress, outcome, rate, job=(self.run, self.plan))
        self.taken = told(seconds=seconds)  # should a rank be lost in what follows, the step is taken all the same
        self._settle_update()
        self.taken = told(seconds=time.perf_counter() - started)
        return self.taken

    def _heed(self, told: int) -> None:
        """Some rank was told to end, and all know it now."""
        if told == STOP:
            self._stop = self._stop or "another rank was told to stop"
        self._pause, self.heard = told == PAUSE, told

    def _settle_update(self) -> None:
        """The step is taken. What ranks do together after it changes no state of theirs, but where replicas meet only now and then."""
        if self.outer is not None and self.outer.due(self.progress.step):
            self.stepper.torn = True
            self.outer.step()
            self._adopt()
            self.stepper.torn = False
        else:
            self.sharded.engine.updated()

    def evaluate(self) -> Evaluated | None:
        """Mean loss over the first held-out sequences of each source; None if nothing is held out, or a rank was told to stop."""
        self.heartbeat.enter("evaluating")
        step = self.progress.step
        self.faults.at("evaluate", step)
        try:
            job = self.run, self.plan
            return evaluate(self.data.eval, self.stepper, self.feed.prepare, job, step, lambda: self.told)
        except Left as left:
            self._heed(left.told)
            return None

    def save(self) -> Saved:
        """Write a checkpoint of this moment and see it through; all ranks call it together. RunFailed where it cannot be written."""
        (*_, ended) = self.save_now()
        assert isinstance(ended, Saved)
        return ended

    def save_now(self) -> Iterator[Event]:
        """The same, telling what else has ended."""
        self.faults.at("save", self.progress.step)
        self._ask()
        for event in self.saving.save(self.progress, self.tensors(), wait=True):
            yield event
            if isinstance(event, SaveFailed) and event.step == self.progress.step:
                raise RunFailed(f"Step {event.step} could not be saved: {event.reason}.")

    def save_behind(self) -> Iterator[Event]:
        """Begin a checkpoint of this moment, telling what has ended."""
        self.faults.at("save", self.progress.step)
        self._ask()
        yield from self.saving.save(self.progress, self.tensors(), wait=False)

    def _ask(self) -> None:
        """Before a save: what the model says now, where the checkpoint will be exported and compared; all ranks together."""
        if self.run.checkpoint.export_hf:
            self.saving.expect(self.progress.step, answer(self.stepper, self.run, self.plan))

    def events(self) -> Iterator[Event]:
        """Train to the end or until told to stop, saying what happens."""
        try:
            yield from self.train()
        finally:
            self.close()

    def train(self, *, save: bool = False) -> Iterator[Event]:
        """The same, and whatever happens the state stays: for somebody who will `close`. `save`: only save what there is, and stop."""
        self.heartbeat.begin(self.progress.step)
        self.heard = 0
        if not save:
            yield from loop(self, self.saving)
        yield from end(self, self.saving)

    def close(self) -> None:
        """Let go of threads and files; states in files are gone with them."""
        self.feed.close()
        self.saving.close()
        if hasattr(self, "optimizer"):
            self.optimizer.close()

    def notes(self) -> Iterator[Event]:
        """What was found out about the last step, once."""
        while self._noted:
            yield self._noted.pop(0)
