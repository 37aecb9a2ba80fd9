"""Logits of the live model on any layout: for the check of exports and for samples. All ranks compute them together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.pack import Batch
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.parallel.vocab_parallel import Projected, VocabularyLoss
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch, own_positions
from phalanx.training.step import Stepper


def length_unit(run: Run, layout: Layout) -> int:
    """Ranks that share sequences divide multiples of this number of tokens evenly. train.sequence_length is one of them."""
    units = [1]
    if layout.context > 1:
        units.append(layout.context * (1 if layout.context_method == "ulysses" else 2))
    if layout.sequence or run.model.moe is not None:
        units.append(layout.context * layout.tensor)
    return math.lcm(*units)


def live_logits(stepper: Stepper, run: Run, layout: Layout, tokens_S: np.ndarray, kept_K: np.ndarray) -> Tensor:
    """Logits [K, V] in fp32 at the positions `kept_K` of one sequence, the same on every rank. The model is unchanged.

    The number of tokens is a multiple of `length_unit`.
    """
    model, mesh = stepper.sharded, stepper.sharded.mesh
    logits_KV = torch.zeros(len(kept_K), run.model.rows, device=mesh.device)
    own_S = own_positions(layout, mesh, len(tokens_S))
    rows, columns = np.nonzero(kept_K[:, None] == own_S)  # where this rank has a kept position

    def take(output: Any) -> None:
        logits_SV, first = _own_logits(output, model)
        if mesh.replica == 0 and first is not None:  # all replicas compute the same
            logits_KV[rows, first : first + logits_SV.shape[1]] = logits_SV[columns].float()

    batch = MicroBatch.prepare(_batch(tokens_S), mesh.device, run.data.document_mask, own_S)
    with stepper.evaluating(), stepper.uncompiled():  # the sequence has its own length
        stepper.forward(batch, take)
    # Every number comes from one rank and zeros from all others, so the sum is exact.
    return mesh.all_reduce(logits_KV)


def _batch(tokens_S: np.ndarray) -> Batch:
    """One sequence of one document."""
    zeros = np.zeros((1, len(tokens_S)), dtype=np.int32)
    positions = np.arange(len(tokens_S), dtype=np.int64)[None]
    return Batch(tokens_S[None].astype(np.int64), np.roll(tokens_S, -1)[None], positions, zeros, np.zeros(1, dtype=np.int64))


def _own_logits(output: Any, model: ShardedModel) -> tuple[Tensor, int | None]:
    """This rank's columns of the logits and the index of the first; None if another rank contributes the same."""
    if isinstance(output, Projected):
        output = F.linear(output.x_BSD, output.weight_VD)
    logits_SV = output[0]
    loss = model.loss
    if isinstance(loss, VocabularyLoss) and logits_SV.shape[-1] != loss.rows:
        return logits_SV, loss.share.first
    return logits_SV, 0 if model.mesh.coordinate("tensor") == 0 else None
