"""What the trainers share: the tokens of each step, Phalanx's initial weights, and the loop of a trainer that keeps fp32 weights and lets
autocast cast them. The hand-written loop has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.data.dataset import open_dataset
from phalanx.data.loader import ReplicaShare
from phalanx.data.pack import Batch
from phalanx.events.records import Event, Step, StepSkipped
from phalanx.models import init
from phalanx.optim.optimizer import learning_rate
from phalanx.spec.errors import RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

_PROBED = 256
"""Tokens whose losses the trainers compare before the first step."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What peers compute in, by the format of the run. No peer computes in fp8."""


@dataclass(frozen=True)
class PeerJob:
    """What a peer trains: the run, and everything that follows from it."""

    run: Run
    plan: Plan
    compile: bool
    on_host: bool = False
    """Tensors are for another library than torch, which puts them on the device itself."""

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.on_host else accelerator.of(self.plan.device).device()

    @property
    def dtype(self) -> torch.dtype:
        """The format of matrix products."""
        return _AUTOCAST.get(self.plan.compute, torch.float32)

    @property
    def compute(self) -> str:
        """The same, by its name in a run file."""
        return "fp32" if self.dtype == torch.float32 else "bf16"

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of every step, already on the device."""
        batches = (self._batch(step) for step in range(self.run.steps))
        return [(self._tensor(batch.tokens), self._tensor(batch.targets)) for batch in batches]

    @cached_property
    def probe(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [1, S] each, of the beginning of the first sequence."""
        first = self._batch(0)
        return self._tensor(first.tokens[:1, :_PROBED]), self._tensor(first.targets[:1, :_PROBED])

    @cached_property
    def _data(self) -> Any:
        return open_dataset(self.run.data, self.run.train.sequence_length, self.run.train.seed)

    def _batch(self, step: int) -> Batch:
        size = self.run.batch
        share = ReplicaShare(batch=size, replica=0, replicas=1, micro_batch=size)
        batch: Batch = self._data.train.batch(share.samples(step * size))
        return batch

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return learning_rate(self.run.optimizer, step, self.run.steps)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Phalanx's names and initial values, one tensor at a time. They follow from seed and name alone, so no process sends them."""
        spec = self.run.model
        for name, shape in init.build(spec).state_dict().items():
            value = torch.empty(shape.shape, device=self.device)
            init.fill(value, self.run.train.seed, name, spec)
            yield name, value

    def adamw(self, params: list[Tensor]) -> torch.optim.AdamW:
        """torch's fused AdamW. As in Phalanx, norms and biases do not decay."""
        chosen = self.run.optimizer
        groups: list[dict[str, Any]] = [
            {"params": [param for param in params if param.ndim >= 2], "weight_decay": chosen.weight_decay},
            {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(
            groups, lr=chosen.learning_rate, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps, fused=True
        )


def token_losses(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """The loss of every token, [B·S], in fp32; 0 where the target is ignored."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), reduction="none")


def next_loss(events: Iterator[Event]) -> float:
    """Takes a step of a trainer of Phalanx; returns its loss."""
    for event in events:
        if isinstance(event, StepSkipped):
            raise RunFailed(f"step {event.step} was skipped: loss or gradient was not finite")
        if isinstance(event, Step):
            return event.loss
    raise RunFailed("the run ended before its last step")


Losses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(tokens, targets) to the loss to report, a mean over targets, and the loss to minimize."""


class PeerLoop:
    """A training loop as most people write it: forward under autocast, backward, clipping, fused AdamW on fp32 weights.

    Stacked weights of experts are in 16 bits next to fp32 masters: autocast does not know torch's grouped products, which are slow in fp32.
    """

    def __init__(self, job: PeerJob, model: nn.Module, losses: Losses, *, autocast: bool = True):
        """`autocast`: off where the model's own wrapper casts."""
        self._job, self._losses, self._autocast = job, losses, autocast and job.dtype != torch.float32
        params = [param for param in model.parameters() if param.requires_grad]
        self._low: list[Tensor] = [param for param in params if param.ndim == 3 and self._autocast]
        self._masters = [param.detach().clone() for param in self._low]
        for param in self._low:
            param.data = param.data.to(job.dtype)
        self._params: list[Tensor] = [*(param for param in params if param.dtype == torch.float32), *self._masters]
        """What the optimizer updates."""
        self._optimizer = job.adamw(list(self._params))
        self._taken = 0

    def step(self) -> Tensor:
        """Takes one step; returns its loss, without waiting for it."""
        tokens, targets = self._job.batches[self._taken]
        self._optimizer.zero_grad(set_to_none=True)
        with self.computing():
            loss, whole = self._losses(tokens, targets)
        whole.backward()
        for param, master in zip(self._low, self._masters, strict=True):
            master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        nn.utils.clip_grad_norm_(self._params, self._job.run.train.clip, foreach=True)
        for group in self._optimizer.param_groups:
            group["lr"] = self._job.rate(self._taken)
        self._optimizer.step()
        if self._low:
            with torch.no_grad():
                torch._foreach_copy_(self._low, self._masters)
        self._taken += 1
        return loss.detach()

    def computing(self) -> AbstractContextManager[Any]:
        """The context of a forward."""
        return torch.autocast(self._job.device.type, self._job.dtype) if self._autocast else nullcontext()
