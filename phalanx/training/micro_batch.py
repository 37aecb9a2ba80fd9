"""What one forward reads, as tensors on their way to the device, and what a step draws random numbers from. The loader's thread
makes micro-batches; `training/step` takes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from phalanx.data.pack import Batch


def step_seed(seed: int, step: int, replica: int) -> int:
    """What a replica draws random numbers from in a step (dropout of a module of one's own): of the step alone, so that a resumed
    run draws what an unbroken one does, and the same on all ranks that compute one replica."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {replica}".encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward reads, as tensors."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    """Of whole sequences, also where this rank has only a part of their tokens."""
    counted: int
    """Targets that are predicted."""
    digest: int
    """Sum of the samples' checksums, each over its place in the data and its token ids."""

    @staticmethod
    def prepare(batch: Batch, device: torch.device, document_mask: bool, places: np.ndarray | None = None) -> MicroBatch:
        """From the loader's arrays; runs in its thread. On GPUs the copy is pinned, so that it can run beside the step.

        `places`: the positions of each sequence that are this rank's, where ranks share sequences.
        """

        def tensor(array: np.ndarray) -> Tensor:
            host = torch.from_numpy(array)
            return host.pin_memory() if device.type == "cuda" else host

        def own(array: np.ndarray) -> np.ndarray:
            return array if places is None else np.ascontiguousarray(array[:, places])

        # A window inside one document needs no mask, and GPUs have a much faster kernel for that. On CPU there is
        # nothing to gain, and one kernel for all keeps the numbers free of how windows are grouped.
        masked = document_mask and (batch.has_boundaries or device.type == "cpu")
        return MicroBatch(
            tokens=tensor(own(batch.tokens)),
            targets=tensor(own(batch.targets)),
            positions=tensor(own(batch.positions)),
            documents=tensor(batch.documents) if masked else None,  # of whole sequences: a rank's queries see others' keys
            counted=int((own(batch.targets) >= 0).sum()),
            digest=batch.digest,
        )

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device, non_blocking=True),
        )
