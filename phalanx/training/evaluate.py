"""Loss on text that is never trained on, with the model as it stands on the ranks. Called by the trainer between steps.

A rank that is told to stop meanwhile is heard: the ranks tell each other beside every forward, and leave together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.pack import Batch, Samples
from phalanx.events.records import Evaluated
from phalanx.observe import comm_timer
from phalanx.parallel.mesh import Mesh
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import Stepper

Prepare = Callable[[Batch], MicroBatch]


class Left(Exception):
    """Some rank was told to end before the evaluation was complete: all have left it."""

    def __init__(self, told: int):
        super().__init__(told)
        self.told = told


@torch.no_grad()
def evaluate(
    sources: Mapping[str, Samples],
    stepper: Stepper,
    prepare: Prepare,
    job: tuple[Run, Plan],
    step: int,
    stopping: Callable[[], int] = lambda: 0,
) -> Evaluated | None:
    """Mean loss over the first held-out sequences of each source; None if nothing is held out. All ranks call it together."""
    if not sources:
        return None
    started = time.perf_counter()
    placed, (run, plan) = stepper.sharded, job
    for part in placed.parts:
        part.eval()  # one's own model may behave otherwise in training
    word = _Word(placed.mesh, stopping)
    try:
        rows = [_sums(samples, stepper, prepare, word, (plan, run.train.eval_sequences)) for samples in sources.values()]
    finally:
        for part in placed.parts:
            part.train()
    word.wait()
    totals = placed.mesh.all_reduce(torch.stack(rows))
    whole = _measured(*totals.sum(0).tolist())
    return Evaluated(
        step=step,
        loss=whole["loss"],
        tokens=int(whole["tokens"]),
        seconds=time.perf_counter() - started,
        perplexity=whole["perplexity"],
        sources={name: _measured(*row) for name, row in zip(sources, totals.tolist(), strict=True)},
    )


class _Word:
    """What ranks were told, on its way between them while they compute: each forward learns what was known before the last one."""

    def __init__(self, mesh: Mesh, stopping: Callable[[], int]):
        self._mesh, self._stopping = mesh, stopping
        self._told = torch.zeros(1)
        self._work: dist.Work | None = None

    def wait(self) -> int:
        if self._work is not None:
            comm_timer.wait(self._work)
            self._work = None
        return int(self._told.item())

    def pass_on(self) -> None:
        """Raises Left, on all ranks at the same time."""
        if told := self.wait():
            raise Left(told)
        self._told = torch.full((1,), float(self._stopping()))
        self._work = self._mesh.start_all_reduce(self._told, dist.ReduceOp.MAX)


def _sums(samples: Samples, stepper: Stepper, prepare: Prepare, word: _Word, extent: tuple[Plan, int]) -> Tensor:
    """This rank's part of the loss and the target tokens of one source, of so many sequences at most."""
    mesh, (plan, most) = stepper.sharded.mesh, extent
    micro, count = plan.micro_batch, min(most, samples.count)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    # Whole micro-batches go round the replicas: the numbers added are the same however many there are.
    for first in range(0, count, micro * plan.layout.replicas):
        word.pass_on()
        begin = first + mesh.replica * micro
        ours = np.arange(begin, min(begin + micro, count))
        # All ranks make equally many forwards, as forwards may wait for each other; one without a sequence repeats another.
        batch = prepare(samples.batch(ours if len(ours) else np.arange(first, min(first + micro, count))))
        measured = stepper.measure(batch)
        sums += measured if len(ours) else 0
    return sums


def _measured(loss: float, tokens: float) -> dict[str, float]:
    """What an evaluation says about sums of loss and tokens."""
    mean = loss / max(tokens, 1)
    return {"loss": mean, "perplexity": math.inf if mean > 700 else math.exp(mean), "tokens": int(tokens)}
