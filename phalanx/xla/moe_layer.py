"""A mixture of experts on the devices of a mesh, in shard_map: each device routes its own tokens and multiplies the rows of its own experts. A compiler
left alone would not divide sorted tokens. `xla/model_seams` puts `forward` where a model's `MoE` has its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch import Tensor

from phalanx.models.moe import MoE, Router
from phalanx.xla.bridge import call_jax, call_module, has_wide_sums, products_in
from phalanx.xla.device_mesh import POSITIONS, SAMPLES, mesh_axes, spec
from phalanx.xla.experts import ExpertLayout, ExpertWeights, local_dispatch, weight_specs


def expert_layout(mesh: Mesh, platform: str) -> ExpertLayout:
    """How the tokens and experts of every layer are divided. Rows do not travel alone: each expert group gathers its tokens, on any platform."""
    return ExpertLayout(
        batch=mesh_axes(mesh, *SAMPLES),
        sequence=mesh_axes(mesh, *POSITIONS),
        expert=mesh_axes(mesh, "expert"),
        expert_tensor=mesh_axes(mesh, "expert_tensor"),
        product="passes" if platform == "cpu" else "ragged",
    )


def forward(module: MoE, mesh: Mesh, platform: str, keep: Callable[[jax.Array], jax.Array], x_BSD: Tensor) -> Tensor:
    """`MoE.forward`, and the same counts in the router's buffer. `keep`: puts tokens where the residual stream is, from where shared experts take them."""
    dtype, router, experts = products_in(), module.router, module.experts
    sums = jnp.float32 if has_wide_sums() else None  # of gradients over devices, where they enter shard_map
    routed = _Routed(mesh, expert_layout(mesh, platform), router, experts.count)
    buffers = {} if router.bias is None else {"bias": router.bias}

    def run(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, *routing: jax.Array) -> tuple[jax.Array, ...]:
        x = keep(x if dtype is None else x.astype(dtype))  # the router gets what the experts get
        weights = ExpertWeights(*(weight.astype(x.dtype).astype(sums or x.dtype) for weight in (gate, up, down)))
        y, counts = routed(x, dict(zip(("weight", *buffers), routing, strict=True)), weights)
        return x, keep(y), counts

    x_BSD, y_BSD, counts_E = call_jax(run, x_BSD, experts.gate, experts.up, experts.down, router.weight, *buffers.values())
    if torch.is_grad_enabled():
        router.counts += counts_E
    return y_BSD if module.shared is None else y_BSD + module.shared(x_BSD)


class _Routed(NamedTuple):
    """The routed experts of a layer."""

    mesh: Mesh
    layout: ExpertLayout
    router: Router
    experts: int

    def __call__(self, x_BSD: jax.Array, routing: dict[str, jax.Array], weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
        """The sum of each token's experts, and how many tokens each expert got on all devices."""
        rows = spec(self.mesh, SAMPLES, POSITIONS, None)
        inside = jax.shard_map(
            self._on_device,
            mesh=self.mesh,
            in_specs=(rows, P(), weight_specs(self.layout)),
            out_specs=(rows, P()),
            check_vma=False,
        )
        y_BSD, counts_E = inside(x_BSD, routing, weights)
        return y_BSD, counts_E

    def _on_device(
        self, x_BSD: jax.Array, routing: dict[str, jax.Array], weights: ExpertWeights
    ) -> tuple[jax.Array, jax.Array]:
        """One device's own tokens. Its part of the balancing loss is that of its scores, with the counts of whole sequences."""
        together = partial(lax.psum, axis_name=self.layout.sequence)
        self.router.together = lambda counts_BE: call_jax(together, counts_BE)
        counts = {"counts": jnp.zeros(self.experts, jnp.int32)}
        (chosen_TK, weights_TK), after = call_module(self.router, routing | counts, (x_BSD,), None, ("counts",))
        weights = ExpertWeights(*(weight.astype(x_BSD.dtype) for weight in weights))
        y_BSD: Any = local_dispatch(x_BSD, chosen_TK, weights_TK, weights, self.experts, self.layout)
        return y_BSD, lax.psum(after["counts"], self.layout.batch + self.layout.sequence)
