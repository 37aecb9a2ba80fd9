"""The steps that ranks are compared with: the same run in one process, recorded step by step into a file.

The reference of local SGD (DiLoCo) is one process with replicas that train separately and synchronize every few steps. It
shares the trainer's steps with the ranks, but none of their synchronization. Each replica has a thread, because all replicas
skip a step that overflows in one, which none knows before the others get there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from zlib import crc32

import torch
from torch import Tensor

from phalanx.data.loader import ReplicaShare
from phalanx.events.records import StepSkipped
from phalanx.models.moe import Router, routers
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard, ShardedModel
from phalanx.training.hooks import StepHook
from phalanx.training.step_totals import Outcome
from phalanx.training.trainer import Trainer
from phalanx.verification.cases import Case
from phalanx.verification.tolerance import FLOOR, Noise

_TIMEOUT = 100.0  # seconds that a replica waits for the others

ShardValue = tuple[Tensor, ParamShard]
"""The values of a shard, and its position in the whole tensor."""


@dataclass(slots=True)
class StepRecord:
    """The state of a trainer after a step; step 0 is before the first."""

    step: int
    loss: float | None = None
    norm: float | None = None
    """Norm of the whole gradient."""
    batch: str = ""
    """Token count and digest of the batch."""
    skipped: bool = False
    outcome: Outcome | None = None
    gradients: dict[str, ShardValue] = field(default_factory=dict)
    """Gradients after the reduction over ranks, before clipping and scaling."""
    parameters: dict[str, ShardValue] = field(default_factory=dict)
    """Parameters and persistent buffers."""


class _StepRecorder(StepHook):
    """Keeps the gradients and the outcome of the last step."""

    def __init__(self, model: ShardedModel):
        self._model = model
        self.gradients: dict[str, ShardValue] = {}
        self.outcome: Outcome | None = None

    def on_update(self, step: int) -> None:
        # After the reduction and before the update, which may change gradients in place, as Muon does.
        self.gradients = {
            owned.name: (owned.gradient.detach().clone(), owned.shard)
            for owned in self._model.owned
            if owned.gradient is not None
        }

    def on_step_taken(self, step: int, outcome: Outcome) -> None:
        self.outcome = outcome


class _Disturbance(StepHook):
    """Adds random noise to every gradient before the update, the same in every process."""

    def __init__(self, model: ShardedModel, size: float):
        """`size`: root mean square of the noise, relative to that of the gradient."""
        self._model, self._size = model, size

    def on_update(self, step: int) -> None:
        gradients = {owned.name: owned.gradient for owned in self._model.owned if owned.gradient is not None}
        sizes = {name: gradient.float().square().mean().sqrt().item() for name, gradient in gradients.items()}
        floor = FLOOR * max(sizes.values(), default=0.0)  # a gradient that is zero except for rounding has more of it
        for name, gradient in gradients.items():
            generator = torch.Generator(gradient.device).manual_seed(crc32(f"{step} {name}".encode()))
            noise = torch.randn(gradient.shape, generator=generator, device=gradient.device)
            gradient.copy_(gradient.float().add_(noise, alpha=self._size * max(sizes[name], floor)))


def record_steps(trainer: Trainer, steps: int, disturbance: float = 0.0) -> Iterator[StepRecord]:
    """Takes the trainer's steps and yields a record of each. Tensors are live: copy what has to outlive the next step.

    `disturbance`: relative size of the noise that is added to gradients after they are recorded."""
    recorder = _StepRecorder(trainer.sharded)
    trainer.hooks.add(recorder)
    if disturbance:
        trainer.hooks.add(_Disturbance(trainer.sharded, disturbance))
    yield StepRecord(0, parameters=_parameters(trainer))
    for number in range(1, steps + 1):
        event = trainer.step()
        assert event is not None, "nothing stops this trainer"
        yield StepRecord(
            step=number,
            loss=event.loss,
            norm=event.grad_norm,
            batch="" if isinstance(event, StepSkipped) else f"{event.tokens} {event.batch_digest}",
            skipped=isinstance(event, StepSkipped),
            outcome=recorder.outcome,
            gradients=recorder.gradients,
            parameters=_parameters(trainer),
        )


def _parameters(trainer: Trainer) -> dict[str, ShardValue]:
    """The model state that a checkpoint would store, and what is frozen."""
    values = {}
    for name, piece in (trainer.state.frozen() | trainer.tensors()).items():
        if name.startswith("model/"):
            tensor = piece.tensor if isinstance(piece.tensor, Tensor) else piece.tensor.read()
            values[name.removeprefix("model/")] = tensor.detach(), ParamShard(piece.slice)
    if trainer.run.optimizer.sync_every > 1:  # between two syncs, a checkpoint stores the state of the last sync
        values |= {owned.name: (owned.value.detach(), owned.shard) for owned in trainer.sharded.trained}
    return values


def _copy(record: StepRecord) -> StepRecord:
    def copied(values: Mapping[str, ShardValue]) -> dict[str, ShardValue]:
        return {name: (tensor.to("cpu", torch.float32, copy=True), shard) for name, (tensor, shard) in values.items()}

    return replace(record, gradients=copied(record.gradients), parameters=copied(record.parameters))


@dataclass(frozen=True, slots=True)
class Reference:
    """The recorded steps of one process, in a file."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    """Shapes of parameters and buffers, in the order of the model."""
    noise: Noise | None = None
    """What rounding does to these steps, if it was measured."""


def train_reference(mesh: Mesh, case: Case, path: Path) -> Reference:
    """Trains the reference and saves its steps; with local SGD, those of every replica."""
    records = reference_records(mesh, case)
    torch.save(records, path)
    return Reference(path, {name: shard.slice.whole for name, (_, shard) in records[0][0].parameters.items()})


def reference_records(mesh: Mesh, case: Case, disturbance: float = 0.0) -> list[list[StepRecord]]:
    """The steps of the reference; with local SGD, those of every replica. `disturbance`: see `record_steps`."""
    if case.run.optimizer.sync_every > 1:
        return _replicas(mesh, case, disturbance)
    trainer = case_trainer(mesh, case, reference=True)
    records = list(map(_copy, record_steps(trainer, case.steps, disturbance)))
    trainer.close()
    return [records]


def case_trainer(mesh: Mesh, case: Case, *, reference: bool) -> Trainer:
    """The trainer of one rank of a case, or of its reference."""
    run, plan = (case.reference, case.reference_plan) if reference else (case.run, case.plan)
    run = replace(run, resilience=replace(run.resilience, check_every=0))  # the comparison covers replicas
    # No checkpoint is ever saved there; offloading writes its files there.
    trainer = Trainer(run, plan, mesh, Path(case.folder) / ("reference" if reference else "ranks") / "checkpoints")
    trainer.build()
    return trainer


def _replicas(mesh: Mesh, case: Case, disturbance: float) -> list[list[StepRecord]]:
    """The records of each replica. The loss of a step is that of all replicas together, as a run reports it."""
    trainers = [_Replica(mesh, case, number) for number in range(case.layout.data or 1)]
    for trainer in trainers:
        trainer.build()
    outer, balance, agreement = _OuterOptimizer(trainers, case), _RouterBalance(trainers), _Agreement(trainers)
    recorders = [record_steps(trainer, case.steps, disturbance) for trainer in trainers]
    records: list[list[StepRecord]] = []
    with ThreadPoolExecutor(len(trainers)) as threads:
        for step in range(case.steps + 1):
            now = list(threads.map(agreement.next_record, recorders))
            balance.update()
            if step and step % case.run.optimizer.sync_every == 0:
                outer.synchronize()
            loss, batch = _totals(now) if step else (None, "")
            records.append([replace(_copy(record), loss=loss, batch=batch) for record in now])
    for trainer in trainers:
        trainer.close()
    return [list(own) for own in zip(*records, strict=True)]


class _Replica(Trainer):
    """A single-process trainer that reads one replica's part of every batch."""

    def __init__(self, mesh: Mesh, case: Case, number: int):
        each = case.reference.batch // (case.layout.data or 1)
        optimizer = replace(case.reference.optimizer, sync_every=1)  # synchronization happens outside of the trainer
        train = replace(case.reference.train, batch=each, batch_tokens=None)
        run = replace(case.reference, train=train, optimizer=optimizer)
        plan = replace(case.reference_plan, accumulation=each // case.reference_plan.micro_batch)
        super().__init__(run, plan, mesh, Path(case.folder) / f"replica-{number}" / "checkpoints")
        self.feed.share = ReplicaShare(
            batch=case.reference.batch,
            replica=number,
            replicas=case.layout.data or 1,
            micro_batch=case.reference_plan.micro_batch,
        )


class _OuterOptimizer:
    """The outer optimizer: every sync_every steps, the mean movement of the replicas is a gradient for Nesterov momentum."""

    def __init__(self, trainers: list[_Replica], case: Case):
        self._trainers, self._spec = trainers, case.run.optimizer
        self._start = {name: value.clone() for name, value in self._live(trainers[0]).items()}
        self._momentum = {name: torch.zeros_like(value) for name, value in self._start.items()}

    @torch.no_grad()
    def synchronize(self) -> None:
        spec = self._spec
        for name, start in self._start.items():
            moved = start - torch.stack([self._live(trainer)[name] for trainer in self._trainers]).mean(0)
            momentum = self._momentum[name].mul_(spec.outer_momentum).add_(moved)
            start.sub_(moved + spec.outer_momentum * momentum, alpha=spec.outer_learning_rate)
            for trainer in self._trainers:
                self._live(trainer)[name].copy_(start)
        for trainer in self._trainers:
            trainer.sharded.engine.updated()

    @staticmethod
    def _live(trainer: Trainer) -> dict[str, Tensor]:
        return {owned.name: owned.value.detach() for owned in trainer.sharded.trained}


class _RouterBalance:
    """Balances routers in every step by the token counts of all replicas, instead of those of each."""

    def __init__(self, trainers: list[_Replica]):
        self._routers = [routers(trainer.model) for trainer in trainers]
        self._counts: dict[str, list[Tensor]] = {}
        for own in self._routers:
            for name, router in own.items():
                router.rebalance = partial(self._record, name)  # type: ignore[method-assign]

    def _record(self, name: str, counts_E: Tensor) -> None:
        self._counts.setdefault(name, []).append(counts_E.clone())

    def update(self) -> None:
        for name, counts in self._counts.items():
            for own in self._routers:
                Router.rebalance(own[name], torch.stack(counts).sum(0))
        self._counts.clear()


class _Agreement:
    """Agreement of the replicas in every step on whether it is skipped."""

    def __init__(self, trainers: list[_Replica]):
        self._barrier = Barrier(len(trainers), timeout=_TIMEOUT)
        self._finite = [True] * len(trainers)
        for number, trainer in enumerate(trainers):
            trainer.stepper.agree = partial(self._agreed, number)  # type: ignore[method-assign]

    def next_record(self, recorder: Iterator[StepRecord]) -> StepRecord:
        """The next record of one replica; an error releases the others."""
        try:
            return next(recorder)
        except BrokenBarrierError:
            raise
        except BaseException:
            self._barrier.abort()
            raise

    def _agreed(self, number: int, finite: Tensor) -> Tensor:
        self._finite[number] = bool(finite)
        self._barrier.wait()
        all_finite = all(self._finite)
        self._barrier.wait()  # no replica writes its next value before all have read this one
        return torch.tensor(all_finite, device=finite.device)


def _totals(now: Sequence[StepRecord]) -> tuple[float, str]:
    """Mean loss, token count and digest of the whole batch, from the replicas' parts."""
    outcomes = [record.outcome for record in now if record.outcome is not None]
    tokens = sum(outcome.tokens for outcome in outcomes)
    loss = sum(outcome.loss * outcome.weight for outcome in outcomes) / sum(outcome.weight for outcome in outcomes)
    return loss, "" if now[0].skipped else f"{tokens} {sum(int(outcome.digest, 16) for outcome in outcomes):x}"
