"""This rank's micro-batches, from wherever in the data the run stands. The trainer asks for those of each step."""

from __future__ import annotations

import numpy as np

from phalanx.data.dataset import Dataset
from phalanx.data.loader import Loader, ReplicaShare
from phalanx.data.pack import Batch
from phalanx.parallel.context.context_parallel import places
from phalanx.parallel.mesh import Mesh
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch


class Feed:
    """Reads ahead in a thread, once asked."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, data: Dataset):
        self._run, self._mesh, self._data = run, mesh, data
        self._plan = plan
        self.share: ReplicaShare | None = None
        """Of each batch, where it is not the one that the plan gives this rank."""
        self._places: np.ndarray | None = None
        if mesh.size("context") > 1:
            layout, length = plan.layout, run.train.sequence_length
            self._places = places(length, layout.context, mesh.coordinate("context"), layout.context_method)
        self._loader: Loader[MicroBatch] | None = None

    def next(self, samples: int) -> list[MicroBatch]:
        """Of the next step; `samples` were consumed before it, which matters at the first and after a `close`."""
        if self._loader is None:
            plan, prefetch = self._plan, self._run.data.prefetch
            share = self.share or ReplicaShare(
                batch=self._run.batch,
                replica=self._mesh.replica,
                replicas=plan.layout.replicas,
                micro_batch=plan.micro_batch,
            )
            self._loader = Loader(self._data.train, share, start=samples, prefetch=prefetch, prepare=self.prepare)
        return next(self._loader)

    def prepare(self, batch: Batch) -> MicroBatch:
        """Any batch as this rank reads it."""
        return MicroBatch.prepare(batch, self._mesh.device, self._run.data.document_mask, self._places)

    def close(self) -> None:
        """What was read ahead is forgotten."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None
