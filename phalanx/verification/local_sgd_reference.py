"""Local SGD (DiLoCo) in one process: replicas that train separately and synchronize every few steps. `verification/parity` compares
ranks with it. It shares the trainer's steps with the ranks, but none of their synchronization.

Each replica has a thread, because all replicas skip a step that overflows in one, which none knows before the others get there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from phalanx.data.loader import ReplicaShare
from phalanx.models.moe import Router, routers
from phalanx.parallel.mesh import Mesh
from phalanx.training.step_totals import Outcome
from phalanx.training.trainer import Trainer
from phalanx.verification.cases import Case
from phalanx.verification.recorder import StepRecord, copied, record_steps

_TIMEOUT = 100.0  # seconds that a replica waits for the others


def replicas(mesh: Mesh, case: Case) -> Iterator[list[StepRecord]]:
    """The records of each replica. The loss of a step is that of all replicas together, as a run reports it."""
    trainers = [_Replica(mesh, case, number) for number in range(case.layout.data or 1)]
    for trainer in trainers:
        trainer.build()
    outer, balance, agreement = _OuterOptimizer(trainers, case), _RouterBalance(trainers), _Agreement(trainers)
    recorders = [record_steps(trainer, case.steps) for trainer in trainers]
    records: list[list[StepRecord]] = [[] for _ in trainers]
    with ThreadPoolExecutor(len(trainers)) as threads:
        for step in range(case.steps + 1):
            now = list(threads.map(agreement.next_record, recorders))
            balance.update()
            if step and step % case.run.optimizer.sync_every == 0:
                outer.synchronize()
            loss, batch = agreement.totals(now) if step else (None, "")
            for record, own in zip(now, records, strict=True):
                record.gradients, record.parameters = copied(record.gradients), copied(record.parameters)
                record.loss, record.batch = loss, batch
                own.append(record)
    for trainer in trainers:
        trainer.close()
    yield from records


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
        self._start = self._values(trainers[0])
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
        return {owned.name: owned.value.detach() for owned in trainer.sharded.owned}

    def _values(self, trainer: Trainer) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._live(trainer).items()}


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
    """Exchange between replicas in every step: whether it is skipped, and its totals."""

    def __init__(self, trainers: list[_Replica]):
        self._barrier = Barrier(len(trainers), timeout=_TIMEOUT)
        self._finite = [True] * len(trainers)
        self._outcomes: list[Outcome | None] = [None] * len(trainers)
        for number, trainer in enumerate(trainers):
            trainer.stepper.agree = partial(self._agreed, number)  # type: ignore[method-assign]
            trainer.stepper.step = partial(self._keep_outcome, number, trainer.stepper.step)  # type: ignore[method-assign]

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
        return torch.tensor(all_finite)

    def _keep_outcome(self, number: int, step: Any, *args: Any) -> Outcome:
        self._outcomes[number] = outcome = step(*args)
        return outcome

    def totals(self, now: list[StepRecord]) -> tuple[float, str]:
        """Mean loss, token count and digest of the whole batch, from the replicas' parts."""
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        tokens = sum(outcome.tokens for outcome in outcomes)
        loss = sum(outcome.loss * outcome.tokens for outcome in outcomes) / tokens
        return loss, "" if now[0].skipped else f"{tokens} {sum(int(outcome.digest, 16) for outcome in outcomes):x}"
