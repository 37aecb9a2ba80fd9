"""Reads the batches of future steps in one background thread. The trainer makes one loader per rank and iterates over it."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
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
        self._stride, self._ahead = share.batch, share.batch * prefetch
        # Two queues, because futures would cost 5 % of the throughput at 16,000 tokens a step.
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[list[T] | BaseException] = queue.SimpleQueue()
        for position in range(start, start + self._ahead, self._stride):
            self._requests.put(position)
        # The thread refers to no loader: one without references is collected, which stops its thread.
        thread = threading.Thread(target=_read, args=(self._requests, self._steps, make), name="loader", daemon=True)
        self._stop = weakref.finalize(self, _stop, self._requests, thread)
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[T]:
        step = self._steps.get() if self._stop.alive else RuntimeError("the loader was closed")
        if isinstance(step, BaseException):
            self.close()  # continuing would skip this step's samples
            raise step
        self._requests.put(self.position + self._ahead)
        self.position += self._stride
        return step

    @property
    def ready(self) -> bool:
        """Whether the next step is read, so that taking it does not wait."""
        return not self._steps.empty()

    def close(self) -> None:
        """Stop the thread after its current step at the latest, and wait for it. May be called twice."""
        self._stop()


def _read(
    requests: queue.SimpleQueue[int | None], steps: queue.SimpleQueue[list[T] | BaseException], make: Callable[[int], list[T]]
) -> None:
    try:
        while (position := requests.get()) is not None:
            steps.put(make(position))
        raise RuntimeError("the loader was closed")  # for a consumer that is waiting
    except BaseException as error:
        steps.put(error)


def _stop(requests: queue.SimpleQueue[int | None], thread: threading.Thread) -> None:
    """Cancels pending requests and waits for the thread. Also at interpreter exit, which a thread inside a library could crash."""
    with contextlib.suppress(queue.Empty):
        while True:
            requests.get_nowait()
    requests.put(None)
    if thread is not threading.current_thread():  # the collector may run in any thread
        thread.join()
