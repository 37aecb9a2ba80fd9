"""Prepares the batches of coming steps in one background thread. The trainer makes one per rank and iterates over it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.data.pack import Batch

T = TypeVar("T")


class SampleReader(Protocol):
    """Samples that can be asked for by their global indices."""

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaShare:
    """Which part of every global batch one replica takes, and in what portions."""

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
        """This replica's samples of the global batch that begins at `position`."""
        each = self.batch // self.replicas
        return position + np.arange(self.replica * each, (self.replica + 1) * each, dtype=np.int64)

    def cut(self, batch: Batch) -> list[Batch]:
        """Micro-batches of this replica's samples, in order."""
        return [batch.rows(first, first + self.micro_batch) for first in range(0, len(batch.samples), self.micro_batch)]


class Loader(Generic[T]):
    """Steps without end, from sample `start` on; each is the list of this replica's micro-batches.

    The thread works on request, one position per step, and `prefetch` requests are under way at any time. So nothing ever
    blocks on a full queue: the thread waits for requests only, and to stop it is to withdraw them.
    """

    def __init__(self, samples: SampleReader, share: ReplicaShare, *, start: int, prefetch: int, prepare: Callable[[Batch], T]):
        """`prepare` turns a batch into what the trainer wants; it runs in the thread."""
        self.position = start
        """The first sample of the step that comes next."""
        self._stride = share.batch
        self._ahead = share.batch * prefetch
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[list[T] | BaseException] = queue.SimpleQueue()
        for step in range(prefetch):
            self._requests.put(start + step * share.batch)

        def make(position: int) -> list[T]:
            # All micro-batches of a step are read at once: what one read costs besides its tokens is paid once.
            return [prepare(batch) for batch in share.cut(samples.batch(share.samples(position)))]

        # The thread knows the queues but not the loader: a loader nobody holds any more is collected and stops its thread.
        self._thread = threading.Thread(target=_serve, args=(self._requests, self._steps, make), name="loader", daemon=True)
        self._stop = weakref.finalize(self, _end, self._requests, self._thread)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[T]:
        if not self._stop.alive:
            raise RuntimeError("the loader was closed")
        step = self._steps.get()
        if isinstance(step, BaseException):
            self.close()  # going on would leave this step's samples out
            raise step
        self._requests.put(self.position + self._ahead)
        self.position += self._stride
        return step

    def close(self) -> None:
        """Stop the thread, at the latest after the step it is at, and wait for it. May be called twice."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _serve(
    requests: queue.SimpleQueue[int | None],
    steps: queue.SimpleQueue[list[T] | BaseException],
    make: Callable[[int], list[T]],
) -> None:
    while (position := requests.get()) is not None:
        try:
            steps.put(make(position))
        except BaseException as error:  # the consumer raises it, with this thread's traceback
            steps.put(error)
            return
    steps.put(RuntimeError("the loader was closed"))  # whoever still waits for a step must not wait for ever


def _end(requests: queue.SimpleQueue[int | None], thread: threading.Thread) -> None:
    """Take back what the thread has not begun, tell it that nothing comes any more, and wait for it.

    At the interpreter's end too: a thread that is still inside a library then can bring the whole process down.
    """
    try:
        while True:
            requests.get_nowait()
    except queue.Empty:
        requests.put(None)
    if thread is not threading.current_thread():
        thread.join()
