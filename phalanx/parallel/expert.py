"""Expert parallelism: each rank holds some of a layer's experts, or slices of them, and tokens travel there. `parallel/apply` calls
`split`; `training/step` sums the counts of `Loads` along with its totals.

It knows no model. A layer of experts is a module with parameters whose first dimension is named "expert", called with rows sorted by
expert and the number of rows per expert. Its parent's `dispatch` sorts the tokens, calls the experts and adds up the results. Only the
callee changes here: `DistributedExperts` looks like the experts of one device.

    rows, sorted by expert      of this rank's tokens
      exchange over `across`    each row to one of the ranks that hold its expert
      gather over `within`      from there to the ranks that hold other slices of the same expert
      sort by expert            stable: sources in rank order
      experts
      back the same way         partial outputs are added on the rank that received the row, in rank order

So a row crosses the slow links once each way, however many ranks share an expert, and ranks may have any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Environment, Mesh
from phalanx.parallel.sharded_model import ParamShard, replace_parameter
from phalanx.spec.cut_plan import Axes, Dim, dim_names
from phalanx.spec.errors import RunError, either


def split(parts: Sequence[nn.Module], shards: Mapping[str, ParamShard], axes: Axes, mesh: Mesh) -> dict[str, ParamShard]:
    """Cut the experts of all layers, install the dispatch to other ranks, and return every parameter's shard.

    Every rank of a stage has tokens of its own. So the gradient of an expert's shard is complete when it is summed over the ranks
    that hold the same shard, whatever dense layers do with these ranks.
    """
    result = dict(shards)
    divided = mesh.size("expert") * mesh.size("expert_tensor") > 1
    for layer in _layers(parts, axes).values():
        router = getattr(layer.parent, "router", None)
        if router is not None and mesh.size("context") * mesh.size("tensor") > 1:
            # These ranks hold parts of the same sequences, and the balancing loss is that of whole sequences.
            router.together = mesh.group("context", "tensor", use="expert").all_reduce
        if divided:
            count = _check(layer, result, mesh)
            for name, dims in layer.dims.items():
                result[name] = _cut(result[name], dims, mesh)
                replace_parameter(layer.experts, name.rpartition(".")[2], result[name].slice.shape)
            local: Any = layer.parent.dispatch
            layer.parent.dispatch = Dispatch(local, _distributed(layer.experts, count, mesh))  # type: ignore[assignment]
    return result


def applied(parts: Sequence[nn.Module], shards: Mapping[str, ParamShard], axes: Axes) -> str | None:
    """What was done to this rank's first expert layer, read from its parameters; None if no layer was cut."""
    for layer in _layers(parts, axes).values():
        dispatch = getattr(layer.parent, "dispatch", None)
        if isinstance(dispatch, Dispatch):
            name, dims = next(iter(layer.dims.items()))
            shape, whole = layer.experts.get_parameter(name.rpartition(".")[2]).shape, shards[name].slice.whole
            words = [
                f"{part} of {all_} {'experts' if dim == 'expert' else 'rows of each'}"
                for part, all_, dim in zip(shape, whole, dims, strict=True)
                if dim in ("expert", "ffn")
            ]
            return f"{name}: {', '.join(words)}; tokens travel among {dispatch.experts.everyone.size} ranks"
    return None


@dataclass(frozen=True, slots=True)
class _Layer:
    parent: nn.Module
    experts: nn.Module
    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    """Names of its parameters' dimensions, by full parameter name."""


def _layers(parts: Sequence[nn.Module], axes: Axes) -> dict[str, _Layer]:
    layers: dict[str, _Layer] = {}
    for part in parts:
        for name, _ in part.named_parameters():
            dims = dim_names(name, axes)
            if dims[:1] == ("expert",):
                path = name.rpartition(".")[0]
                parent, experts = part.get_submodule(path.rpartition(".")[0]), part.get_submodule(path)
                layers.setdefault(path, _Layer(parent, experts)).dims[name] = dims
    return layers


def _check(layer: _Layer, shards: Mapping[str, ParamShard], mesh: Mesh) -> int:
    """The number of experts of a layer; refuses one that cannot be divided."""
    ranks, slices, problems = mesh.size("expert"), mesh.size("expert_tensor"), []
    first = next(iter(layer.dims))
    count = shards[first].slice.whole[0]
    if count % ranks:
        divisors = [str(divisor) for divisor in range(1, count + 1) if count % divisor == 0]
        problems.append(
            f"layout.expert = {ranks} does not divide the {count} experts of {first}: set it to {either(divisors)}, "
            f"or model.moe.experts to a multiple of {ranks}."
        )
    if not hasattr(layer.parent, "dispatch"):
        problems.append(
            f"layout.expert = {ranks} cannot divide the experts of {first}: the module above them has no `dispatch` that calls "
            "them with tokens; give it one, as phalanx/models/moe.py has, or leave layout.expert and layout.expert_tensor at 1."
        )
    problems += [
        f'layout.expert_tensor = {slices} cannot slice {name}: none of its dimensions {list(dims)} is named "ffn"; name one in '
        "AXES, or set layout.expert_tensor = 1."
        for name, dims in layer.dims.items()
        if slices > 1 and "ffn" not in dims and "rank" not in dims
    ]
    if problems:
        raise RunError(problems)
    return count


def _cut(shard: ParamShard, dims: tuple[Dim, ...], mesh: Mesh) -> ParamShard:
    partial: tuple[str, ...] = ()
    for dim, axis in (("expert", "expert"), ("ffn", "expert_tensor")):
        if mesh.size(axis) > 1 and dim in dims:
            shard = shard.cut(dims.index(dim), mesh.coordinate(axis), mesh.size(axis), axis)
        elif mesh.size(axis) > 1:
            partial = (axis,)  # one matrix of an adapter stays whole, and ranks compute with slices of the other
    return replace(shard, expert=True, partial=partial)


# Shapes: R rows (one per token and chosen expert), E experts of the layer, L of them on this rank, P ranks of `across`,
# Q of `within`.


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A layer's own dispatch, with experts that are distributed over ranks."""

    local: Callable[..., Tensor]
    experts: DistributedExperts

    def __call__(self, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: Callable[..., Tensor], /) -> Tensor:
        return self.local(x_TD, chosen_TK, weights_TK, replace(self.experts, own=experts))


@dataclass(frozen=True, slots=True)
class DistributedExperts:
    """All experts of a layer, some of them on this rank. Called like local experts: rows sorted by expert, the number of each, and more.

    It keeps no state between calls, so a forward may be repeated for its backward. All ranks call it together; one that receives no
    row takes part like the others, and its experts get a gradient of zero.
    """

    own: Callable[..., Tensor]
    count: int
    """Experts of the layer on all ranks. Read by the layer's own dispatch."""
    across: Group
    """Ranks that hold other experts."""
    within: Group
    """Ranks that hold other slices of this rank's experts."""
    everyone: Group
    """All of them; `within` varies fastest."""
    environment: Environment

    @property
    def takes_scales(self) -> bool:
        return getattr(self.own, "takes_scales", False)

    def __call__(self, x_RD: Tensor, counts_E: Tensor, *more_R: Tensor) -> Tensor:
        """`more_R`: what the experts take for each row besides it, such as scales."""
        routes = self._agree(counts_E, len(x_RD))
        order_R, inverse_R = routes.order()

        def there(rows: Tensor) -> Tensor:
            rows = self.across.exchange(rows, routes.sent, routes.received)
            return _Reorder.apply(_gather(rows, self.within, routes.sizes), order_R, inverse_R)

        y_RD = self.own(there(x_RD), routes.counts_QPL.sum((0, 1)), *(there(more) for more in more_R))
        y_RD = _scatter(_Reorder.apply(y_RD, inverse_R, order_R), self.within, routes.sizes)
        return self.across.exchange(y_RD, routes.received, routes.sent)

    def _agree(self, counts_E: Tensor, rows: int) -> _Routes:
        """Tell every rank how many rows its experts get from this one: one small exchange.

        Message lengths must be known on the host. A GPU is waited for here, once in a layer's forward and never in a backward.
        """
        across, within, everyone = self.across, self.within, self.everyone
        counts_PL = counts_E.view(across.size, -1)
        ones = [1] * everyone.size
        counts_PQL = everyone.all_to_all(counts_PL.repeat_interleave(within.size, 0), ones, ones)
        counts_PQL = counts_PQL.view(across.size, within.size, -1)
        received_P, sizes_Q = counts_PQL[:, within.index].sum(-1), counts_PQL.sum((0, 2))
        known = self.environment.expert_rows(torch.cat((counts_PL.sum(-1), received_P, sizes_Q)), across, within, rows)
        sent, received, sizes = known[: across.size], known[across.size : -within.size], known[-within.size :]
        return _Routes(sent, received, sizes, counts_PQL.transpose(0, 1))


def _distributed(own: nn.Module, count: int, mesh: Mesh) -> DistributedExperts:
    across, within = mesh.group("expert", use="expert"), mesh.group("expert_tensor", use="expert tensor")
    everyone = max(across, within, key=lambda group: group.size)
    if across.size > 1 and within.size > 1:
        everyone = mesh.group("expert", "expert_tensor", use="expert")
    return DistributedExperts(own, count, across, within, everyone, mesh.environment)


@dataclass(frozen=True, slots=True)
class _Routes:
    """How many rows go from where to where in one layer."""

    sent: list[int]
    """From this rank to each rank of `across`."""
    received: list[int]
    """From each rank of `across` to this rank."""
    sizes: list[int]
    """That each rank of `within` has received."""
    counts_QPL: Tensor
    """Rows for each expert of this rank, by source, in the order in which they lie in memory."""

    def order(self) -> tuple[Tensor, Tensor]:
        """The permutation that sorts the rows, which lie source by source, by expert; and its inverse."""
        counts_QPL, device = self.counts_QPL, self.counts_QPL.device
        experts_QPL = torch.arange(counts_QPL.shape[-1], device=device).expand_as(counts_QPL)
        # With the length given, the host need not ask the GPU for it.
        experts_R = experts_QPL.flatten().repeat_interleave(counts_QPL.flatten(), output_size=sum(self.sizes))
        order_R = experts_R.argsort(stable=True)
        inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=device))
        return order_R, inverse_R


def _gather(x_RD: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """The rows of all ranks, which differ in number: an all-gather needs equal parts."""
    if group.size == 1:
        return x_RD
    return group.exchange(torch.cat([x_RD] * group.size), [len(x_RD)] * group.size, sizes)


def _scatter(y_RD: Tensor, group: Group, sizes: list[int]) -> Tensor:
    """This rank's rows of the sum over the group: the inverse of `_gather`."""
    if group.size == 1:
        return y_RD
    own = sizes[group.index]
    return group.exchange(y_RD, sizes, [own] * group.size).view(group.size, own, y_RD.shape[1]).sum(0)


class _Reorder(torch.autograd.Function):
    """Permutes rows. Its backward permutes too; indexing's own backward would add to zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        # Not `save_for_backward`: a recomputed forward ends where the last tensor is saved, and no gradient needs the experts' results.
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.inverse], None, None


class Loads:
    """Tokens per expert of all layers as one flat row, so that they travel with other sums over the ranks."""

    def __init__(self, sizes: Mapping[str, int], counts: Mapping[str, Tensor]):
        """`sizes`: experts of every layer of the whole model; `counts`: of the layers on this rank."""
        self._sizes, self._counts = dict(sizes), dict(counts)

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def reset(self) -> None:
        for count in self._counts.values():
            count.zero_()

    def put(self, row: Tensor) -> None:
        """Write this rank's counts into a row of `size` zeros. In fp64 their sum over the ranks is exact."""
        for name, place in self.split(row).items():
            if name in self._counts:
                place.copy_(self._counts[name])

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """The part of such a row that belongs to each layer."""
        return dict(zip(self._sizes, row.split(list(self._sizes.values())), strict=True)) if self._sizes else {}


def imbalance(loads: Iterable[Tensor]) -> Tensor:
    """Load of the fullest expert over the mean, in the worst layer; 1 is perfect balance."""
    return torch.stack([load.max() / load.mean().clamp(min=1e-9) for load in loads]).max()
