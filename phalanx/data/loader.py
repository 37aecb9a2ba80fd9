"""Reads the batches of future steps in one background thread. The trainer makes one loader per rank and iterates over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.data.pack import Batch

T = TypeVar("T")


class SampleReader(Protocol):
    def batch(self, indices: npt.NDArray[np.int64]) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaShare:
    """The part of every global batch that one data-parallel replica reads, and its micro-batch size."""

    batch: int
    """Samples in one global batch."""
    replica: int
    replicas: int
    micro_batch: int

    def __post_init__(self) -> None:
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} is not one of {self.replicas}")
        if self.micro_batch < 1 or self.batch < 1 or self.batch % (self.replicas * self.micro_batch):
            raise ValueError(
                f"a batch of {self.batch} cannot be cut into micro-batches of {self.micro_batch} on {self.replicas} replicas"
            )

    def samples(self, position: int) -> npt.NDArray[np.int64]:
        """This replica's sample indices in the global batch that begins at sample `position`."""
        each = self.batch // self.replicas
        return position + np.arange(self.replica * each, (self.replica + 1) * each, dtype=np.int64)

    def cut(self, batch: Batch) -> list[Batch]:
        """Splits this replica's samples into micro-batches, in order."""
        return [batch.rows(first, first + self.micro_batch) for first in range(0, len(batch.samples), self.micro_batch)]


class Loader(Generic[T]):
    """An endless iterator over steps, from sample `start` on; each step is the list of this replica's micro-batches. `prefetch` steps
    are read or being read at any time."""

    def __init__(self, samples: SampleReader, share: ReplicaShare, *, start: int, prefetch: int, prepare: Callable[[Batch], T]):
        """`prepare` converts a batch for the trainer, in the background thread."""

        def make(position: int) -> list[T]:
            # One read for all micro-batches of a step, so that the fixed cost of a read is paid once.
            return [prepare(batch) for batch in share.cut(samples.batch(share.samples(position)))]

        self.position = start
        """First sample of the next step."""
        self._make = make  # refers to no loader: one without references is collected, which stops its thread
        self._stride, self._ahead = share.batch, share.batch * prefetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        positions = range(start, start + self._ahead, self._stride)
        self._steps: deque[Future[list[T]]] = deque(self._thread.submit(make, position) for position in positions)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[T]:
        try:
            if not self._steps:
                raise CancelledError
            step = self._steps.popleft().result()
        except CancelledError:
            raise RuntimeError("the loader was closed") from None
        except Exception:
            self.close()  # continuing would skip this step's samples
            raise
        self._steps.append(self._thread.submit(self._make, self.position + self._ahead))
        self.position += self._stride
        return step

    def close(self) -> None:
        """Stop the thread after its current step at the latest, and wait for it. May be called twice."""
        self._thread.shutdown(cancel_futures=True)
        self._steps.clear()
