"""The XLA engine's side of a proof: a process whose CPU stands for all devices of a layout, compared with the reference device by device. Runs in a
process that has not imported JAX before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from phalanx.events.records import StepSkipped
from phalanx.host.env import use_virtual_devices
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.verification.cases import Case
from phalanx.verification.compare_steps import RankResult, compare_records
from phalanx.verification.reference import Reference, ShardValue, StepRecord

if TYPE_CHECKING:
    from phalanx.xla.xla_trainer import XlaTrainer

COMPILE_SECONDS = 1800.0
"""Until a case counts as hanging: the compiler takes seconds on an idle machine, and minutes on a busy one."""


def compare_devices(mesh: Mesh, case: Case, reference: Reference) -> list[RankResult]:
    """Trains on all devices of the case and compares each step of each device with the reference. `mesh`: of this single process."""
    use_virtual_devices(case.layout.ranks)
    from phalanx.xla.xla_trainer import XlaTrainer

    (theirs,) = torch.load(reference.path, weights_only=False, mmap=True)
    trainer = XlaTrainer(case.run, case.plan, Path(case.folder) / "devices" / "checkpoints")
    trainer.keeps_gradients = True
    trainer.build()
    results = [RankResult() for _ in range(case.layout.ranks)]
    for their in theirs:
        for rank, ours in enumerate(_records(trainer, their.step)):
            results[rank].comparisons += compare_records(ours, their, rank)
            results[rank].shards = {name: shard for name, (_, shard) in ours.parameters.items()}
    for result in results:
        result.split = _divided_axes(trainer)
        result.attends_remotely = _divides_positions(trainer)
    trainer.close()
    return results


def _records(trainer: XlaTrainer, step: int) -> Iterator[StepRecord]:
    """What each device holds after this step, which is taken here; step 0 is before the first."""
    record = StepRecord(step)
    gradients: Mapping[str, Any] = {}
    if step:
        event = trainer.step()
        assert event is not None and trainer.results is not None, "nothing stops this trainer"
        gradients, skipped = trainer.results.gradients, isinstance(event, StepSkipped)
        batch = "" if isinstance(event, StepSkipped) else f"{event.tokens} {event.batch_digest}"
        record = StepRecord(step, loss=event.loss, norm=event.grad_norm, batch=batch, skipped=skipped)
    parameters = trainer.state.params | trainer.state.buffers
    for device in trainer.model.mesh.devices.flat:
        yield replace(record, gradients=_on(device, gradients), parameters=_on(device, parameters))


def _on(device: Any, arrays: Mapping[str, Any]) -> dict[str, ShardValue]:
    """What a device holds of each array."""
    from phalanx.xla.device_state import box_of

    held = {}
    for name, array in arrays.items():
        shard = next(shard for shard in array.addressable_shards if shard.device == device)
        part = TensorSlice(tuple(array.shape), (box_of(shard.index, array.shape),))
        held[name] = torch.from_numpy(np.array(shard.data, dtype=np.float32)), ParamShard(part)
    return held


def _divided_axes(trainer: XlaTrainer) -> set[str]:
    """Degrees of the layout along which devices hold other parts of the optimizer's state, read from the arrays. An axis like "tensor_expert" divides
    experts."""
    places: list[Any] = [array.sharding for array in trainer.state.means.values()]
    dims = [dim for place in places for dim in place.spec if dim is not None]
    axes = {axis for dim in dims for axis in ((dim,) if isinstance(dim, str) else dim)}
    return {axis.partition("_")[2] or axis for axis in axes}


def _divides_positions(trainer: XlaTrainer) -> bool:
    """Whether a device reads only a part of each sequence, so that its attention reads keys of others."""
    run, whole = trainer.run, trainer.run.train.sequence_length
    shape = (trainer.plan.accumulation, run.batch // trainer.plan.accumulation, whole)
    return bool(trainer.shardings.batch.shard_shape(shape)[-1] < whole)
