"""The model as a function of arrays: the sum of the losses of a micro-batch. `xla/step` differentiates it, evaluation calls it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh
from torch import nn

from phalanx.models import init
from phalanx.models.custom import axes_of, cuts_of, written_axes
from phalanx.models.moe import Router, routers
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.xla.bridge import DTYPES, call_module
from phalanx.xla.device_mesh import SAMPLES, device_mesh, sharding
from phalanx.xla.model_seams import install
from phalanx.xla.own_seams import buffer_values, install_own, refuse_unknown
from phalanx.xla.specs import Placement, cut_placements, placements

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

    @property
    def routers(self) -> dict[str, Router]:
        return routers(self.module)


def traced_model(run: Run, plan: Plan) -> Model:
    """The run's model with its seams filled for the layout's devices. Allocates nothing."""
    module = init.build(run.model)
    mesh = device_mesh(plan.layout)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    places: Mapping[str, Placement]
    if run.model.is_builtin:
        places = placements(shapes, axes_of(module), plan.layout, run.model)
        install(module, mesh, run.memory, sequence=plan.layout.sequence)
    else:
        refuse_unknown(module, run.memory)
        places = _inferred_placements(module, shapes, plan.layout)
        install_own(module, mesh, run.memory, sequence=plan.layout.sequence)
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
    inputs = (batch.tokens, batch.positions, batch.documents)
    logits_BSV, after = call_module(model.module, {**params, **buffers}, inputs, model.products, tuple(buffers))
    rows = "tensor" if logits_BSV.shape[-1] % model.mesh.shape["tensor"] == 0 else None
    placed = jax.lax.with_sharding_constraint(logits_BSV, sharding(model.mesh, SAMPLES, "context", rows))
    return cross_entropy(placed, batch.targets), after


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """In fp32, summed over the targets that are not negative. The logit of the target is picked by comparison: devices that divide the
    vocabulary add what each has, where an index would gather the logits."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    rows_V = jnp.arange(logits_BSV.shape[-1])
    picked_BS = jnp.where(rows_V == targets_BS[..., None], logits_BSV, 0).sum(-1)
    losses_BS = jax.nn.logsumexp(logits_BSV, axis=-1) - picked_BS
    return jnp.where(targets_BS >= 0, losses_BS, 0).sum()
