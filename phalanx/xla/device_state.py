"""The state of the XLA engine: drawn at step 0, and as boxes of named tensors, which checkpoints write and read. Only what the devices of this
process hold is ever made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Sharding
from torch import Tensor

from phalanx.checkpointing.state_tensor import NO_REPLICAS, ReplicaGroup, StateTensor
from phalanx.models import init
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import Box, Index, TensorSlice
from phalanx.xla.forward import Model
from phalanx.xla.train_step import Shardings, TrainArrays

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32}
_STEP = "step"
"""Name of the count of updates, which checkpoints have once for each parameter."""


def box_of(index: Index, whole: Sequence[int]) -> Box:
    """The box that an index of JAX selects, whose slices may leave out their ends."""
    bounds = [part.indices(length)[:2] for part, length in zip(index, whole, strict=True)]
    return Box(tuple(first for first, _ in bounds), tuple(last - first for first, last in bounds))


def initial_state(model: Model, run: Run) -> TrainArrays:
    """The state before the first step: parameters are a function of the seed, the name and the element, so that each device's box is drawn alone."""
    places, table = Shardings.of(model).state, init.table(model.module)
    moments = jnp.bfloat16 if run.precision.optimizer == "bf16" else jnp.float32

    def draw(name: str, index: Any) -> np.ndarray:
        whole = model.shapes[name]
        box = box_of(index, whole)
        values = torch.empty(box.shape)
        init.fill(values, run.train.seed, name, run.model, TensorSlice(whole, (box,)), table)
        return values.numpy()

    def drawn(name: str) -> jax.Array:
        return jax.make_array_from_callback(model.shapes[name], places.params[name], lambda index: draw(name, index))

    def zeros(name: str) -> jax.Array:
        return jnp.zeros(model.shapes[name], moments, device=places.means[name])

    def buffer(name: str) -> jax.Array:
        shape, place = model.buffers[name], places.buffers[name]
        if name in model.initial:
            return jax.device_put(jnp.asarray(model.initial[name], shape.dtype), place)
        return jnp.zeros(shape.shape, shape.dtype, device=place)

    return TrainArrays(
        params={name: drawn(name) for name in model.shapes},
        means={name: zeros(name) for name in model.shapes},
        squares={name: zeros(name) for name in places.squares},
        buffers={name: buffer(name) for name in places.buffers},
        updates=jnp.zeros((), jnp.int32, device=places.updates),
    )


def named_arrays(state: TrainArrays) -> dict[str, jax.Array]:
    """The arrays of a checkpoint, by the names that the torch engine gives them."""
    arrays = {f"model/{name}": array for name, array in (state.params | state.buffers).items()}
    count = state.updates.astype(jnp.float32)
    for name in state.params:
        arrays[_mean_name(state, name)] = state.means[name]
        if name in state.squares:
            arrays[f"optimizer/{name}/{_STEP}"] = count
            arrays[f"optimizer/{name}/exp_avg_sq"] = state.squares[name]
    return arrays


def _mean_name(state: TrainArrays, name: str) -> str:
    """Muon has momentum alone."""
    return f"optimizer/{name}/{'exp_avg' if name in state.squares else 'momentum_buffer'}"


def with_arrays(state: TrainArrays, arrays: Mapping[str, jax.Array]) -> TrainArrays:
    """The state with these arrays in place of its own; the inverse of `named_arrays`."""

    def chosen(own: Mapping[str, jax.Array], name_of: Callable[[str], str]) -> dict[str, jax.Array]:
        return {name: arrays.get(name_of(name), array) for name, array in own.items()}

    updates = next((array for name, array in arrays.items() if name.endswith(f"/{_STEP}")), None)
    return TrainArrays(
        params=chosen(state.params, lambda name: f"model/{name}"),
        means=chosen(state.means, lambda name: _mean_name(state, name)),
        squares=chosen(state.squares, lambda name: f"optimizer/{name}/exp_avg_sq"),
        buffers=chosen(state.buffers, lambda name: f"model/{name}"),
        updates=state.updates if updates is None else jax.device_put(updates.astype(jnp.int32), state.updates.sharding),
    )


@dataclass(slots=True)
class DeviceBox:
    """What one device holds of an array, as checkpoints see it: read as a tensor on the host, and written as one, which `HostBoxes` collects."""

    array: jax.Array
    box: Box
    device: Any
    dtype: torch.dtype
    is_ours: bool = True
    """This process writes it to checkpoints; else another one does, whose device comes first."""
    written: Tensor | None = field(default=None, repr=False)

    def read(self, into: Tensor | None = None) -> Tensor:
        shard = next(shard for shard in self.array.addressable_shards if shard.device == self.device)
        held = np.asarray(shard.data)  # on CPUs the device's own memory, which the next step takes
        tensor = torch.empty(held.shape, dtype=self.dtype) if into is None else into
        if self.dtype == torch.bfloat16:  # numpy has no such format
            np.copyto(tensor.view(torch.int16).numpy(), held.view(np.int16))
        else:
            np.copyto(tensor.numpy(), held)
        return tensor

    def write(self, values: Tensor, /) -> None:
        self.written = values


class DeviceBoxes:
    """All boxes of the state on the devices of this process, each once: of devices that hold the same box, the first has it."""

    def __init__(self, arrays: Mapping[str, jax.Array]):
        self._arrays = dict(arrays)
        self._boxes = {name: _own_boxes(array) for name, array in arrays.items()}

    def by_device(self) -> list[dict[str, StateTensor]]:
        """The state tensors of each device, in the order of the devices; each becomes a file of a checkpoint."""
        held = {device for array in self._arrays.values() for device in array.sharding.addressable_devices}
        devices: list[Any] = sorted(held, key=lambda device: device.id)
        files: dict[Any, dict[str, StateTensor]] = {device: {} for device in devices}
        for name, boxes in self._boxes.items():
            for box in boxes.values():
                part = TensorSlice(tuple(self._arrays[name].shape), (box.box,))
                files[box.device][name] = StateTensor(box, part, NO_REPLICAS if box.is_ours else _WRITTEN_ELSEWHERE)
        return list(files.values())

    def assembled(self) -> dict[str, jax.Array]:
        """The arrays of which every box was written, on their devices."""
        return {
            name: _assembled(self._arrays[name], boxes)
            for name, boxes in self._boxes.items()
            if all(box.written is not None for box in boxes.values())
        }


_WRITTEN_ELSEWHERE = ReplicaGroup(key=("another process",), count=0)


def _own_boxes(array: jax.Array) -> dict[Box, DeviceBox]:
    """What the devices of this process hold of an array, with the first of them that holds it."""
    dtype = _TORCH[str(array.dtype)]
    return {box: DeviceBox(array, box, device, dtype, is_ours) for box, device, is_ours in _places(array.sharding, array.shape)}


@lru_cache(maxsize=4096)  # asked for before every copy, of arrays that lie as those before them
def _places(where: Sharding, whole: tuple[int, ...]) -> list[tuple[Box, Any, bool]]:
    """The boxes of an array on the devices of this process: each once, with the first device that has it, and whether that is the first of all."""
    own: dict[Box, tuple[Any, bool]] = {}
    found: set[Box] = set()
    placed: list[Any] = sorted(where.devices_indices_map(whole).items(), key=lambda pair: pair[0].id)
    for device, index in placed:
        box = box_of(index, whole)
        if device in where.addressable_devices:
            own.setdefault(box, (device, box not in found))
        found.add(box)
    return [(box, *place) for box, place in own.items()]


def _assembled(array: jax.Array, boxes: Mapping[Box, DeviceBox]) -> jax.Array:
    def values(index: Any) -> np.ndarray:
        written = boxes[box_of(index, array.shape)].written
        assert written is not None
        plain = written.contiguous()
        return plain.view(torch.int16).numpy().view(jnp.bfloat16) if plain.dtype == torch.bfloat16 else plain.numpy()

    where: Sharding = array.sharding
    return jax.make_array_from_callback(array.shape, where, values)
