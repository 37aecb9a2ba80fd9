"""Cross-entropy summed over the targets that are not masked. `training/step` divides by their number in the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.pack import IGNORED
from phalanx.models.decoder import mtp_targets


def summed_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum of the losses of all targets that are not ignored, computed in fp32."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


class Targets(Protocol):
    """The fields of a micro-batch that losses read."""

    @property
    def targets(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor | None: ...


def objective(
    loss: Tensor,
    mtp_logits: Sequence[Any],
    batch: Targets,
    weight: float,
    loss_of: Callable[[Any, Tensor], Tensor] = summed_loss,
) -> Tensor:
    """The loss that training minimizes: the next-token loss plus `weight` times the mean loss of multi-token prediction.

    `mtp_logits`: logits, or what `loss_of` takes in their place, first those of the token after the next. All losses are sums over
    the same batch.
    """
    if not mtp_logits:
        return loss
    losses = [
        loss_of(logits, mtp_targets(batch.targets, batch.documents, depth)) for depth, logits in enumerate(mtp_logits, start=1)
    ]
    return loss + weight * torch.stack(losses).mean()
