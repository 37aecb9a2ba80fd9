"""Micro-batches: the tensors that one forward reads, their loss, and the feed that gives a rank those of each step. `training/step`
computes on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx import accelerator
from phalanx.data.dataset import Dataset
from phalanx.data.loader import Loader, ReplicaShare
from phalanx.data.pack import IGNORED, Batch
from phalanx.kernels.document_attention import DocumentSpans, available
from phalanx.models.decoder import mtp_targets
from phalanx.parallel.context.context_parallel import rank_positions
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.dpo import Pairs
from phalanx.transforms.dropout import mask_keys


def step_seed(seed: int, step: int, replica: int) -> int:
    """Seed of a step's random numbers, such as dropout of a custom module.

    It depends on the step alone, so that a resumed run draws the same numbers, and is the same on all ranks of one replica.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {replica}".encode()).digest()[:8], "little") >> 1


def own_positions(layout: Layout, mesh: Mesh, length: int) -> np.ndarray:
    """This rank's positions of a sequence."""
    if layout.context == 1:
        return np.arange(length)
    return rank_positions(length, layout.context, mesh.coordinate("context"), layout.context_method)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one forward."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    """Document ids of whole sequences, even where this rank has only some of their tokens."""
    counted: int
    """Number of targets that are not masked."""
    digest: int
    """Sum of the samples' checksums, each over the sample's index and token ids."""
    spans: DocumentSpans | None = None
    """Where the documents are, for the kernels of GPUs that need no mask."""
    pairs: Pairs | None = None
    """Of preferences."""
    mask_keys: Tensor | None = None
    """Of dropout, a number for each of this rank's tokens."""

    @property
    def weight(self) -> float:
        """What the sum of its losses is divided by: targets, or pairs of preferences."""
        return self.counted if self.pairs is None else self.pairs.count

    @staticmethod
    def prepare(batch: Batch, device: torch.device, document_mask: bool, own: np.ndarray | None = None) -> MicroBatch:
        """Converts the loader's arrays, in the loader's thread. For GPUs they are pinned, so that the copy overlaps with the step.

        `own`: this rank's positions of each sequence, where ranks share sequences.
        """
        kind = accelerator.of(device)

        def tensor(array: np.ndarray) -> Tensor:
            return kind.pin(torch.from_numpy(array))

        def select(array: np.ndarray) -> np.ndarray:
            return array if own is None else np.ascontiguousarray(array[:, own])

        # A window inside one document needs no mask, and GPUs have a much faster kernel for that. CPUs gain nothing, and with one
        # kernel for all windows the numbers do not depend on how windows are grouped.
        masked = document_mask and (batch.has_boundaries or not kind.asynchronous)
        spans = DocumentSpans.of(batch.documents) if masked and own is None and available(device) else None
        return MicroBatch(
            tokens=tensor(select(batch.tokens)),
            targets=tensor(select(batch.targets)),
            positions=tensor(select(batch.positions)),
            documents=tensor(batch.documents) if masked else None,  # whole: a rank's queries see other ranks' keys
            spans=None if spans is None else replace(spans, bounds=kind.pin(spans.bounds)),
            counted=int((select(batch.targets) >= 0).sum()),
            digest=batch.digest,
        )

    def to(self, device: torch.device) -> MicroBatch:
        if not accelerator.of(device).asynchronous:
            return self
        tensors = {name: getattr(self, name) for name in ("tokens", "targets", "positions", "documents", "mask_keys")}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items() if tensor is not None}
        spans = self.spans and replace(self.spans, bounds=self.spans.bounds.to(device, non_blocking=True))
        return replace(self, spans=spans, pairs=self.pairs and self.pairs.to(device), **moved)


def summed_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross-entropy in fp32, summed over all targets that are not ignored."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def objective(
    loss: Tensor, mtp_logits: Sequence[Any], batch: MicroBatch, weight: float, loss_of: Callable[[Any, Tensor], Tensor]
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


class BatchFeed:
    """Gives this rank its micro-batches of each step; reads ahead in a thread."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, data: Dataset):
        self.run, self.plan, self._mesh, self._data = run, plan, mesh, data
        layout = plan.layout
        self._own = own_positions(layout, mesh, run.train.sequence_length) if layout.context > 1 else None
        self._loader: Loader[MicroBatch] | None = None
        self._peeked: list[MicroBatch] | None = None

    @cached_property
    def share(self) -> ReplicaShare:
        """This rank's part of each global batch."""
        replica, replicas = self._mesh.replica, self.plan.layout.replicas
        return ReplicaShare(batch=self.run.batch, replica=replica, replicas=replicas, micro_batch=self.plan.micro_batch)

    def next(self, samples: int) -> list[MicroBatch]:
        """The micro-batches of the next step. `samples`: the position in the data, which is read at the first call and after `close`."""
        if self._loader is None:
            prefetch = self.run.data.prefetch
            self._loader = Loader(self._data.train, self.share, start=samples, prefetch=prefetch, prepare=self.prepare)
        batches, self._peeked = self._peeked or next(self._loader), None
        return batches

    def peek(self) -> list[MicroBatch] | None:
        """What the next call of `next` returns; None if it is not read yet."""
        if self._peeked is None and self._loader is not None and self._loader.ready:
            self._peeked = next(self._loader)
        return self._peeked

    def prepare(self, batch: Batch) -> MicroBatch:
        """A batch as this rank reads it."""
        prepared = MicroBatch.prepare(batch, self._mesh.device, self.run.data.document_mask, self._own)
        pin = accelerator.of(self._mesh.device).pin
        if self.run.lora.dropout:
            own = np.arange(batch.tokens.shape[1]) if self._own is None else self._own
            keys = mask_keys(self.run.train.seed, batch.samples, own)
            prepared = replace(prepared, mask_keys=pin(torch.from_numpy(keys)))
        if self.run.train.objective != "dpo":
            return prepared
        return replace(prepared, pairs=Pairs.of(batch, self._own, self.plan.layout.context, pin))

    def close(self) -> None:
        """Ends the reader and drops what it has read ahead."""
        self._peeked = None
        if self._loader is not None:
            self._loader.close()
            self._loader = None
