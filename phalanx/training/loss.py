"""Cross-entropy over the tokens that count, as a sum: the mean is taken over the whole global batch by `training/step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.pack import IGNORED
from phalanx.models.mtp import mtp_targets


def summed_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum of the losses of all targets but the ignored ones, in fp32 whatever the logits are."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


class Targets(Protocol):
    """The parts of a micro-batch that losses read."""

    @property
    def targets(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor | None: ...


def objective(
    loss: Tensor, ahead: Sequence[Any], batch: Targets, weight: float, measure: Callable[[Any, Tensor], Tensor] = summed_loss
) -> Tensor:
    """What training makes small: the loss, plus `weight` times the mean of the losses of the tokens further `ahead`.

    `ahead` holds logits, or what `measure` takes for them, the first for the token after the next; all losses are sums over the
    same batch.
    """
    if not ahead:
        return loss
    further = [
        measure(logits, mtp_targets(batch.targets, batch.documents, depth)) for depth, logits in enumerate(ahead, start=1)
    ]
    return loss + weight * torch.stack(further).mean()
