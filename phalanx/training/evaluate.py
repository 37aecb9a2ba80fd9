"""Loss on held-out text, with the model as it is placed on the ranks. They exchange stop requests next to every forward, and leave an
evaluation together."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.samples import Samples
from phalanx.events.records import Evaluated
from phalanx.observe import comm_timer
from phalanx.parallel.mesh import Mesh
from phalanx.training.micro_batch import BatchFeed
from phalanx.training.step import Stepper
from phalanx.training.step_totals import StopSignal


def evaluate(
    sources: Mapping[str, Samples], stepper: Stepper, feed: BatchFeed, step: int, stop_signal: StopSignal
) -> Evaluated | None:
    """Mean loss over the first held-out sequences of each source; all ranks call it together. None: nothing is held out, or a rank was
    asked to stop, and `stop_signal` says so."""
    if not sources:
        return None
    started = time.perf_counter()
    mesh = stepper.sharded.mesh
    exchange = StopExchange(mesh, stop_signal)
    rows = []
    with stepper.evaluating():
        for samples in sources.values():
            row = _loss_and_tokens(samples, stepper, feed, exchange)
            if row is None:
                return None
            rows.append(row)
    exchange.wait()
    totals = mesh.all_reduce(torch.stack(rows))
    is_text = feed.run.train.objective == "next-token"
    overall = metrics(*totals.sum(0).tolist(), is_text=is_text)
    return Evaluated(
        step=step,
        loss=overall["loss"],
        tokens=int(overall["tokens"]),
        seconds=time.perf_counter() - started,
        perplexity=overall.get("perplexity"),
        sources={name: metrics(*row, is_text=is_text) for name, row in zip(sources, totals.tolist(), strict=True)},
    )


class StopExchange:
    """Exchanges stop requests while the ranks compute: before each forward, ranks learn the requests of one forward earlier."""

    def __init__(self, mesh: Mesh, stop_signal: StopSignal):
        self._mesh, self._stop_signal = mesh, stop_signal
        self._request = torch.zeros(1)
        self._work: dist.Work | None = None

    def wait(self) -> int:
        if self._work is not None:
            comm_timer.wait(self._work)
            self._work = None
        return int(self._request.item())

    def stops(self) -> bool:
        """Whether a rank was asked to stop: true on all ranks at the same time."""
        if request := self.wait():
            self._stop_signal.agree(request)
            return True
        self._request = torch.full((1,), float(self._stop_signal.requested()))
        self._work = self._mesh.start_all_reduce(self._request, dist.ReduceOp.MAX)
        return False


def _loss_and_tokens(samples: Samples, stepper: Stepper, feed: BatchFeed, exchange: StopExchange) -> Tensor | None:
    """This rank's sums of loss and target tokens of one source; None if a rank was asked to stop."""
    mesh, micro_batch = stepper.sharded.mesh, feed.plan.micro_batch
    count = min(feed.run.train.eval_sequences, samples.count)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    # Replicas take whole micro-batches in turn: the numbers added are the same for any number of replicas.
    for first in range(0, count, micro_batch * mesh.layout.replicas):
        if exchange.stops():
            return None
        begin = first + mesh.replica * micro_batch
        own = np.arange(begin, min(begin + micro_batch, count))
        # All ranks run the same number of forwards, which may wait for each other; a rank without a sequence repeats another's.
        batch = feed.prepare(samples.batch(own if len(own) else np.arange(first, min(first + micro_batch, count))))
        measured = stepper.measure(batch)
        sums += measured if len(own) else 0
    return sums


def metrics(loss: float, tokens: float, *, is_text: bool) -> dict[str, float]:
    """Of preferences, `tokens` are pairs, and there is no perplexity."""
    mean = loss / max(tokens, 1)
    perplexity = {"perplexity": math.inf if mean > 700 else math.exp(mean)} if is_text else {}
    return {"loss": mean, **perplexity, "tokens": round(tokens)}
