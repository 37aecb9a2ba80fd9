"""Cross-entropy over the tokens that count, as a sum: the mean is taken over the whole global batch by `training/step`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phalanx.data.pack import IGNORED


def summed_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum of the losses of all targets but the ignored ones, in fp32 whatever the logits are."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")
