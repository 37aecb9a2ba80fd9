"""Routed experts over devices, in JAX: each device multiplies the rows of its own experts only. `xla/moe_layer` calls `local_dispatch` on every device;
`dispatch` does it for tokens that the compiler divides. A compiler left alone would not divide sorted tokens: every device would multiply nearly
all of them.

Two ways to bring tokens and experts together, both without a capacity limit:

    gather      every device of an expert group gets all tokens of the group, takes the rows of its own experts, and the sums are
                scattered back; any platform
    ragged      each row travels to the device of its expert and back, as `jax.lax.ragged_all_to_all` has it; TPU and GPU

Devices that hold slices of the same experts (`expert_tensor`) share their tokens and add up their results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from phalanx.xla.grouped_product import Product, grouped_product

# Shapes: T tokens, K experts of each, R = T · K rows, D width, F width of an expert, E experts of the layer, L of them on a device, N devices
# that hold different experts.


class ExpertWeights(NamedTuple):
    """All experts of a layer, stacked; each is a SwiGLU."""

    gate_EFD: Array
    up_EFD: Array
    down_EDF: Array


@dataclass(frozen=True)
class ExpertLayout:
    """How the tokens and experts of a layer are divided over the axes of a mesh."""

    batch: tuple[str, ...] = ("data", "shard")
    """Axes that divide sequences."""
    sequence: tuple[str, ...] = ("context", "tensor")
    """Axes that divide the positions of each sequence."""
    expert: tuple[str, ...] = ()
    """Axes among those that divide the experts."""
    expert_tensor: tuple[str, ...] = ()
    """Axes among those that divide each expert's matrices."""
    sequences: int | None = None
    """Sequences that the tokens are made of, one after the other; None: the tokens are divided as one row."""
    exchange: Literal["gather", "ragged"] = "gather"
    product: Product = "passes"
    """How sorted rows are multiplied by their experts: "ragged" on TPU and GPU, "passes" on CPU."""
    ragged_all_to_all: Callable[..., Array] = lax.ragged_all_to_all
    """The collective of the ragged exchange."""

    @property
    def group(self) -> tuple[str, ...]:
        """Axes of the devices that share tokens."""
        return self.expert + self.expert_tensor


def weight_specs(layout: ExpertLayout) -> ExpertWeights:
    """The PartitionSpec of each stack of matrices inside a dispatch."""
    expert, ffn = layout.expert or None, layout.expert_tensor or None
    return ExpertWeights(*(P(expert, ffn, None), P(expert, ffn, None), P(expert, None, ffn)))  # type: ignore[arg-type]


def dispatch(
    x_TD: Array,
    chosen_TK: Array,
    weights_TK: Array,
    experts: ExpertWeights,
    mesh: Mesh | None = None,
    layout: ExpertLayout | None = None,
) -> Array:
    """Send tokens to their experts and add up the weighted results, [T, D]. No mesh: all experts are on one device. Differentiable in
    tokens, weights and experts, whose matrices are multiplied in the tokens' dtype."""
    layout = ExpertLayout() if layout is None else layout
    experts = ExpertWeights(*(weight.astype(x_TD.dtype) for weight in experts))
    count = len(experts.gate_EFD)
    if mesh is None:
        return _local(x_TD, chosen_TK, weights_TK, experts, _Place(0, count, layout.product)).astype(x_TD.dtype)
    _check(mesh, layout, experts, len(x_TD))
    tokens = (len(x_TD),) if layout.sequences is None else (layout.sequences, len(x_TD) // layout.sequences)
    every = (layout.batch + layout.sequence,) if layout.sequences is None else (layout.batch, layout.sequence)
    rows = P(*every, None)
    # Positions that only make the division even choose no expert: those beyond the last.
    padding = [(0, -size % prod(mesh.shape[axis] for axis in axes)) for size, axes in zip(tokens, every, strict=True)]
    x, chosen, weights = (
        jnp.pad(value.reshape(*tokens, -1), [*padding, (0, 0)], constant_values=fill)
        for value, fill in ((x_TD, 0), (chosen_TK, count), (weights_TK, 0))
    )
    inside = jax.shard_map(
        partial(local_dispatch, count=count, layout=layout),
        mesh=mesh,
        in_specs=(rows, rows, rows, weight_specs(layout)),
        out_specs=rows,
        check_vma=False,
    )
    y = inside(x, chosen, weights, experts)
    return y[tuple(slice(size) for size in tokens)].reshape(x_TD.shape)


def _check(mesh: Mesh, layout: ExpertLayout, experts: ExpertWeights, tokens: int) -> None:
    divided = layout.batch + layout.sequence
    unknown = [axis for axis in layout.group if axis not in divided]
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in divided]
    if unknown or idle:
        raise ValueError(
            f"Tokens must be divided over all axes of the mesh that have several devices, and experts over some of them: {unknown or idle}."
        )
    _, ffn, _ = experts.gate_EFD.shape
    for size, axes, what in (
        (len(experts.gate_EFD), layout.expert, "experts"),
        (ffn, layout.expert_tensor, "rows of each expert"),
    ):
        devices = prod(mesh.shape[axis] for axis in axes)
        if size % devices:
            raise ValueError(f"{devices} devices of the axes {list(axes)} cannot share {size} {what} evenly.")
    if layout.sequences is not None and tokens % layout.sequences:
        raise ValueError(f"{tokens} tokens are not {layout.sequences} sequences of one length.")


class _Place(NamedTuple):
    """What a device has of a layer."""

    first: int | Array
    """Its first expert."""
    whole: int
    """Experts of the layer on all devices."""
    product: Product


def local_dispatch(x: Array, chosen: Array, weights: Array, experts: ExpertWeights, count: int, layout: ExpertLayout) -> Array:
    """One device's part, inside shard_map: its own tokens, and its own experts or slices of them. `count`: experts on all devices."""
    x_TD, chosen_TK, weights_TK = (value.reshape(-1, value.shape[-1]) for value in (x, chosen, weights))
    together = layout.group if layout.exchange == "gather" else layout.expert_tensor
    if together:
        x_TD, chosen_TK, weights_TK = (lax.all_gather(value, together, tiled=True) for value in (x_TD, chosen_TK, weights_TK))
    first = lax.axis_index(layout.expert) * len(experts.gate_EFD) if layout.expert else 0
    place = _Place(first, count, layout.product)
    if layout.exchange == "ragged" and layout.expert:
        y_TD = _travel(x_TD, chosen_TK, weights_TK, experts, (place, layout))
    else:
        y_TD = _local(x_TD, chosen_TK, weights_TK, experts, place)
    if together:
        y_TD = lax.psum_scatter(y_TD, together, scatter_dimension=0, tiled=True)
    return y_TD.astype(x.dtype).reshape(x.shape)


def _local(x_TD: Array, chosen_TK: Array, weights_TK: Array, experts: ExpertWeights, place: _Place) -> Array:
    """The sum of each token's rows over the experts that are here, in full precision."""
    here, copies = len(experts.gate_EFD), chosen_TK.shape[1]
    own_R = chosen_TK.reshape(-1) - place.first
    own_R = jnp.where(
        (own_R >= 0) & (own_R < here), own_R, here
    )  # all others follow the last group, where nothing is multiplied
    sorting = _sorting(own_R)
    x_RD = _take_rows(x_TD, sorting, copies)
    scales_R1 = _take_rows(weights_TK.reshape(-1, 1), sorting, 1)
    y_RD = _experts(x_RD, scales_R1, experts, _counts(own_R, here), place)
    return _sum_rows(y_RD, sorting, copies)


def _experts(x_RD: Array, scales_R1: Array, experts: ExpertWeights, counts_L: Array, place: _Place) -> Array:
    """Rows sorted by expert through their experts, each result times its scale: before the last product, as the torch engine does."""
    expected = -(-len(x_RD) // place.whole)
    gate_RF, up_RF = (
        grouped_product(x_RD, weight.swapaxes(1, 2), counts_L, expected, place.product)
        for weight in (experts.gate_EFD, experts.up_EFD)
    )
    wide = jnp.promote_types(x_RD.dtype, jnp.float32)
    inner_RF = (jax.nn.silu(gate_RF.astype(wide)) * up_RF.astype(wide) * scales_R1).astype(x_RD.dtype)
    return grouped_product(inner_RF, experts.down_EDF.swapaxes(1, 2), counts_L, expected, place.product)


def _travel(
    x_TD: Array, chosen_TK: Array, weights_TK: Array, experts: ExpertWeights, where: tuple[_Place, ExpertLayout]
) -> Array:
    """Each row to the device of its expert and back: the sum of each token's rows, in full precision."""
    place, layout = where
    here, copies, count = len(experts.gate_EFD), chosen_TK.shape[1], place.whole
    sorting = _sorting(chosen_TK.reshape(-1))
    routes = _Routes.of(_counts(chosen_TK.reshape(-1), count), here, layout)
    x_RD = _take_rows(x_TD, sorting, copies)
    scales_R1 = _take_rows(weights_TK.reshape(-1, 1), sorting, 1)
    arrived = _sorting(routes.owner(len(x_RD)))
    x_RD, scales_R1 = (_take_rows(routes.there(rows), arrived, 1) for rows in (x_RD, scales_R1))
    y_RD = _experts(x_RD, scales_R1, experts, routes.counts_NL.sum(0), place)
    return _sum_rows(routes.back(_sum_rows(y_RD, arrived, 1).astype(x_TD.dtype)), sorting, copies)


class _Routes(NamedTuple):
    """How many rows go from which device to which, and where they lie."""

    sizes_NN: Array
    """Rows from each device (row) to each (column)."""
    counts_NL: Array
    """Rows for each expert here, by source, in the order in which they arrive."""
    me: Array
    layout: ExpertLayout

    @classmethod
    def of(cls, counts_E: Array, here: int, layout: ExpertLayout) -> _Routes:
        """Tell every device of the group how many rows each expert gets from this one."""
        counts_NNL = lax.all_gather(counts_E.reshape(-1, here), layout.expert)
        me = lax.axis_index(layout.expert)
        return cls(counts_NNL.sum(-1), counts_NNL[:, me], me, layout)

    @property
    def left_NN(self) -> Array:
        """Where each device's rows for each lie, among those that it sends."""
        return self.sizes_NN.cumsum(1) - self.sizes_NN

    @property
    def arrived_NN(self) -> Array:
        """Where they lie at their destination: sources in order."""
        return self.sizes_NN.cumsum(0) - self.sizes_NN

    def owner(self, rows: int) -> Array:
        """The expert of each place where a row may arrive; the number of experts where none does."""
        ends = self.counts_NL.reshape(-1).cumsum()
        slot = jnp.searchsorted(ends, jnp.arange(len(self.sizes_NN) * rows, dtype=ends.dtype), side="right")
        return jnp.where(slot < len(ends), slot % self.counts_NL.shape[1], self.counts_NL.shape[1])

    def there(self, rows: Array) -> Array:
        """Rows to the devices of their experts. Any device may get all, so there is room for them."""
        room = jnp.zeros((len(self.sizes_NN) * len(rows), *rows.shape[1:]), rows.dtype)
        places = self.left_NN[self.me], self.sizes_NN[self.me], self.arrived_NN[self.me], self.sizes_NN[:, self.me]
        return self._move(rows, room, places)

    def back(self, rows: Array) -> Array:
        """The inverse of `there`."""
        room = jnp.zeros((len(rows) // len(self.sizes_NN), *rows.shape[1:]), rows.dtype)
        places = self.arrived_NN[:, self.me], self.sizes_NN[:, self.me], self.left_NN[:, self.me], self.sizes_NN[self.me]
        return self._move(rows, room, places)

    def _move(self, rows: Array, room: Array, places: tuple[Array, ...]) -> Array:
        name = self.layout.expert if len(self.layout.expert) > 1 else self.layout.expert[0]
        return self.layout.ragged_all_to_all(rows, room, *(place.astype(jnp.int32) for place in places), axis_name=name)


def _counts(owner_R: Array, owners: int) -> Array:
    """How often each occurs; those beyond the last are not counted."""
    return jnp.zeros(owners, jnp.int32).at[owner_R].add(1, mode="drop")


class _Sorting(NamedTuple):
    """A permutation of rows."""

    order_R: Array
    """The row that comes to each place."""
    place_R: Array
    """The place of each row: the inverse."""


def _sorting(owner_R: Array) -> _Sorting:
    order_R = jnp.argsort(owner_R, stable=True)
    return _Sorting(
        order_R, jnp.zeros_like(order_R).at[order_R].set(jnp.arange(len(order_R), dtype=order_R.dtype), unique_indices=True)
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take_rows(x: Array, sorting: _Sorting, copies: int) -> Array:
    """Rows in sorted order, each taken `copies` times. The backward is a gather too, so that no sum depends on timing."""
    return x[sorting.order_R // copies]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_rows(y: Array, sorting: _Sorting, copies: int) -> Array:
    """The sum of each token's rows, in full precision: the inverse of `_take_rows`."""
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    return wide[sorting.place_R].reshape(-1, copies, y.shape[-1]).sum(1)


def _take_forward(x: Array, sorting: _Sorting, copies: int) -> tuple[Array, Any]:
    return _take_rows(x, sorting, copies), sorting


def _take_backward(copies: int, sorting: _Sorting, gradient: Array) -> tuple[Array, None]:
    return _sum_rows(gradient, sorting, copies).astype(gradient.dtype), None


def _sum_forward(y: Array, sorting: _Sorting, copies: int) -> tuple[Array, Any]:
    return _sum_rows(y, sorting, copies), (sorting, jnp.zeros(0, y.dtype))


def _sum_backward(copies: int, saved: Any, gradient: Array) -> tuple[Array, None]:
    sorting, like = saved
    return _take_rows(gradient, sorting, copies).astype(like.dtype), None


_take_rows.defvjp(_take_forward, _take_backward)
_sum_rows.defvjp(_sum_forward, _sum_backward)
