"""Global batches for the devices of a process: the same samples in the same micro-batches as those of the torch engine's ranks, of which each process
reads what its devices compute. The trainer makes one feed; a thread reads ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from phalanx.data.dataset import Dataset
from phalanx.data.loader import Loader, ReplicaShare
from phalanx.data.pack import IGNORED, Batch
from phalanx.data.samples import Samples
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.xla.device_mesh import SAMPLES, mesh_size, zigzag
from phalanx.xla.forward import Tokens


@dataclass(frozen=True, slots=True)
class ReplicaBlock:
    """The replicas whose samples a process reads: consecutive ones, in blocks that are equally large on all processes."""

    index: int
    count: int
    """Blocks in all; several processes may have the same one."""
    counts: bool
    """This process counts the samples of its block, where several have it."""

    @staticmethod
    def of(mesh: Mesh) -> ReplicaBlock:
        """The block of this process."""
        processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
        return ReplicaBlock.among(processes.reshape(mesh_size(mesh, *SAMPLES), -1), jax.process_index())

    @staticmethod
    def among(rows: npt.NDArray[Any], own: int) -> ReplicaBlock:
        """The block of a process, of as many blocks as possible. `rows`: the process of each device, a row for each replica."""
        count = next(count for count in range(len(rows), 0, -1) if len(rows) % count == 0 and _apart(rows, count))
        size = len(rows) // count
        index = int(np.argwhere(rows == own)[0][0]) // size
        return ReplicaBlock(index, count, counts=bool(rows[index * size, 0] == own))


def _apart(rows: npt.NDArray[Any], count: int) -> bool:
    """Whether no process has devices in two of so many blocks of replicas."""
    blocks = [set(block.flat) for block in np.split(rows, count)]
    return all(len([block for block in blocks if process in block]) == 1 for process in set(rows.flat))


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A process's part of a global batch on the host, [micro-batch, sample, position]: the samples of a micro-batch are those of all replicas,
    in order."""

    arrays: tuple[np.ndarray, ...]
    """Tokens, targets, positions, and documents if they keep attention apart."""
    digest: int
    block: ReplicaBlock

    def on(self, place: NamedSharding) -> Tokens:
        """On the devices, each of which gets its own rows and positions."""
        placed = [self._placed(array, place) for array in self.arrays]
        return Tokens(*placed, *[None] * (4 - len(placed)))

    def _placed(self, array: np.ndarray, place: NamedSharding) -> jax.Array:
        count, rows, positions = array.shape
        first = self.block.index * rows

        def part(index: Any) -> np.ndarray:
            low, high, _ = index[1].indices(rows * self.block.count)
            return array[index[0], low - first : high - first, index[2]]

        return jax.make_array_from_callback((count, rows * self.block.count, positions), place, part)


class GlobalFeed:
    """Gives the batch of each step."""

    def __init__(self, run: Run, plan: Plan, data: Dataset, mesh: Mesh):
        self._run, self._plan, self._data = run, plan, data
        self._block = ReplicaBlock.of(mesh)
        self._loader: Loader[GlobalBatch] | None = None

    def next(self, samples: int) -> GlobalBatch:
        """This process's part of the batch of the next step. `samples`: the position in the data, which is read at the first call and after
        `close`."""
        if self._loader is None:
            batch, block = self._run.batch, self._block
            share = ReplicaShare(batch=batch, replica=block.index, replicas=block.count, micro_batch=batch // block.count)
            self._loader = Loader(
                self._data.train, share, start=samples, prefetch=self._run.data.prefetch, prepare=self._prepare
            )
        (batch_of_step,) = next(self._loader)
        return batch_of_step

    @property
    def _replicas(self) -> int:
        """Replicas of this process's block."""
        return self._plan.layout.replicas // self._block.count

    def _prepare(self, batch: Batch) -> GlobalBatch:
        """Each replica has consecutive samples of the batch, in `accumulation` micro-batches."""
        replicas, count, size = self._replicas, self._plan.accumulation, self._plan.micro_batch

        def arranged(array: np.ndarray) -> np.ndarray:
            rows = array.astype(np.int32).reshape(replicas, count, size, -1).swapaxes(0, 1)
            return np.ascontiguousarray(rows.reshape(count, replicas * size, -1))

        return GlobalBatch(tuple(map(arranged, self._inputs(batch))), batch.digest, self._block)

    def held_out(self, samples: Samples, first: int, last: int) -> GlobalBatch:
        """A single micro-batch of all replicas with the samples first … last; places without a sample hold one without targets."""
        rows = self._replicas * self._plan.micro_batch
        wanted = first + self._block.index * rows + np.arange(rows)
        batch = samples.batch(np.minimum(wanted, last - 1))
        targets = np.where((wanted < last)[:, None], batch.targets, IGNORED)
        filled: Any = [*batch]
        filled[1] = targets
        inputs = self._inputs(Batch(*filled))
        return GlobalBatch(tuple(array.astype(np.int32)[None] for array in inputs), batch.digest, self._block)

    def _inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """In the order of the devices that divide sequences: all that the built-in decoder computes besides attention is the same in any order."""
        documents = (batch.documents,) if self._run.data.document_mask else ()
        arrays, devices = (batch.tokens, batch.targets, batch.positions, *documents), self._plan.layout.context
        straight = devices == 1 or not self._run.model.is_builtin
        return arrays if straight else tuple(array[:, zigzag(array.shape[1], devices)] for array in arrays)

    def close(self) -> None:
        """Ends the reader and drops what it has read ahead."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
