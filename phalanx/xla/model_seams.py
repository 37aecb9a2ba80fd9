"""What the XLA engine puts at the seams of a model before it is traced: attention, the experts of a mixture, look-ups in divided tables, the place of the
residual stream, and blocks that are repeated or computed twice. The modules themselves do not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch import Tensor, nn

from phalanx.models.attention import Scope
from phalanx.models.decoder import Decoder
from phalanx.models.moe import MoE
from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory
from phalanx.xla import block_loop, moe_layer
from phalanx.xla.bridge import call_jax, products_in
from phalanx.xla.device_mesh import POSITIONS, SAMPLES, gather, mesh_axes, mesh_size, sharding
from phalanx.xla.fused_attention import Devices, Scoring, attend
from phalanx.xla.specs import Placement, gathered

Constrain = Callable[[jax.Array], jax.Array]
_WHOLE = Placement(value=P(), gradient=P(), moments=P())
"""Of buffers."""


def attention_devices(mesh: Mesh, layout: Layout, platform: str, *, zigzag: bool) -> Devices:
    """How attention is divided. `zigzag`: devices of the context axis hold an early and a late piece of every sequence, as causal attention has more to do
    for late positions."""
    return Devices(
        platform=platform,  # type: ignore[arg-type]
        mesh=mesh,
        batch=mesh_axes(mesh, *SAMPLES),
        heads=mesh_axes(mesh, "tensor"),
        sequence=mesh_axes(mesh, "context"),
        context="ring" if layout.context_method == "ring" else "gather",
        order="zigzag" if zigzag else "straight",
    )


def install(
    model: nn.Module, mesh: Mesh, memory: Memory, layout: Layout, placements: Mapping[str, Placement], platform: str
) -> None:
    """Fill the seams of a model on the meta device. `platform`: whose kernels compute."""
    stream = sharding(mesh, SAMPLES, POSITIONS if layout.sequence else "context", None)
    keep: Constrain = lambda x_BSD: jax.lax.with_sharding_constraint(x_BSD, stream)  # noqa: E731
    devices = attention_devices(mesh, layout, platform, zigzag=True)
    # On GPUs the residual stream is in the format of products, as that of the torch engine there. LayerNorm would compute in it, RMSNorm does not.
    is_low = platform == "cuda" and not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    seam: Any  # attributes of modules are replaced
    for seam in model.get_submodule("blocks").children():
        seam.attention.attend = partial(attend_in_jax, devices)
        seam.forward = partial(_kept, seam.forward, keep)
    for seam in model.modules():
        if isinstance(seam, nn.Embedding):
            seam.forward = partial(_look_up, seam, mesh, keep, is_low)  # type: ignore[method-assign]
        elif isinstance(seam, MoE):
            seam.forward = partial(moe_layer.forward, seam, mesh, platform, keep)  # type: ignore[method-assign]

    if memory.loss_chunk and isinstance(model, Decoder):
        model.project = lambda x_BSD, weight_VD: (x_BSD, weight_VD)  # the loss computes logits

    block_loop.install(model, memory, _StackPlaces(mesh, placements))


@dataclass(frozen=True, slots=True)
class _StackPlaces:
    """Where the parameters of repeated blocks lie: their stack as they do, and those of a block whole over `shard` while it computes. Without the second,
    the compiler may divide activations as a parameter is divided."""

    mesh: Mesh
    placements: Mapping[str, Placement]

    def stacked(self, name: str, stack: jax.Array) -> jax.Array:
        placed = self.placements.get(name, _WHOLE)
        return jax.lax.with_sharding_constraint(stack, sharding(self.mesh, None, *placed.value))

    def gathered(self, name: str, value: jax.Array) -> jax.Array:
        placed = self.placements.get(name, _WHOLE)
        return gather(value, sharding(self.mesh, *gathered(placed.value)), sharding(self.mesh, *placed.gradient))


def _kept(forward: Callable[..., Tensor], keep: Constrain, x_BSD: Tensor, *rest: Any) -> Tensor:
    """A block whose argument and result, and so the gradients of both, lie where the residual stream does."""
    out: Tensor = call_jax(keep, forward(call_jax(keep, x_BSD), *rest))
    return out


def attend_in_jax(
    devices: Devices, q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, /, *scores: float | None
) -> Tensor:
    """`models.attention.Attend` by a function of arrays, in the format of matrix products. `scores`: their scale and soft cap."""
    dtype, scoring = products_in(), Scoring(scope.window, *scores)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None) -> jax.Array:
        q, k, v = (x if dtype is None else x.astype(dtype) for x in (q, k, v))
        return attend(q, k, v, documents, scoring, devices)

    out: Tensor = call_jax(run, q_BHSE, k_BKTE, v_BKTE, scope.documents)
    return out


def _look_up(module: nn.Embedding, mesh: Mesh, keep: Constrain, is_low: bool, tokens_BS: Tensor) -> Tensor:
    """Rows of a table of which every device first gets the rows of its tensor group: of a table that is divided further the compiler would
    gather everything that was looked up on every device. `is_low`: the result is in the format of products."""
    rows = "tensor" if module.num_embeddings % mesh_size(mesh, "tensor") == 0 else None
    gathered, dtype = sharding(mesh, rows, None), products_in() if is_low else None

    def run(table_VD: jax.Array, tokens: jax.Array) -> jax.Array:
        found = jnp.take(jax.lax.with_sharding_constraint(table_VD, gathered), tokens, axis=0)
        return keep(found if dtype is None else found.astype(dtype))

    found: Tensor = call_jax(run, module.weight, tokens_BS)
    return found
