"""The loop. Build, restore, step, evaluate and save are separate calls on plain state, so it can be entered halfway.

A worker drives it through `events()`; an embedding program may call `step()` in a loop of its own; recovery can build it
anew on another mesh, in the same process, and carry on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from phalanx.checkpointing.location import Location
from phalanx.checkpointing.pieces import Piece
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.data.loader import Loader, Share
from phalanx.data.pack import Batch
from phalanx.events.records import (
    Evaluated,
    Event,
    Finished,
    ModelPlaced,
    Saved,
    SaveFailed,
    Step,
    StepAccounted,
    StepSkipped,
    Stopped,
    WeightsLoaded,
)
from phalanx.parallel.context import places
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline import Pipeline
from phalanx.spec.errors import RunFailed
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.accounting import Accounting
from phalanx.training.built import place
from phalanx.training.fixed_prompt import answer
from phalanx.training.held_out import evaluate
from phalanx.training.report import Progress, report, too_many_skipped
from phalanx.training.saving import Saving
from phalanx.training.schedule import learning_rate
from phalanx.training.state import pieces, placement
from phalanx.training.step import MicroBatch, Stepper, step_seed


class Trainer:
    """One rank's training."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, checkpoints: Path, dataset: Dataset | None = None):
        self.run, self.plan, self.mesh, self.checkpoints = run, plan, mesh, checkpoints
        self.data = dataset or open_dataset(run.data, run.train.sequence_length, run.train.seed)
        self.progress = Progress()
        self._loader: Loader[MicroBatch] | None = None
        self._stop: str | None = None
        self._saving = Saving(run, plan, mesh, checkpoints, self.data)
        self._begun = False
        self._places: np.ndarray | None = None

    def build(self) -> None:
        """Model, gradients and optimizer at step 0, on this rank's device."""
        built = place(self.run, self.plan, self.mesh, self.checkpoints.parent / "offload")
        self.placed, self.optimizer, self.outer, self._shapes = built.placed, built.optimizer, built.outer, built.shapes
        pipeline = (
            None
            if built.order is None
            else Pipeline(self.placed.parts, built.order, self.mesh, halves=self.run.memory.recompute != "selective")
        )
        self.stepper = Stepper(self.run, self.plan, self.placed, built.experts, pipeline)
        self.stepper.before_update = self._saving.release
        self._accounting = Accounting(self.placed, self.placement, self.tensors, on=not self.run.memory.compile)
        if self.mesh.size("context") > 1:
            layout, length = self.plan.layout, self.run.train.sequence_length
            self._places = places(length, layout.context, self.mesh.at("context"), layout.context_method)

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

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop before the next step is applied. Safe to call from a signal handler."""
        self._stop = reason

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model; the first of them, where a pipeline gives it several."""
        return self.placed.parts[0]

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.run.steps

    def tensors(self) -> dict[str, Piece]:
        """The live state by name, this rank's parts of it: what is saved, and where it is restored to."""
        return pieces(self.placed, self.optimizer, self.outer)

    def placement(self) -> ModelPlaced:
        """What this rank really holds, and what was done to it."""
        return placement(self.placed, self.optimizer, self.outer)

    def account(self) -> StepAccounted | None:
        """What a step cost this rank: once in each launch, after the step that was counted."""
        return self._accounting.take()

    def _adopt(self) -> None:
        """The values were written by somebody else than the optimizer: whoever keeps copies takes them over."""
        self.placed.engine.updated()
        self.optimizer.adopt()

    def restore(self, path: Path | Location | None = None) -> list[Event]:
        """Go on from `path`, or from the newest valid checkpoint; without one, begin. Tells what was found."""
        progress, events = self._saving.restore(self.tensors(), path)
        if progress is None:
            return [*events, *self.begin()]
        self.progress = progress
        self.stepper.scale.restore(self.progress.loss_scale)
        self._adopt()
        self._close_loader()
        if self._saving.lacks_export():
            self._ask()
            self._saving.export_restored()
        return events

    def step(self) -> Step | StepSkipped | None:
        """Take one step; None if a rank was told to stop, and then nothing has changed."""
        started = time.perf_counter()
        rate = learning_rate(self.run.optimizer, self.progress.step, self.run.steps)
        batches = next(self._batches())
        torch.manual_seed(step_seed(self.run.train.seed, self.progress.step, self.mesh.replica))
        outcome = self._accounting.around(
            self.progress.step + 1,
            lambda: self.stepper.step(batches, self.optimizer, rate, lambda: self._stop is not None),
        )
        if outcome.stopped:
            self._close_loader()  # the batch that was drawn for this step will be drawn again
            self._stop = self._stop or "another rank was told to stop"
            return None
        self.progress.advance(self.run.batch, outcome.good, self.stepper.scale)
        if self.outer is not None and self.outer.due(self.progress.step):
            self.outer.step()
            self._adopt()
        return report(self.progress, outcome, rate, time.perf_counter() - started, (self.run, self.plan))

    def evaluate(self) -> Evaluated | None:
        """Mean loss over the first held-out sequences of each source; None if nothing is held out."""
        return evaluate(self.data.eval, self.stepper, self._prepare, self.run, self.plan, self.progress.step)

    def save(self) -> Saved:
        """Write a checkpoint of this moment and see it through; all ranks call it together. RunFailed where it cannot be written."""
        (*_, ended) = self._save_now()
        assert isinstance(ended, Saved)
        return ended

    def _save_now(self) -> Iterator[Event]:
        self._ask()
        for event in self._saving.save(self.progress, self.tensors(), wait=True):
            yield event
            if isinstance(event, SaveFailed) and event.step == self.progress.step:
                raise RunFailed(f"Step {event.step} could not be saved: {event.reason}.")

    def _ask(self) -> None:
        """Before a save: what the model says now, where the checkpoint will be exported and compared; all ranks together."""
        if self.run.checkpoint.export_hf:
            self._saving.expect(self.progress.step, answer(self.stepper, self.run, self.plan))

    def events(self) -> Iterator[Event]:
        """Train to the end or until told to stop, saying what happens."""
        try:
            yield from self._train()
        finally:
            self.close()

    def _train(self) -> Iterator[Event]:
        self._saving.prepare(self.tensors())
        while not self.finished:
            taken = self.step()
            if taken is None:
                break
            yield taken
            yield from self._saving.ended()
            if self.progress.skipped_in_a_row > self.run.resilience.max_skipped:
                yield from self._save_now()
                raise RunFailed(too_many_skipped(self.progress, self.run))
            if self._due(self.run.train.eval_every) or self.finished:
                yield from _some(self.evaluate())
            if not self.finished:
                self._saving.copy(self.progress, self.tensors)
            if self._due(self.run.checkpoint.every) and not self.finished:
                self._ask()
                yield from self._saving.save(self.progress, self.tensors(), wait=False)
        yield from self._saving.settle()
        if self._saving.step != self.progress.step:
            yield from self._save_now()
        yield from self._saving.finish()
        if self.finished:
            yield Finished(step=self.progress.step)
        else:
            yield Stopped(step=self.progress.step, reason=self._stop or "asked to stop")

    def close(self) -> None:
        """Let go of threads and files; states in files are gone with them."""
        self._close_loader()
        self._saving.close()
        if hasattr(self, "optimizer"):
            self.optimizer.close()

    def _due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _prepare(self, batch: Batch) -> MicroBatch:
        return MicroBatch.prepare(batch, self.mesh.device, self.run.data.document_mask, self._places)

    def _batches(self) -> Loader[MicroBatch]:
        if self._loader is None:
            share = Share(
                batch=self.run.batch,
                replica=self.mesh.replica,
                replicas=self.plan.layout.replicas,
                micro_batch=self.plan.micro_batch,
            )
            self._loader = Loader(
                self.data.train,
                share,
                start=self.progress.samples,
                prefetch=self.run.data.prefetch,
                prepare=self._prepare,
            )
        return self._loader

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def _some(event: Evaluated | None) -> Iterator[Event]:
    if event is not None:
        yield event
