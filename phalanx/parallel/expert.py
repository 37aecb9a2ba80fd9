"""Expert parallelism: each rank holds some of a layer's experts, or slices of them, and tokens travel there. Called by
`parallel/apply`. Also how many tokens went to each expert over all ranks, which `training/step` sums along with its totals.

It knows no model. A layer of experts is a module with parameters whose first dimension is named "expert", called with rows
sorted by expert and with how many each expert gets; its parent has a `dispatch` that calls it so, and a `router`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from phalanx.parallel.expert_dispatch import Dispatch, Seats
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import ParamShard, replace_parameter
from phalanx.spec.errors import RunError, either

Axes = Mapping[str, tuple[str, ...]]
"""Parameter-name pattern to the names of its dimensions; the first that matches counts."""


def split(parts: Sequence[nn.Module], spots: Mapping[str, ParamShard], axes: Axes, mesh: Mesh) -> dict[str, ParamShard]:
    """Cut the experts of all layers and let tokens travel to them; where every parameter lies then.

    Every rank of a stage is taken to have tokens of its own. So the gradient of a part of the experts is complete once it is
    summed over the ranks that hold the same part, whatever dense layers do with these ranks.
    """
    found = dict(spots)
    shared = mesh.size("expert") * mesh.size("expert_tensor") > 1
    for layer in _layers(parts, axes).values():
        router = getattr(layer.parent, "router", None)
        if router is not None and mesh.size("context") * mesh.size("tensor") > 1:
            # Parts of its sequences lie on these ranks, and the balancing loss is that of whole ones.
            router.together = mesh.group("context", "tensor", use="expert").all_reduce
        if shared:
            count = _legal(layer, found, mesh)
            for name, dims in layer.dims.items():
                found[name] = _cut(found[name], dims, mesh)
                replace_parameter(layer.experts, name.rpartition(".")[2], found[name].slice.shape)
            layer.parent.dispatch = Dispatch(layer.parent.dispatch, count, _seats(mesh))  # type: ignore[arg-type, assignment]
    return found


def applied(parts: Sequence[nn.Module], spots: Mapping[str, ParamShard], axes: Axes) -> str | None:
    """What became of this rank's first layer of experts, read off its parameters; None if no layer of it was cut."""
    for layer in _layers(parts, axes).values():
        dispatch = getattr(layer.parent, "dispatch", None)
        if isinstance(dispatch, Dispatch):
            name, dims = next(iter(layer.dims.items()))
            shape, whole = layer.experts.get_parameter(name.rpartition(".")[2]).shape, spots[name].slice.whole
            words = [
                f"{part} of {all_} {'experts' if dim == 'expert' else 'rows of each'}"
                for part, all_, dim in zip(shape, whole, dims, strict=True)
                if dim in ("expert", "ffn")
            ]
            return f"{name}: {', '.join(words)}; tokens travel among {dispatch.seats.everyone.size} ranks"
    return None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's experts."""

    parent: nn.Module
    experts: nn.Module
    dims: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of its parameters' dimensions, by the parameter's full name."""


def _layers(parts: Sequence[nn.Module], axes: Axes) -> dict[str, _Layer]:
    found: dict[str, _Layer] = {}
    for part in parts:
        for name, _ in part.named_parameters():
            dims = next((dims for pattern, dims in axes.items() if fnmatchcase(name, pattern)), ())
            if dims[:1] == ("expert",):
                place = name.rpartition(".")[0]
                parent, experts = part.get_submodule(place.rpartition(".")[0]), part.get_submodule(place)
                found.setdefault(place, _Layer(parent, experts)).dims[name] = dims
    return found


def _legal(layer: _Layer, spots: Mapping[str, ParamShard], mesh: Mesh) -> int:
    """How many experts the layer has; refuses one that cannot be shared so."""
    ranks, slices, problems = mesh.size("expert"), mesh.size("expert_tensor"), []
    first = next(iter(layer.dims))
    count = spots[first].slice.whole[0]
    if count % ranks:
        fitting = [str(divisor) for divisor in range(1, count + 1) if count % divisor == 0]
        problems.append(
            f"layout.expert = {ranks} does not divide the {count} experts of {first}: set it to {either(fitting)}, "
            f"or model.moe.experts to a multiple of {ranks}."
        )
    if not hasattr(layer.parent, "dispatch"):
        problems.append(
            f"layout.expert = {ranks} cannot share the experts of {first}: the module above them has no `dispatch` that hands "
            "them tokens; give it one, as phalanx/models/moe.py has, or leave layout.expert and layout.expert_tensor at 1."
        )
    problems += [
        f'layout.expert_tensor = {slices} cannot slice {name}: none of its dimensions {list(dims)} is named "ffn"; name one in '
        "AXES, or set layout.expert_tensor = 1."
        for name, dims in layer.dims.items()
        if slices > 1 and "ffn" not in dims
    ]
    if problems:
        raise RunError(problems)
    return count


def _cut(spot: ParamShard, dims: tuple[str, ...], mesh: Mesh) -> ParamShard:
    for dim, axis in (("expert", "expert"), ("ffn", "expert_tensor")):
        if mesh.size(axis) > 1:
            spot = spot.cut(dims.index(dim), mesh.coordinate(axis), mesh.size(axis), axis)
    return replace(spot, expert=True, partial=())


def _seats(mesh: Mesh) -> Seats:
    across, within = mesh.group("expert", use="expert"), mesh.group("expert_tensor", use="expert tensor")
    both = across.size > 1 and within.size > 1
    everyone = (
        mesh.group("expert", "expert_tensor", use="expert") if both else max(across, within, key=lambda group: group.size)
    )
    return Seats(across, within, everyone)


class Loads:
    """The counts of all layers as one flat row, so that they travel with what the ranks sum anyway."""

    def __init__(self, sizes: Mapping[str, int], counts: Mapping[str, Tensor]):
        """`sizes`: experts of every layer of the whole model; `counts`: of the layers that this rank has."""
        self._sizes, self._counts = dict(sizes), dict(counts)

    @property
    def size(self) -> int:
        """Experts of all layers together."""
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
        """The parts of such a row that belong to each layer."""
        return dict(zip(self._sizes, row.split(list(self._sizes.values())), strict=True)) if self._sizes else {}


def imbalance(loads: Iterable[Tensor]) -> Tensor:
    """Load of the fullest expert over the mean, in the layer where that is worst; 1 is perfect balance."""
    return torch.stack([load.max() / load.mean().clamp(min=1e-9) for load in loads]).max()
