"""Cross-entropy over the tokens that count, as a sum: the mean is taken over the whole global batch by `training/step`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.pack import IGNORED
from phalanx.models.ahead import ahead_targets


def summed_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum of the losses of all targets but the ignored ones, in fp32 whatever the logits are."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def objective(loss: Tensor, ahead: Sequence[Tensor], targets_BS: Tensor, documents_BS: Tensor | None, weight: float) -> Tensor:
    """What training makes small: the loss, plus `weight` times the mean of the losses of the tokens further `ahead`.

    `ahead` holds logits, the first for the token after the next; all losses are sums over the same batch.
    """
    if not ahead:
        return loss
    further = [
        summed_loss(logits, ahead_targets(targets_BS, documents_BS, depth)) for depth, logits in enumerate(ahead, start=1)
    ]
    return loss + weight * torch.stack(further).mean()
