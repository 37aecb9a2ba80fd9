"""A trainer's copies in host memory, where the run file asks for them and the launcher has started a holder. Used by
`training/saving`; `checkpointing/replicas/memory_checkpoint` knows how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.checkpointing.replicas import memory_checkpoint
from phalanx.checkpointing.replicas.memory_checkpoint import MemoryCopies
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import Copied, Event, Warned
from phalanx.parallel.mesh import Mesh
from phalanx.spec.run import Run

_UNASKED = 0.005
"""The part of training's time that copies beside GPUs may take where nobody asked for them."""


class Copying:
    """Copies of one generation of a run, on one rank."""

    def __init__(self, run: Run, mesh: Mesh):
        self._every, folder = run.checkpoint.memory_every or mesh.place.copy_every, mesh.place.holder
        wanted = self._every is not None and folder is not None
        unasked, gpu = run.checkpoint.memory_every is None, mesh.device.type == "cuda"
        # Those that nobody asked for are there for what no other rank holds: on CPUs after every step, whatever that costs.
        patient = unasked and not gpu
        self._copies = MemoryCopies(mesh, Path(folder), mesh.place.generation, patient=patient) if wanted and folder else None
        if self._copies is not None and unasked and gpu:
            self._copies.pace = _UNASKED
        self._rank = mesh.rank
        self._said: set[str] = set()

    def prepare(self, tensors: Mapping[str, StateTensor]) -> None:
        if self._copies is not None:
            self._copies.prepare(tensors)

    def take(self, step: int, tensors: Callable[[], Mapping[str, StateTensor]], contents: Callable[[], dict[str, Any]]) -> None:
        """A copy of this moment, if one is due; all ranks call it together."""
        if self._copies is not None and self._every is not None and step % self._every == 0:
            self._copies.take(step, tensors(), contents())

    def release(self) -> None:
        """The state is about to change: wait for what still copies it."""
        if self._copies is not None:
            self._copies.release()

    def ended(self) -> list[Event]:
        """What has ended since this was asked last; rank 0 tells."""
        return self._events(self._copies.ended()) if self._copies is not None and self._rank == 0 else []

    def settle(self) -> list[Event]:
        """Wait for the copy under way; all ranks call it together."""
        return self._events(self._copies.settle()) if self._copies is not None else []

    def _events(self, outcomes: list[memory_checkpoint.CopyOutcome]) -> list[Event]:
        found: list[Event] = []
        for one in outcomes:
            if one.failure is not None:
                found += self._warn("There is no copy in memory of step {}: {}.", one.step, one.failure)
                continue
            if one.problem is not None:
                found += self._warn("The copy in memory of step {} is not whole on a second node: {}.", one.step, one.problem)
            found.append(
                Copied(
                    step=one.step,
                    bytes=one.bytes,
                    seconds=one.seconds,
                    stall=one.stall,
                    peer=one.peer,
                    skipped=one.passed_over,
                )
            )
        return found

    def _warn(self, sentence: str, step: int, why: str) -> list[Event]:
        """Once for each reason: copies are taken every few steps."""
        if why in self._said:
            return []
        self._said.add(why)
        return [Warned(message=sentence.format(step, why))]

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
