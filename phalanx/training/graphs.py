"""CUDA graphs of a micro-batch: forward, loss and backward are recorded once and replayed, so that a small model does not wait for the host to
launch its kernels. `training/step` asks for them; what comes before and after (batch, sums over ranks, update) is launched as always."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.accelerator import Accelerator
from phalanx.training.micro_batch import MicroBatch

_FIRST_STEP = 3
"""Of a launch. Before it, code is compiled, memory is accounted, and libraries choose their kernels."""
_FIRST_AHEAD = 6
"""The first step at whose end the next forward is launched. The parts of earlier steps are timed."""
_MOST_RECORDS = 4
"""Each keeps gradients of its own; all share the memory of activations."""
_MAX_REASON = 300
_INPUTS = ("tokens", "targets", "positions", "documents")


class Graphs:
    """Records of one rank's micro-batches. A record is of one form: without masks between documents, or with up to a number of documents."""

    def __init__(self, part: nn.Module, device: Accelerator, loss_of: Callable[[MicroBatch], Tensor]):
        """`loss_of`: forward and summed loss of a micro-batch of `part`."""
        self._part, self._device, self._loss_of = part, device, loss_of
        self._pool: Any = None
        self._records: dict[int, Callable[..., Any]] = {}
        self._addresses: list[int] = []
        self._steps, self._paused, self._failed = 0, 0, False
        self._ahead: tuple[MicroBatch, MicroBatch, Tensor] | None = None

    def begin_step(self) -> None:
        self._steps += 1

    def pause(self) -> None:
        """From here to `resume` nothing is replayed: hooks of modules would not be called."""
        self._paused += 1

    def resume(self) -> None:
        self._paused -= 1

    def launch_ahead(self, batch: MicroBatch, device: torch.device) -> None:
        """Launches the forward of the next step behind the update, so that the device computes while the host ends this step and begins the next."""
        if self._steps >= _FIRST_AHEAD:
            moved = batch.to(device)
            loss = self.loss(moved)
            self._ahead = None if loss is None else (batch, moved, loss)

    def take_ahead(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor] | None:
        """What was launched ahead for this micro-batch, as (micro-batch on the device, summed loss)."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None or ahead[0] is not batch else ahead[1:]

    def loss(self, batch: MicroBatch) -> Tensor | None:
        """The summed loss, with a backward; None if this micro-batch is to be computed without graphs."""
        self._ahead = None  # replays write where the last one did
        if self._paused or self._failed or self._steps < _FIRST_STEP:
            return None
        addresses = [parameter.data_ptr() for parameter in self._part.parameters()]
        if addresses != self._addresses:  # a record reads and writes where it was made
            self._records.clear()
            self._addresses, self._pool = addresses, self._device.record_pool()
        documents = _capacity(batch)
        known = documents in self._records
        if not known and (len(self._records) == _MOST_RECORDS or not self._record(batch, documents)):
            return None
        loss: Tensor = self._records[documents](*_tensors(batch))
        return loss

    def _record(self, batch: MicroBatch, documents: int) -> bool:
        if documents and batch.spans is None:
            return False  # a mask of the size of all scores: such a model does not wait for the host
        if batch.spans is not None:
            batch = replace(batch, spans=batch.spans.padded(documents, batch.tokens.shape[1]))
        inputs = tuple(tensor.clone() for tensor in _tensors(batch))  # the record's own: replays copy values into them
        self._device.empty_cache()  # what earlier steps needed is not needed again
        try:
            found = self._device.record(_Loss(self._part, self._loss_of, batch), inputs, self._pool)
        except RuntimeError as error:
            reason = textwrap.shorten(str(error), _MAX_REASON, placeholder=" …")
            print(f"memory.cuda_graphs: torch cannot record the step, which runs without graphs: {reason}", file=sys.stderr)
            found = None
        if found is None:
            self._failed = True
            return False
        self._records[documents] = found
        return True


class _Loss(nn.Module):
    """A micro-batch's loss as a function of tensors alone."""

    def __init__(self, part: nn.Module, loss_of: Callable[[MicroBatch], Tensor], form: MicroBatch):
        super().__init__()
        self.part, self._loss_of, self._form = part, loss_of, form

    def forward(self, *tensors: Tensor) -> Tensor:
        return self._loss_of(_with_tensors(self._form, tensors))


def _capacity(batch: MicroBatch) -> int:
    """Documents of the record for a micro-batch: a power of four times its rows, so that few records are made; 0 without masks."""
    if batch.documents is None:
        return 0
    rows, count = len(batch.tokens), batch.spans.documents if batch.spans is not None else 1
    capacity = 4 * rows
    while capacity < count:
        capacity *= 4
    return min(capacity, batch.tokens.numel())


def _tensors(batch: MicroBatch) -> list[Tensor]:
    found = [tensor for name in _INPUTS if (tensor := getattr(batch, name)) is not None]
    return found if batch.spans is None else [*found, batch.spans.bounds]


def _with_tensors(form: MicroBatch, tensors: tuple[Tensor, ...]) -> MicroBatch:
    names = [name for name in _INPUTS if getattr(form, name) is not None]
    given: dict[str, Any] = dict(zip(names, tensors, strict=False))
    spans = None if form.spans is None else replace(form.spans, bounds=tensors[-1])
    return replace(form, spans=spans, **given)
