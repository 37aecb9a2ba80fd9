"""The model as a function of arrays: the sum of the losses of a micro-batch. `xla/step` differentiates it, evaluation calls it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

from phalanx.models import init
from phalanx.models.custom import axes_of, cuts_of, written_axes
from phalanx.models.decoder import Decoder
from phalanx.models.moe import Router, routers
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.xla.bridge import DTYPES, call_module
from phalanx.xla.device_mesh import SAMPLES, device_mesh, gather, mesh_size, platform_of, sharding
from phalanx.xla.model_seams import install
from phalanx.xla.newton_schulz import is_updated_by_muon
from phalanx.xla.own_seams import buffer_values, install_own, refuse_unknown
from phalanx.xla.specs import Placement, cut_placements, gathered, placements
from phalanx.xla.wide_gradients import linear

Arrays = dict[str, jax.Array]
"""By the name of a parameter or buffer."""


class Tokens(NamedTuple):
    """The inputs of a forward on all devices; with one more dimension in front, those of all micro-batches of a step."""

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    documents: jax.Array | None


@dataclass(frozen=True, slots=True)
class Model:
    """A traced model, and where its arrays lie on the devices."""

    module: nn.Module
    """On the meta device: it has names, shapes and code."""
    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters."""
    placements: Mapping[str, Placement]
    buffers: Mapping[str, jax.ShapeDtypeStruct]
    persistent: frozenset[str]
    """Buffers that a checkpoint holds."""
    initial: Mapping[str, np.ndarray]
    """What buffers hold before the first step; those that are not persistent, before every step. Zero where it is not here."""
    products: torch.dtype | None
    """Format of matrix products; None: that of the parameters."""
    by_muon: frozenset[str]
    """Parameters that Muon updates; AdamW updates the others."""
    wide_sums: bool
    """Whether devices add up gradients in fp32, although products give 16 bits."""
    loss_chunk: int | None
    """Tokens of a device whose logits exist at the same time; None: all."""

    @property
    def routers(self) -> dict[str, Router]:
        return routers(self.module)


def traced_model(run: Run, plan: Plan, platform: str | None = None) -> Model:
    """The run's model with its seams filled for the layout's devices. Allocates nothing. `platform`: "cpu", "cuda" or "tpu", whose kernels compute; by
    default that of the devices."""
    module = init.build(run.model)
    mesh = device_mesh(plan.layout)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    kernels = platform or platform_of(mesh)
    places: Mapping[str, Placement]
    if run.model.is_builtin:
        places = placements(shapes, axes_of(module), plan.layout, run.model)
        install(module, mesh, run.memory, plan.layout, places, kernels)
    else:
        refuse_unknown(module, run.memory)
        places = _inferred_placements(module, shapes, plan.layout)
        install_own(module, mesh, run.memory, plan.layout, kernels)
    for router in routers(module).values():
        router.loss_scale = 1 / run.batch_tokens  # the balancing loss is divided as the loss is
    buffers = {name: jax.ShapeDtypeStruct(tuple(b.shape), DTYPES[b.dtype]) for name, b in module.named_buffers()}
    return Model(
        module=module,
        mesh=mesh,
        shapes=shapes,
        placements=places,
        buffers=buffers,
        persistent=frozenset(buffers) & module.state_dict().keys(),
        initial={} if run.model.is_builtin else buffer_values(module),
        products=torch.bfloat16 if plan.compute == "bf16" else None,
        wide_sums=plan.compute == "bf16" and mesh.size > 1,
        by_muon=frozenset(name for name in shapes if run.optimizer.name == "muon" and is_updated_by_muon(name, shapes[name])),
        loss_chunk=run.memory.loss_chunk or None,
    )


def _inferred_placements(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> Mapping[str, Placement]:
    """Of a model that was not written for it: by its own table of names, or as its graph says."""
    spec = module.spec
    assert isinstance(spec, ModelSpec), "`models/init` sets the spec"
    if spec.module is not None and written_axes(spec.module) is not None:
        return placements(shapes, axes_of(module), layout, spec)
    return cut_placements(shapes, cuts_of(module, layout.tensor) if layout.tensor > 1 else None, layout)


def without_state(model: Model) -> Arrays:
    """The buffers that no state holds, as every step finds them."""
    fresh = {name: buffer for name, buffer in model.buffers.items() if name not in model.persistent}
    return {
        name: jnp.asarray(model.initial[name], buffer.dtype) if name in model.initial else jnp.zeros(buffer.shape, buffer.dtype)
        for name, buffer in fresh.items()
    }


def summed_losses(model: Model, params: Arrays, buffers: Arrays, batch: Tokens) -> tuple[jax.Array, Arrays]:
    """The sum of the losses of all targets that count, and the buffers after the forward."""
    output, after = _called(model, params, buffers, batch)
    if model.loss_chunk is not None:
        states_BSD, weight_VD = output  # as `model_seams` has it
        return _chunked_losses(model, states_BSD, weight_VD, batch.targets), after
    return cross_entropy(_placed(model, output, SAMPLES, "context"), batch.targets), after


def logits(model: Model, params: Arrays, buffers: Arrays, batch: Tokens) -> jax.Array:
    """Of every token."""
    output, _ = _called(model, params, {**buffers, **without_state(model)}, batch)
    return output if model.loss_chunk is None else project(model, *output)


def _called(model: Model, params: Arrays, buffers: Arrays, batch: Tokens) -> tuple[Any, Arrays]:
    """What the module returns, and the buffers after it."""
    inputs = (batch.tokens, batch.positions, batch.documents)
    looped = "blocks." if isinstance(model.module, Decoder) else ()  # each block gathers its own
    given = {name: value if name.startswith(looped) else _gathered(model, name, value) for name, value in params.items()}
    return call_module(model.module, {**given, **buffers}, inputs, model.products, tuple(buffers), wide_sums=model.wide_sums)


def _gathered(model: Model, name: str, value: jax.Array) -> jax.Array:
    """A parameter, whole over `shard` while it computes."""
    placed = model.placements[name]
    return gather(value, sharding(model.mesh, *gathered(placed.value)), sharding(model.mesh, *placed.gradient))


def _placed(model: Model, logits: jax.Array, *dims: str | tuple[str, ...] | None) -> jax.Array:
    """Divided along the vocabulary too."""
    rows = "tensor" if logits.shape[-1] % mesh_size(model.mesh, "tensor") == 0 else None
    return jax.lax.with_sharding_constraint(logits, sharding(model.mesh, *dims, rows))


def _chunked_losses(model: Model, states_BSD: jax.Array, weight_VD: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """The logits of a few tokens of each device at a time, and once: where a gradient is asked for, it is computed next to the loss. Every device goes
    through its own sequences and positions."""
    devices, samples = mesh_size(model.mesh, "context"), len(states_BSD) // mesh_size(model.mesh, *SAMPLES)
    whole = states_BSD.shape[1] // devices
    size = max(
        length
        for length in range(1, whole + 1)
        if whole % length == 0 and length * samples <= max(model.loss_chunk or 0, samples)
    )

    def pieces(array: jax.Array) -> jax.Array:
        cut = array.reshape(len(array), devices, whole // size, size, *array.shape[2:])
        places = (None, SAMPLES, "context", *[None] * (cut.ndim - 3))
        return jax.lax.with_sharding_constraint(jnp.moveaxis(cut, 2, 0), sharding(model.mesh, *places))

    def piece_loss(states_BCSD: jax.Array, weight_VD: jax.Array, targets_BCS: jax.Array) -> jax.Array:
        logits = project(model, states_BCSD, weight_VD)
        return cross_entropy(_placed(model, logits, SAMPLES, "context", None), targets_BCS)

    @jax.custom_vjp
    def summed(states_BSD: jax.Array, weight_VD: jax.Array, targets_BS: jax.Array) -> jax.Array:
        low_VD = weight_VD.astype(_product_dtype(model, states_BSD))

        def add(loss: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return loss + piece_loss(piece[0], low_VD, piece[1]), None

        return jax.lax.scan(add, jnp.zeros((), jnp.float32), (pieces(states_BSD), pieces(targets_BS)))[0]

    def with_gradients(states_BSD: jax.Array, weight_VD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, Any]:
        low_VD = weight_VD.astype(_product_dtype(model, states_BSD))

        def add(sums: tuple[jax.Array, jax.Array], piece: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            loss, backward = jax.vjp(partial(piece_loss, targets_BCS=piece[1]), piece[0], low_VD)
            states, weight = backward(jnp.ones((), jnp.float32))
            return (sums[0] + loss, sums[1] + weight.astype(jnp.float32)), states

        nothing = jnp.zeros((), jnp.float32), jnp.zeros(weight_VD.shape, jnp.float32)
        (loss, weight), cut = jax.lax.scan(add, nothing, (pieces(states_BSD), pieces(targets_BS)))
        states = jax.lax.with_sharding_constraint(jnp.moveaxis(cut, 0, 2).reshape(states_BSD.shape), place)
        return loss, (states, weight.astype(weight_VD.dtype))

    def scaled(gradients: tuple[jax.Array, jax.Array], factor: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        states, weight = gradients
        return (factor * states).astype(states.dtype), (factor * weight).astype(weight.dtype), None

    summed.defvjp(with_gradients, scaled)
    place = sharding(model.mesh, SAMPLES, "context", None)
    return summed(jax.lax.with_sharding_constraint(states_BSD, place), weight_VD, targets_BS)


def project(model: Model, states: jax.Array, weight_VD: jax.Array) -> jax.Array:
    """Logits, as `Decoder.project` computes them."""
    dtype = _product_dtype(model, states)
    low, low_VD = states.astype(dtype), weight_VD.astype(dtype)
    logits = linear(low, low_VD) if model.wide_sums else jnp.einsum("...d,vd->...v", low, low_VD)
    cap = model.module.spec.logit_cap if isinstance(model.module, Decoder) else None
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _product_dtype(model: Model, states: jax.Array) -> Any:
    return states.dtype if model.products is None else DTYPES[model.products]


@jax.custom_vjp
def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """In fp32, summed over the targets that are not negative. The logit of the target is picked by comparison: devices that divide the
    vocabulary add what each has, where an index would gather the logits."""
    return _entropy_forward(logits_BSV, targets_BS)[0]


def _entropy_forward(logits_BSV: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, Any]:
    wide_BSV = logits_BSV.astype(jnp.float32)
    picked_BS = jnp.where(_is_target(wide_BSV, targets_BS), wide_BSV, 0).sum(-1)
    whole_BS = jax.nn.logsumexp(wide_BSV, axis=-1)
    return jnp.where(targets_BS >= 0, whole_BS - picked_BS, 0).sum(), (logits_BSV, whole_BS, targets_BS)


def _entropy_backward(kept: tuple[jax.Array, jax.Array, jax.Array], factor: jax.Array) -> tuple[jax.Array, None]:
    """From the logits in their own format. What differentiation would keep are their exponentials, which are wider."""
    logits_BSV, whole_BS, targets_BS = kept
    probabilities_BSV = jnp.exp(logits_BSV.astype(jnp.float32) - whole_BS[..., None])
    gradient_BSV = jnp.where(_is_target(logits_BSV, targets_BS), probabilities_BSV - 1, probabilities_BSV)
    counted_BS = jnp.where(targets_BS >= 0, factor, 0)
    return (counted_BS[..., None] * gradient_BSV).astype(logits_BSV.dtype), None


def _is_target(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    return jnp.arange(logits_BSV.shape[-1]) == targets_BS[..., None]


cross_entropy.defvjp(_entropy_forward, _entropy_backward)
