"""Loss on held-out text, with the model as it is placed on the ranks. The trainer calls it between steps.

Ranks exchange stop requests next to every forward, and leave an evaluation together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.pack import Batch, Samples
from phalanx.events.records import Evaluated
from phalanx.observe import comm_timer
from phalanx.parallel.mesh import Mesh
from phalanx.training.micro_batch import MicroBatch
from phalanx.training.step import Stepper, StopRequest

Prepare = Callable[[Batch], MicroBatch]


class EvaluationStopped(Exception):
    """A rank was asked to stop before the evaluation was complete; all ranks have left it."""

    def __init__(self, request: int):
        super().__init__(request)
        self.request = request


@dataclass(frozen=True, slots=True)
class EvalSize:
    """How much of each source is evaluated."""

    sequences: int
    """Of each source, at most."""
    micro_batch: int


@torch.no_grad()
def evaluate(
    sources: Mapping[str, Samples],
    stepper: Stepper,
    prepare: Prepare,
    size: EvalSize,
    step: int,
    stop_request: StopRequest = lambda: 0,
) -> Evaluated | None:
    """Mean loss over the first held-out sequences of each source; None if nothing is held out. All ranks call it together."""
    if not sources:
        return None
    started = time.perf_counter()
    model = stepper.sharded
    for part in model.parts:
        part.eval()  # a custom model may have dropout
    exchange = _StopExchange(model.mesh, stop_request)
    try:
        rows = [_loss_and_tokens(samples, stepper, prepare, size, exchange) for samples in sources.values()]
    finally:
        for part in model.parts:
            part.train()
    exchange.wait()
    totals = model.mesh.all_reduce(torch.stack(rows))
    overall = _metrics(*totals.sum(0).tolist())
    return Evaluated(
        step=step,
        loss=overall["loss"],
        tokens=int(overall["tokens"]),
        seconds=time.perf_counter() - started,
        perplexity=overall["perplexity"],
        sources={name: _metrics(*row) for name, row in zip(sources, totals.tolist(), strict=True)},
    )


class _StopExchange:
    """Exchanges stop requests while the ranks compute: before each forward, ranks learn the requests of one forward earlier."""

    def __init__(self, mesh: Mesh, stop_request: StopRequest):
        self._mesh, self._stop_request = mesh, stop_request
        self._request = torch.zeros(1)
        self._work: dist.Work | None = None

    def wait(self) -> int:
        if self._work is not None:
            comm_timer.wait(self._work)
            self._work = None
        return int(self._request.item())

    def exchange(self) -> None:
        """Raises EvaluationStopped, on all ranks at the same time."""
        if request := self.wait():
            raise EvaluationStopped(request)
        self._request = torch.full((1,), float(self._stop_request()))
        self._work = self._mesh.start_all_reduce(self._request, dist.ReduceOp.MAX)


def _loss_and_tokens(samples: Samples, stepper: Stepper, prepare: Prepare, size: EvalSize, exchange: _StopExchange) -> Tensor:
    """This rank's sums of loss and target tokens of one source."""
    mesh, micro_batch = stepper.sharded.mesh, size.micro_batch
    count = min(size.sequences, samples.count)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    # Replicas take whole micro-batches in turn: the numbers added are the same for any number of replicas.
    for first in range(0, count, micro_batch * mesh.layout.replicas):
        exchange.exchange()
        begin = first + mesh.replica * micro_batch
        own = np.arange(begin, min(begin + micro_batch, count))
        # All ranks run the same number of forwards, which may wait for each other; a rank without a sequence repeats another's.
        batch = prepare(samples.batch(own if len(own) else np.arange(first, min(first + micro_batch, count))))
        measured = stepper.measure(batch)
        sums += measured if len(own) else 0
    return sums


def _metrics(loss: float, tokens: float) -> dict[str, float]:
    """The metrics of sums of loss and tokens."""
    mean = loss / max(tokens, 1)
    return {"loss": mean, "perplexity": math.inf if mean > 700 else math.exp(mean), "tokens": int(tokens)}
