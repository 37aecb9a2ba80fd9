"""Global batches for all devices of the process: the same samples in the same micro-batches as those of the torch engine's ranks. The trainer makes
one feed; a thread reads ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from phalanx.data.dataset import Dataset
from phalanx.data.loader import Loader, ReplicaShare
from phalanx.data.pack import IGNORED, Batch
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.xla.device_mesh import zigzag
from phalanx.xla.forward import Tokens


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A global batch on the host, [micro-batch, sample, position]: the samples of a micro-batch are those of all replicas, in order."""

    arrays: tuple[np.ndarray, ...]
    """Tokens, targets, positions, and documents if they keep attention apart."""
    digest: int

    def on(self, place: NamedSharding) -> Tokens:
        """On the devices, each of which gets its own rows and positions."""
        placed = [jax.make_array_from_callback(array.shape, place, array.__getitem__) for array in self.arrays]
        return Tokens(*placed, *[None] * (4 - len(placed)))


class GlobalFeed:
    """Gives the batch of each step."""

    def __init__(self, run: Run, plan: Plan, data: Dataset):
        self._run, self._plan, self._data = run, plan, data
        self._loader: Loader[GlobalBatch] | None = None

    def next(self, samples: int) -> GlobalBatch:
        """The batch of the next step. `samples`: the position in the data, which is read at the first call and after `close`."""
        if self._loader is None:
            batch = self._run.batch
            share = ReplicaShare(batch=batch, replica=0, replicas=1, micro_batch=batch)
            self._loader = Loader(
                self._data.train, share, start=samples, prefetch=self._run.data.prefetch, prepare=self._prepare
            )
        (batch_of_step,) = next(self._loader)
        return batch_of_step

    def _prepare(self, batch: Batch) -> GlobalBatch:
        """Each replica has consecutive samples of the batch, in `accumulation` micro-batches."""
        replicas, count, size = self._plan.layout.replicas, self._plan.accumulation, self._plan.micro_batch

        def arranged(array: np.ndarray) -> np.ndarray:
            rows = array.astype(np.int32).reshape(replicas, count, size, -1).swapaxes(0, 1)
            return np.ascontiguousarray(rows.reshape(count, replicas * size, -1))

        return GlobalBatch(tuple(map(arranged, self._inputs(batch))), batch.digest)

    def held_out(self, batch: Batch) -> GlobalBatch:
        """A single micro-batch of all replicas; places without a sample hold one without targets."""
        missing = self._plan.layout.replicas * self._plan.micro_batch - len(batch.samples)

        def padded(array: np.ndarray, value: int | None = None) -> np.ndarray:
            row = array[-1:] if value is None else np.full_like(array[-1:], value)
            return np.concatenate([array, *[row] * missing])

        filled: Any = [padded(array) for array in batch]
        filled[1] = padded(batch.targets, IGNORED)
        return GlobalBatch(tuple(array.astype(np.int32)[None] for array in self._inputs(Batch(*filled))), batch.digest)

    def _inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """In the order of the devices that divide sequences: all that is computed besides attention is the same in any order."""
        documents = (batch.documents,) if self._run.data.document_mask else ()
        arrays, devices = (batch.tokens, batch.targets, batch.positions, *documents), self._plan.layout.context
        return arrays if devices == 1 else tuple(array[:, zigzag(array.shape[1], devices)] for array in arrays)

    def close(self) -> None:
        """Ends the reader and drops what it has read ahead."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
