"""What the XLA engine puts at the seams of a model before it is traced: attention, the dispatch of experts, look-ups in divided tables, the
place of the residual stream, and blocks that are computed twice instead of stored. The modules themselves do not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from torch import Tensor, nn

from phalanx.models.attention import Scope
from phalanx.models.moe import ExpertsLike, MoE, Router
from phalanx.spec.run import Memory
from phalanx.xla.bridge import call_jax, call_traced, full_precision, products_in
from phalanx.xla.device_mesh import SAMPLES, sharding
from phalanx.xla.plain_attention import Scoring, attend

Constrain = Callable[[jax.Array], jax.Array]

POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What `memory.recompute` stores of a block."""


def install(model: nn.Module, mesh: Mesh, memory: Memory, *, sequence: bool) -> None:
    """Fill the seams of a model on the meta device. `sequence`: the residual stream is divided over the tensor axis too."""
    stream = sharding(mesh, SAMPLES, ("context", "tensor") if sequence else "context", None)
    keep: Constrain = lambda x_BSD: jax.lax.with_sharding_constraint(x_BSD, stream)  # noqa: E731
    seam: Any  # attributes of modules are replaced
    for index, seam in enumerate(model.get_submodule("blocks").children()):
        seam.attention.attend = attend_in_jax
        if memory.recomputes and index % memory.recompute_every == 0:
            seam.forward = partial(_recomputed, seam.forward, POLICIES[memory.recompute])
        seam.register_forward_hook(lambda module, given, x_BSD: call_jax(keep, x_BSD))
    for seam in model.modules():
        if isinstance(seam, nn.Embedding):
            seam.forward = partial(_look_up, seam, mesh, keep)  # type: ignore[method-assign]
        elif isinstance(seam, Router):
            seam.forward = partial(_in_full_precision, seam.forward)  # type: ignore[method-assign]
        elif isinstance(seam, MoE):
            seam.dispatch = _dispatch


def attend_in_jax(
    q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scale: float | None = None, cap: float | None = None, /
) -> Tensor:
    """`models.attention.Attend` by a function of arrays, in the format of matrix products."""
    dtype, scoring = products_in(), Scoring(scope.window, scale, cap)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None) -> jax.Array:
        q, k, v = (x if dtype is None else x.astype(dtype) for x in (q, k, v))
        return attend(q, k, v, documents, scoring)

    out: Tensor = call_jax(run, q_BHSE, k_BKTE, v_BKTE, scope.documents)
    return out


def _look_up(module: nn.Embedding, mesh: Mesh, keep: Constrain, tokens_BS: Tensor) -> Tensor:
    """Rows of a table of which every device first gets the rows of its tensor group: of a table that is divided further the compiler would
    gather everything that was looked up on every device."""
    rows = "tensor" if module.num_embeddings % mesh.shape["tensor"] == 0 else None
    gathered = sharding(mesh, rows, None)

    def run(table_VD: jax.Array, tokens: jax.Array) -> jax.Array:
        return keep(jnp.take(jax.lax.with_sharding_constraint(table_VD, gathered), tokens, axis=0))

    found: Tensor = call_jax(run, module.weight, tokens_BS)
    return found


def _in_full_precision(forward: Callable[[Tensor], tuple[Tensor, Tensor]], x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    with full_precision():
        return forward(x_BSD)


def _recomputed(forward: Callable[..., Tensor], policy: Callable[..., bool], x_BSD: Tensor, *rest: Any) -> Tensor:
    """A block whose backward computes it again, except for what the policy stores."""

    def run(x: jax.Array) -> jax.Array:
        return call_traced(forward, x, *rest)

    out: Tensor = call_jax(jax.checkpoint(run, policy=policy), x_BSD)
    return out


def _dispatch(x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: ExpertsLike, /) -> Tensor:
    """Every token through its experts, all on the devices that hold the token: the compiler does not divide the sorted rows, so that
    more devices do not have less work."""
    dtype = products_in()

    def run(x: jax.Array, chosen: jax.Array, weights: jax.Array, *matrices: jax.Array) -> jax.Array:
        return through_experts(x, chosen, weights, dict(zip(("gate", "up", "down"), matrices, strict=True)), dtype)

    parameters: Any = experts
    y_TD: Tensor = call_jax(run, x_TD, chosen_TK, weights_TK, parameters.gate, parameters.up, parameters.down)
    return y_TD


def through_experts(
    x_TD: jax.Array, chosen_TK: jax.Array, weights_TK: jax.Array, experts: Mapping[str, jax.Array], dtype: Any = None
) -> jax.Array:
    """The sum of each token's experts, by its weights. Rows are sorted by expert for one grouped product."""
    dtype, active = dtype or x_TD.dtype, chosen_TK.shape[1]
    chosen_R = chosen_TK.reshape(-1)
    order_R = jnp.argsort(chosen_R, stable=True)
    counts_E = jnp.zeros(len(experts["gate"]), jnp.int32).at[chosen_R].add(1)
    gate_EDF, up_EDF, down_EFD = (experts[name].astype(dtype).swapaxes(1, 2) for name in ("gate", "up", "down"))
    x_RD = x_TD.astype(dtype)[order_R // active]
    inner_RF = jax.nn.silu(jax.lax.ragged_dot(x_RD, gate_EDF, counts_E)) * jax.lax.ragged_dot(x_RD, up_EDF, counts_E)
    scaled_RF = inner_RF * weights_TK.reshape(-1)[order_R][:, None].astype(dtype)
    y_RD = jax.lax.ragged_dot(scaled_RF, down_EFD, counts_E)
    return jnp.zeros_like(x_TD).at[order_R // active].add(y_RD.astype(x_TD.dtype))
