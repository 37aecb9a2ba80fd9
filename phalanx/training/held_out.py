"""Loss on text that is never trained on, with the model as it stands on the ranks. Called by the trainer between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from phalanx.data.pack import Batch, Samples
from phalanx.events.records import Evaluated
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.step import MicroBatch, Stepper

Prepare = Callable[[Batch], MicroBatch]


@torch.no_grad()
def evaluate(
    sources: Mapping[str, Samples], stepper: Stepper, prepare: Prepare, run: Run, plan: Plan, step: int
) -> Evaluated | None:
    """Mean loss over the first held-out sequences of each source; None if nothing is held out. All ranks call it together."""
    if not sources:
        return None
    started = time.perf_counter()
    placed = stepper.placed
    for part in placed.parts:
        part.eval()  # one's own model may behave otherwise in training
    rows = [_sums(samples, stepper, prepare, plan, run.train.eval_sequences) for samples in sources.values()]
    totals = placed.mesh.sum(torch.stack(rows))
    for part in placed.parts:
        part.train()
    whole = _measured(*totals.sum(0).tolist())
    return Evaluated(
        step=step,
        loss=whole["loss"],
        tokens=int(whole["tokens"]),
        seconds=time.perf_counter() - started,
        perplexity=whole["perplexity"],
        sources={name: _measured(*row) for name, row in zip(sources, totals.tolist(), strict=True)},
    )


def _sums(samples: Samples, stepper: Stepper, prepare: Prepare, plan: Plan, most: int) -> Tensor:
    """This rank's part of the loss and the target tokens of one source."""
    mesh, micro, count = stepper.placed.mesh, plan.micro_batch, min(most, samples.count)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    # Whole micro-batches go round the replicas: the numbers added are the same however many there are.
    for first in range(0, count, micro * plan.layout.replicas):
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
