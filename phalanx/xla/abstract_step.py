"""The arguments of a step as shapes and places without values: enough to compile it, for any model on any number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.xla.forward import Model, Tokens
from phalanx.xla.train_step import Shardings, StepInputs, TrainArrays


def abstract_arguments(model: Model, run: Run, plan: Plan) -> tuple[TrainArrays, Tokens, StepInputs]:
    """What `make_step` is called with in a run: the state, a global batch and its numbers."""
    places = Shardings.of(model)
    moments = jnp.bfloat16 if run.precision.optimizer == "bf16" else jnp.float32

    def of(lengths: tuple[int, ...], dtype: Any = jnp.float32, place: Any = None) -> Any:
        return jax.ShapeDtypeStruct(lengths, dtype, sharding=place)

    def parameters(where: Mapping[str, Any], dtype: Any = jnp.float32) -> Any:
        return {name: of(model.shapes[name], dtype, place) for name, place in where.items()}

    state = TrainArrays(
        params=parameters(places.state.params),
        means=parameters(places.state.means, moments),
        squares=parameters(places.state.squares, moments),
        buffers={n: of(model.buffers[n].shape, model.buffers[n].dtype, places.state.buffers[n]) for n in places.state.buffers},
        updates=of((), jnp.int32, places.state.updates),
    )
    size = (plan.accumulation, plan.micro_batch * plan.layout.replicas, run.train.sequence_length)
    rows = of(size, jnp.int32, places.batch)
    number = of(())
    return state, Tokens(rows, rows, rows, rows if run.data.document_mask else None), StepInputs(number, number, number)


def bytes_on_a_device(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """What one device holds of arrays without values."""

    def held(array: jax.ShapeDtypeStruct) -> int:
        assert array.sharding is not None, "abstract arguments have places"
        return prod(array.sharding.shard_shape(array.shape)) * int(array.dtype.itemsize)

    return sum(map(held, arrays.values()))
