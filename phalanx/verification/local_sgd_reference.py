"""Replicas that step by themselves and meet now and then, side by side in one process: the plain reading of local SGD that
`verification/sides` holds the ranks against. It shares the trainer's steps with them and nothing of how they meet.

Each has a thread, because a step that overflows in one is skipped by all, which none can know before the others got as far.
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
from phalanx.verification.case import Case
from phalanx.verification.recorder import Moment, copied, moments

_PATIENCE = 100.0  # seconds that a replica waits for the others


def replicas(mesh: Mesh, case: Case) -> Iterator[list[Moment]]:
    """The moments of each replica. Loss and norm of a step are of all replicas together where a run reports them so."""
    trainers = [_Replica(mesh, case, number) for number in range(case.layout.data or 1)]
    for trainer in trainers:
        trainer.build()
    outer, balance, agreement = _Outer(trainers, case), _Balance(trainers), _Agreement(trainers)
    watched = [moments(trainer, case.steps) for trainer in trainers]
    taken: list[list[Moment]] = [[] for _ in trainers]
    with ThreadPoolExecutor(len(trainers)) as threads:
        for step in range(case.steps + 1):
            now = list(threads.map(agreement.watch, watched))
            balance.settle()
            if step and step % case.run.optimizer.sync_every == 0:
                outer.meet()
            loss, batch = agreement.step_group(now) if step else (None, "")
            for moment, kept in zip(now, taken, strict=True):
                moment.gradients, moment.parameters = copied(moment.gradients), copied(moment.parameters)
                moment.loss, moment.batch = loss, batch
                kept.append(moment)
    for trainer in trainers:
        trainer.close()
    yield from taken


class _Replica(Trainer):
    """A trainer of one process that sees one replica's part of every batch."""

    def __init__(self, mesh: Mesh, case: Case, number: int):
        each = case.alone.batch // (case.layout.data or 1)
        optimizer = replace(case.alone.optimizer, sync_every=1)  # it meets nobody by itself
        train = replace(case.alone.train, batch=each, batch_tokens=None)
        run = replace(case.alone, train=train, optimizer=optimizer)
        plan = replace(case.alone_plan, accumulation=each // case.alone_plan.micro_batch)
        super().__init__(run, plan, mesh, Path(case.folder) / f"replica-{number}" / "checkpoints")
        self.feed.share = ReplicaShare(
            batch=case.alone.batch, replica=number, replicas=case.layout.data or 1, micro_batch=case.alone_plan.micro_batch
        )


class _Outer:
    """Every so many steps: what the replicas have moved by, on the mean, is a gradient for Nesterov's momentum."""

    def __init__(self, trainers: list[_Replica], case: Case):
        self._trainers, self._spec = trainers, case.run.optimizer
        self._start = self._values(trainers[0])
        self._momentum = {name: torch.zeros_like(value) for name, value in self._start.items()}

    @torch.no_grad()
    def meet(self) -> None:
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
        return {one.name: one.value.detach() for one in trainer.sharded.owned}

    def _values(self, trainer: Trainer) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._live(trainer).items()}


class _Balance:
    """Routers are balanced in every step by the tokens of all replicas: what each would do by its own waits for the others."""

    def __init__(self, trainers: list[_Replica]):
        self._routers = [routers(trainer.model) for trainer in trainers]
        self._counts: dict[str, list[Tensor]] = {}
        for of_one in self._routers:
            for name, router in of_one.items():
                router.rebalance = partial(self._note, name)  # type: ignore[method-assign]

    def _note(self, name: str, counts_E: Tensor) -> None:
        self._counts.setdefault(name, []).append(counts_E.clone())

    def settle(self) -> None:
        for name, counts in self._counts.items():
            for of_one in self._routers:
                Router.rebalance(of_one[name], torch.stack(counts).sum(0))
        self._counts.clear()


class _Agreement:
    """What replicas tell each other in every step: whether it is to be skipped, and what they saw."""

    def __init__(self, trainers: list[_Replica]):
        self._barrier = Barrier(len(trainers), timeout=_PATIENCE)
        self._good = [True] * len(trainers)
        self._seen: list[Outcome | None] = [None] * len(trainers)
        for number, trainer in enumerate(trainers):
            trainer.stepper.agree = partial(self._agreed, number)  # type: ignore[method-assign]
            trainer.stepper.step = partial(self._see, number, trainer.stepper.step)  # type: ignore[method-assign]

    def watch(self, watched: Iterator[Moment]) -> Moment:
        """The next moment of one replica; one that raises lets the others go."""
        try:
            return next(watched)
        except BrokenBarrierError:
            raise
        except BaseException:
            self._barrier.abort()
            raise

    def _agreed(self, number: int, good: Tensor) -> Tensor:
        self._good[number] = bool(good)
        self._barrier.wait()
        together = all(self._good)
        self._barrier.wait()  # nobody says the next before everybody has read this
        return torch.tensor(together)

    def _see(self, number: int, step: Any, *args: Any) -> Outcome:
        self._seen[number] = outcome = step(*args)
        return outcome

    def step_group(self, now: list[Moment]) -> tuple[float, str]:
        """Mean loss, and tokens and checksum, of the replicas' parts of a batch: as the whole batch would report them."""
        seen = [outcome for outcome in self._seen if outcome is not None]
        tokens = sum(outcome.tokens for outcome in seen)
        loss = sum(outcome.loss * outcome.tokens for outcome in seen) / tokens
        return loss, "" if now[0].skipped else f"{tokens} {sum(int(outcome.digest, 16) for outcome in seen):x}"
