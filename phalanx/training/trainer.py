"""The loop. Build, restore, step, evaluate and save are separate calls on plain state, so it can be entered halfway.

A worker drives it through `events()`; an embedding program may call `step()` in a loop of its own; recovery can build it
anew on another mesh, in the same process, and carry on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phalanx._version import __version__
from phalanx.checkpointing import disk
from phalanx.checkpointing.load import load
from phalanx.checkpointing.save import save
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.data.loader import Loader, Share
from phalanx.data.pack import Batch, Samples
from phalanx.events.records import (
    CheckpointDamaged,
    Evaluated,
    Event,
    Finished,
    Restored,
    Saved,
    Step,
    StepSkipped,
    Stopped,
    WeightsLoaded,
)
from phalanx.models.init import build, materialize
from phalanx.parallel.apply import apply
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.spec.origin import origin_folder
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.optimizer import Optimizer
from phalanx.training.schedule import learning_rate
from phalanx.training.step import MicroBatch, Outcome, Stepper


@dataclass(slots=True)
class Progress:
    """How far the run has come: with the tensors, everything that a checkpoint holds."""

    step: int = 0
    """Optimizer steps taken or skipped."""
    samples: int = 0
    """Position in the data: sequences consumed."""
    skipped_in_a_row: int = 0


class Trainer:
    """One rank's training."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, checkpoints: Path, dataset: Dataset | None = None):
        self.run, self.plan, self.mesh, self.checkpoints = run, plan, mesh, checkpoints
        self.data = dataset or open_dataset(run.data, run.train.sequence_length, run.train.seed)
        self.progress = Progress()
        self._loader: Loader[MicroBatch] | None = None
        self._stop: str | None = None
        self._on_disk: int | None = None  # step of the checkpoint that equals the present state
        self._begun = False

    def build(self) -> None:
        """Model, gradients and optimizer at step 0, on this rank's device."""
        self.model = materialize(build(self.run.model), self.run.train.seed, self.mesh.device)
        self.gradients = apply(self.model, self.run, self.mesh)
        self.optimizer = Optimizer(self.model.named_parameters(), self.run.optimizer)
        self.stepper = Stepper(self.run, self.plan, self.mesh, self.model, self.gradients)

    def begin(self) -> list[Event]:
        """Take the weights that the run is to start from, where model.from names some; once, and before any step."""
        given = self.run.model.from_
        if given is None or self._begun or self.progress.step:
            return []
        from phalanx.training import initial  # readers of files that most runs never see

        started = time.perf_counter()
        initial.load(self.model, origin_folder(given))
        self._begun = True
        return [WeightsLoaded(path=given, seconds=time.perf_counter() - started)]

    def stop(self, reason: str) -> None:
        """Ask all ranks to stop before the next step is applied. Safe to call from a signal handler."""
        self._stop = reason

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.run.steps

    def tensors(self) -> dict[str, Tensor]:
        """The live state by name: what is saved, and where it is restored to."""
        model = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        kept = self.model.state_dict().keys()  # not among them: buffers that a model declares to be of the moment
        model |= {f"model/{name}": buffer for name, buffer in self.model.named_buffers() if name in kept}
        return model | {f"optimizer/{name}": state for name, state in self.optimizer.state().items()}

    def restore(self, path: Path | None = None) -> list[Event]:
        """Go on from `path`, or from the newest valid checkpoint; without one, begin. Tells what was found."""
        events: list[Event] = []
        started = time.perf_counter()
        if path is None:
            # One rank looks, so that all agree even while files come and go.
            found = disk.newest_valid(self.checkpoints) if self.mesh.rank == 0 else None
            path, damaged = self.mesh.share(found)
            events += [CheckpointDamaged(path=str(bad.path), reason=bad.reason) for bad in damaged]
        else:
            disk.verify(path)
        if path is not None:
            contents = load(path, self.tensors(), alone=self.mesh.ranks == 1)
            self.progress = Progress(**contents["progress"])
            self._on_disk = self.progress.step
            self._close_loader()
            events.append(Restored(step=self.progress.step, path=str(path), seconds=time.perf_counter() - started))
        else:
            events += self.begin()
        return events

    def step(self) -> Step | StepSkipped | None:
        """Take one step; None if a rank was told to stop, and then nothing has changed."""
        started = time.perf_counter()
        rate = learning_rate(self.run.optimizer, self.progress.step, self.run.steps)
        outcome = self.stepper.step(next(self._batches()), self.optimizer, rate, lambda: self._stop is not None)
        if outcome.stopped:
            self._close_loader()  # the batch that was drawn for this step will be drawn again
            self._stop = self._stop or "another rank was told to stop"
            return None
        self.progress.step += 1
        self.progress.samples += self.run.batch
        self.progress.skipped_in_a_row = 0 if outcome.good else self.progress.skipped_in_a_row + 1
        return self._report(outcome, rate, time.perf_counter() - started)

    @torch.no_grad()
    def evaluate(self) -> Evaluated | None:
        """Mean loss over the first held-out sequences of each source; None if nothing is held out."""
        held_out = self.data.eval
        if not held_out:
            return None
        started = time.perf_counter()
        self.model.eval()  # one's own model may behave otherwise in training
        totals = self.mesh.sum(torch.stack([self._held_out(samples) for samples in held_out.values()]))
        self.model.train()
        sources = {name: _measured(*row) for name, row in zip(held_out, totals.tolist(), strict=True)}
        whole = _measured(*totals.sum(0).tolist())
        return Evaluated(
            step=self.progress.step,
            loss=whole["loss"],
            tokens=int(whole["tokens"]),
            seconds=time.perf_counter() - started,
            perplexity=whole["perplexity"],
            sources=sources,
        )

    def _held_out(self, samples: Samples) -> Tensor:
        """This rank's part of the loss and the target tokens of one source."""
        micro, count = self.plan.micro_batch, min(self.run.train.eval_sequences, samples.count)
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        # Whole micro-batches go round the ranks: the numbers added are the same however many there are.
        for first in range(self.mesh.replica * micro, count, micro * self.plan.layout.replicas):
            batch = self._prepare(samples.batch(np.arange(first, min(first + micro, count)))).to(self.mesh.device)
            sums += torch.stack((self.stepper.loss(batch).double(), torch.tensor(batch.counted).to(sums)))
        return sums

    def save(self) -> Saved:
        """Write a checkpoint of this moment; all ranks call it together."""
        started = time.perf_counter()
        # One rank writes it down, so one rank looks at the text.
        data = self.data.fingerprint if self.mesh.rank == 0 else None
        contents = {"progress": asdict(self.progress), "data": data, "version": __version__}
        path = save(self.checkpoints, self.progress.step, self.tensors(), contents, self.mesh)
        if self.mesh.rank == 0:
            disk.prune(self.checkpoints, self.run.checkpoint.keep, path)
        self._on_disk = self.progress.step
        size = sum(file["bytes"] for file in disk.read_marker(path)["files"].values())
        return Saved(step=self.progress.step, path=str(path), bytes=size, seconds=time.perf_counter() - started)

    def events(self) -> Iterator[Event]:
        """Train to the end or until told to stop, saying what happens."""
        try:
            yield from self._train()
        finally:
            self.close()

    def _train(self) -> Iterator[Event]:
        while not self.finished:
            taken = self.step()
            if taken is None:
                break
            yield taken
            if self.progress.skipped_in_a_row > self.run.resilience.max_skipped:
                yield self.save()
                raise RunFailed(_too_many_skipped(self.progress, self.run))
            if self._due(self.run.train.eval_every) or self.finished:
                yield from _some(self.evaluate())
            if self._due(self.run.checkpoint.every):
                yield self.save()
        if self._on_disk != self.progress.step:
            yield self.save()
        if self.finished:
            yield Finished(step=self.progress.step)
        else:
            yield Stopped(step=self.progress.step, reason=self._stop or "asked to stop")

    def close(self) -> None:
        self._close_loader()

    def _due(self, every: int | None) -> bool:
        return every is not None and self.progress.step % every == 0

    def _prepare(self, batch: Batch) -> MicroBatch:
        return MicroBatch.prepare(batch, self.mesh.device, self.run.data.document_mask)

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

    def _report(self, outcome: Outcome, rate: float, seconds: float) -> Step | StepSkipped:
        if not outcome.good:
            return StepSkipped(
                step=self.progress.step,
                samples=self.progress.samples,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                in_a_row=self.progress.skipped_in_a_row,
            )
        speed = self.run.batch_tokens / seconds
        flops = speed * self.plan.flops_per_token
        return Step(
            step=self.progress.step,
            loss=outcome.loss,
            tokens=outcome.tokens,
            samples=self.progress.samples,
            batch_digest=outcome.digest,
            learning_rate=rate,
            grad_norm=outcome.grad_norm,
            seconds=seconds,
            tokens_per_second=speed,
            flops_per_second=flops,
            mfu=flops / self.plan.peak_flops if self.plan.peak_flops else None,
            memory=outcome.memory,
            expert_load=outcome.expert_load,
        )


def _measured(loss: float, tokens: float) -> dict[str, float]:
    """What an evaluation says about sums of loss and tokens."""
    mean = loss / max(tokens, 1)
    return {"loss": mean, "perplexity": math.inf if mean > 700 else math.exp(mean), "tokens": int(tokens)}


def _some(event: Evaluated | None) -> Iterator[Event]:
    if event is not None:
        yield event


def _too_many_skipped(progress: Progress, run: Run) -> str:
    return (
        f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite, more than "
        f"resilience.max_skipped = {run.resilience.max_skipped}; nothing was applied since step "
        f"{progress.step - progress.skipped_in_a_row}. Look at the step_skipped records in events.jsonl: if the loss itself "
        f"is not finite, lower optimizer.learning_rate ({run.optimizer.learning_rate:g}) or lengthen optimizer.warmup_steps "
        f"({run.optimizer.warmup_steps}); if only the gradient is, lower train.clip ({run.train.clip:g})."
    )
