"""The XLA engine's side of a proof: processes whose CPUs stand for the devices of a layout, compared with the reference device by device. Runs in
processes that have not imported JAX before."""

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
from phalanx.verification.tolerance import Comparison

if TYPE_CHECKING:
    from phalanx.xla.xla_trainer import XlaTrainer

COMPILE_SECONDS = 1800.0
"""Until a case counts as hanging: the compiler takes seconds on an idle machine, and minutes on a busy one."""


def compare_devices(mesh: Mesh, case: Case, reference: Reference) -> list[RankResult]:
    """Trains on the devices of the case and compares each step of those of this process with the reference. `mesh`: of all processes."""
    use_virtual_devices(case.plan.devices_per_process)
    from phalanx.xla.join_processes import join
    from phalanx.xla.xla_trainer import XlaTrainer

    join(mesh, case.plan)
    (theirs,) = torch.load(reference.path, weights_only=False, mmap=True)
    trainer = XlaTrainer(case.run, case.plan, Path(case.folder) / "devices" / "checkpoints", processes=mesh)
    trainer.keeps_gradients = True
    trainer.build()
    results: dict[int, RankResult] = {}
    for their in theirs:
        for rank, ours in _records(trainer, their.step):
            result = results.setdefault(rank, RankResult())
            result.comparisons += compare_records(ours, their, rank)
            result.shards = {name: shard for name, (_, shard) in ours.parameters.items()}
    for result in results.values():
        result.split = _divided_axes(trainer)
        result.attends_remotely = _divides_positions(trainer)
    next(iter(results.values())).comparisons.append(_held_bytes(trainer))
    trainer.close()
    return list(results.values())


def _held_bytes(trainer: XlaTrainer) -> Comparison:
    """Whether this process holds as many bytes of parameters and moments as the layout gives its devices: no process may hold what is others'."""
    from phalanx.xla.device_mesh import mesh_size

    state, model, held, due = trainer.state, trainer.model, 0, 0.0
    for arrays, kind in ((state.params, "value"), (state.means, "moments"), (state.squares, "moments")):
        for name, array in arrays.items():
            parts = mesh_size(model.mesh, *(degree for degree in getattr(model.placements[name], kind) if degree is not None))
            due += trainer.plan.devices_per_process * array.size * array.dtype.itemsize / parts
            held += sum(shard.data.nbytes for shard in array.addressable_shards)
    what = f"process {trainer.mesh.rank} holds {held:,} bytes of the state, and its devices have {due:,.0f}"
    return Comparison("placement", 0, what, trainer.mesh.rank, abs(held - due))


def _records(trainer: XlaTrainer, step: int) -> Iterator[tuple[int, StepRecord]]:
    """What each device of this process holds after this step, which is taken here; step 0 is before the first. With the device's number."""
    from phalanx.xla.device_mesh import own_devices

    record = StepRecord(step)
    gradients: Mapping[str, Any] = {}
    if step:
        event = trainer.step()
        assert event is not None and trainer.results is not None, "nothing stops this trainer"
        gradients, skipped = trainer.results.gradients, isinstance(event, StepSkipped)
        batch = "" if isinstance(event, StepSkipped) else f"{event.tokens} {event.batch_digest}"
        record = StepRecord(step, loss=event.loss, norm=event.grad_norm, batch=batch, skipped=skipped)
    parameters = trainer.state.params | trainer.state.buffers
    everywhere = list(trainer.model.mesh.devices.flat)
    for device in own_devices(trainer.model.mesh):
        record = replace(record, gradients=_on(device, gradients), parameters=_on(device, parameters))
        yield everywhere.index(device), record


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
