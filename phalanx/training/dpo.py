"""Direct preference optimization (Rafailov et al., 2023): the loss of pairs of answers, from the log-probabilities of the model and of the
reference. `training/step` computes both; a window holds whole pairs, as `data/preferences` packs them.

    margin = log p(chosen) − log p(rejected)
    loss   = −(1 − ε) · log σ(β · (margin − margin of the reference)) − ε · log σ(−β · (margin − margin of the reference))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.pack import Batch
from phalanx.spec.run import Dpo

# Shapes: B windows, S positions of a window on this rank, P pairs of a window at most.


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a micro-batch: documents 2p and 2p + 1 of a window are the chosen and the rejected answer of its p-th pair."""

    documents_BS: Tensor
    """Index of the document in its window, of this rank's positions."""
    valid_BP: Tensor
    """1 where a window has a p-th pair."""
    count: float
    """Number of pairs, divided by the ranks that share their windows."""
    reference_BP: Tensor | None = None
    """Margins of the reference; None until they are computed."""

    @staticmethod
    def of(batch: Batch, own: np.ndarray | None, ranks: int, pinned: Callable[[Tensor], Tensor]) -> Pairs:
        """`own`: this rank's positions of each window, where `ranks` ranks share windows. `pinned`: prepares a tensor for the device."""
        most = int(batch.documents.max()) // 2 + 1
        counts = np.zeros((len(batch.documents), 2 * most), dtype=np.int64)
        rows, columns = np.nonzero(batch.targets >= 0)
        np.add.at(counts, (rows, batch.documents[rows, columns]), 1)
        valid = counts[:, ::2] > 0
        documents = batch.documents if own is None else np.ascontiguousarray(batch.documents[:, own])
        return Pairs(
            pinned(torch.from_numpy(documents.astype(np.int64))),
            pinned(torch.from_numpy(valid.astype(np.float32))),
            int(valid.sum()) / ranks,
        )

    def to(self, device: torch.device) -> Pairs:
        documents, valid = (tensor.to(device, non_blocking=True) for tensor in (self.documents_BS, self.valid_BP))
        return replace(self, documents_BS=documents, valid_BP=valid)

    def margins(self, losses_BS: Tensor) -> Tensor:
        """log p(chosen) − log p(rejected) of each pair, [B, P], from the losses of tokens; of a part of each window, its part of the sums."""
        indices = torch.arange(2 * self.valid_BP.shape[1], device=losses_BS.device)
        # A sum over a mask: the order of additions is fixed, unlike that of scattered ones.
        sums_BD = (losses_BS[:, :, None] * (self.documents_BS[:, :, None] == indices)).sum(1)
        chosen_BP, rejected_BP = sums_BD.unflatten(1, (-1, 2)).unbind(2)
        return rejected_BP - chosen_BP


class PairLosses(NamedTuple):
    """Sums over the pairs of a micro-batch."""

    loss: Tensor
    preferred: Tensor
    """Pairs whose chosen answer has gained more than the rejected one, relative to the reference."""
    reward: Tensor
    """β · (margin − margin of the reference)."""


def pair_losses(margins_BP: Tensor, pairs: Pairs, dpo: Dpo) -> PairLosses:
    assert pairs.reference_BP is not None, "the reference comes first"
    rewards_BP = dpo.beta * (margins_BP - pairs.reference_BP)
    losses_BP = -F.logsigmoid(rewards_BP)
    if dpo.label_smoothing:
        losses_BP = (1 - dpo.label_smoothing) * losses_BP - dpo.label_smoothing * F.logsigmoid(-rewards_BP)
    with torch.no_grad():
        preferred, reward = ((rewards_BP > 0) * pairs.valid_BP).sum(), (rewards_BP * pairs.valid_BP).sum()
    return PairLosses((losses_BP * pairs.valid_BP).sum(), preferred, reward)
