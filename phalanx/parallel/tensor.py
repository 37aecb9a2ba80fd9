"""Tensor and sequence parallelism: which rows and columns of each matrix a rank holds, read from the names of dimensions, and the hooks
that communicate. `parallel/apply` calls it on models without memory, before anything that wraps modules.

A dimension named heads, kv_heads, ffn or vocab is cut over the tensor group. A linear layer that reads a cut dimension returns partial
sums; the module that holds it is a *region* (attention, feed-forward), whose input every rank needs whole. Outside of regions,
activations are the same on all ranks, or a slice of the sequence on each (`sliced`). A parameter that is not cut has a partial gradient
on each rank inside a region and, with `sequence`, everywhere. Routed experts are not cut here; but each rank sends them its own slice of
the sequence, with sequence parallelism or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard, replace_parameter
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.transforms.fp8 import product_of


@dataclass(frozen=True, eq=False)
class CopyToTP:
    """Before a region: one message for all projections in it that read the input."""

    group: Group
    sliced: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.enter(args[0]), *args[1:])

    def enter(self, x_BSD: Tensor) -> Tensor:
        x_BSD = computed(x_BSD)
        if not self.sliced:
            return self.group.copy_to_region(x_BSD)
        return self.group.gather_to_region(x_BSD, 1).contiguous()  # once, or every projection would do it


@dataclass(frozen=True, eq=False)
class ReduceFromTP:
    """After a matrix whose columns are divided: sums the ranks' partial results, then adds the bias once."""

    group: Group
    sliced: bool

    def __call__(self, module: nn.Linear, args: tuple[Any, ...], y_BSD: Tensor) -> Tensor:
        y_BSD = self.group.scatter_from_region(y_BSD, 1) if self.sliced else self.group.reduce_from_region(y_BSD)
        return y_BSD if module.bias is None else y_BSD + module.bias.to(y_BSD.dtype)


@dataclass(frozen=True, eq=False)
class Unbiased:
    """Forward of a linear layer whose bias `ReduceFromTP` adds. It reads the weight at each call, because sharding replaces it."""

    module: nn.Linear

    def __call__(self, x: Tensor) -> Tensor:
        return product_of(self.module)(x, self.module.weight, None)


@dataclass(frozen=True, eq=False)
class Lookup:
    """Forward of an embedding of which this rank holds some rows: tokens in other ranks' rows give zeros here."""

    whole: Callable[[Tensor], Tensor]
    """The embedding's own forward."""
    shard: ParamShard
    group: Group
    sliced: bool

    def __call__(self, tokens_BS: Tensor) -> Tensor:
        local_BS = tokens_BS - self.shard.slice.offset[0]
        elsewhere_BS = (local_BS < 0) | (local_BS >= self.shard.slice.shape[0])
        x_BSD = self.whole(local_BS.masked_fill(elsewhere_BS, 0)).masked_fill(elsewhere_BS[..., None], 0.0)
        return self.group.scatter_from_region(x_BSD, 1) if self.sliced else self.group.reduce_from_region(x_BSD)


@dataclass(frozen=True, eq=False)
class Slice:
    """Before an embedding that every rank holds whole: selects this rank's slice of the sequence."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.group.own_chunk(args[0], 1), *args[1:])


@dataclass(frozen=True, eq=False)
class SplitSeq:
    """Before routed experts whose tokens all ranks have: each rank continues with a slice, so that no token is sent twice."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.group.split(args[0], 1), *args[1:])


@dataclass(frozen=True, eq=False)
class GatherSeq:
    """After routed experts: all ranks have all tokens again."""

    group: Group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], y_BSD: Tensor) -> Tensor:
        return self.group.join(y_BSD, 1)


@dataclass(frozen=True, eq=False)
class Together:
    """Sums what routers count over the ranks that hold other tokens of the same sequences."""

    group: Group

    def __call__(self, counts_BE: Tensor) -> Tensor:
        return self.group.all_reduce(counts_BE.clone())


class KvSelect:
    """Attention of some query heads on keys and values of all heads: hands on those that the queries read.

    `inner` computes attention; whoever replaces a module's `attend` later replaces `inner` where there is one.
    """

    def __init__(self, inner: Callable[..., Tensor], heads: range, per_kv: int):
        """`heads`: this rank's query heads; `per_kv`: query heads that read the same keys and values."""
        self.inner = inner
        chosen = [head // per_kv for head in heads]
        different = sorted(set(chosen))
        even = chosen == [one for one in different for _ in range(len(chosen) // len(different))]
        # Groups of equal size stay groups; else every query head gets a copy of its own.
        self.chosen = tuple(different if even else chosen)

    def __call__(self, q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *rest: Any) -> Tensor:
        return self.inner(q_BHSE, self._own(k_BKTE), self._own(v_BKTE), *rest)

    def _own(self, x_BKTE: Tensor) -> Tensor:
        if self.chosen == tuple(range(self.chosen[0], self.chosen[-1] + 1)):
            return x_BKTE[:, self.chosen[0] : self.chosen[-1] + 1]
        return torch.stack([x_BKTE[:, head] for head in self.chosen], dim=1)  # an index tensor would have to live on the device


def computed(x: Tensor) -> Tensor:
    """In the format of matrix products: they would convert it anyway, and messages are half as long."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


CUT = ("heads", "kv_heads", "ffn", "vocab")
"""Dimensions that the tensor group shares."""


def split(
    parts: list[nn.Module], spots: dict[str, ParamShard], axes: Mapping[str, tuple[str, ...]], mesh: Mesh, *, sequence: bool
) -> dict[str, ParamShard]:
    """Cut the parameters and install what communicates; returns where each parameter's part lies now."""
    group = mesh.group("tensor", use="tensor")
    spots = dict(spots)
    if group.size == 1:
        return spots
    done: set[nn.Module] = set()  # stages may share a module
    for part in parts:
        table = _Table(part, axes, group.size)
        if problems := [*table.problems(), *_unfit(table, spots, sequence)]:
            raise RunError(problems)
        for name in table.dims:
            owner, _, leaf = name.rpartition(".")
            module = part.get_submodule(owner)
            if module not in done:
                spots[name] = _placed(spots[name], name, table, group, sequence)
                if spots[name].split:
                    _shrink(module, leaf, spots[name])
        _install(table, spots, group, sequence, done)
        done.update(part.modules())
    if not any("tensor" in spot.split for spot in spots.values()):
        raise RunError(
            [
                f"layout.tensor = {group.size} has nothing to cut in this model: its AXES table names no dimension "
                f"{', '.join(CUT)} of a layer that ranks can share. Name them there (docs/own-model.md), or set layout.tensor = 1."
            ]
        )
    return spots


def applied(parts: list[nn.Module], spots: Mapping[str, ParamShard]) -> str:
    """What was done, read off the parameters and the hooks: an example, and how many others."""
    shapes = {name: tuple(p.shape) for part in parts for name, p in part.named_parameters()}
    cut = [name for name, shape in shapes.items() if "tensor" in spots[name].split and shape != spots[name].slice.whole]
    if not cut:
        return "no parameter of this rank is cut"
    name = next((name for name in cut if len(shapes[name]) > 1 and "embed" not in name), cut[0])
    dim = next(dim for dim, length in enumerate(shapes[name]) if length != spots[name].slice.whole[dim])
    kind = ("rows", "columns")[dim] if len(shapes[name]) == 2 else "elements"
    hooks = [hook for part in parts for module in part.modules() for hook in module._forward_hooks.values()]
    sliced = {hook.sliced for hook in hooks if isinstance(hook, ReduceFromTP)} == {True}
    words = (
        f"{name}: {shapes[name][dim]} of {spots[name].slice.whole[dim]} {kind}; {len(cut)} of {len(shapes)} parameters are cut"
    )
    return words + ("; sums go to slices of the sequence" if sliced else "")


class _Table:
    """What the names of dimensions say about one part of a model."""

    def __init__(self, part: nn.Module, axes: Mapping[str, tuple[str, ...]], ranks: int):
        self.part, self.ranks = part, ranks
        self.dims = {
            name: next(dims for pattern, dims in axes.items() if fnmatchcase(name, pattern))
            for name, _ in part.named_parameters()
        }
        self.modules = dict(part.named_modules())

    @property
    def spec(self) -> ModelSpec:
        spec = self.part.spec
        assert isinstance(spec, ModelSpec), "build gives every model its spec"
        return spec

    @cached_property
    def rows(self) -> list[str]:
        """Linear layers that read a cut dimension."""
        return [name for name in self._linears() if self.dims[f"{name}.weight"][1] in CUT]

    @cached_property
    def heads(self) -> list[str]:
        """Linear layers that give logits."""
        return [name for name in self._linears() if self.dims[f"{name}.weight"][0] == "vocab"]

    @cached_property
    def regions(self) -> list[str]:
        """Modules that hold a linear layer which reads a cut dimension."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.rows))

    @cached_property
    def routed(self) -> list[str]:
        """Modules that send tokens to experts: the nearest ones with a `dispatch` around parameters of experts."""
        found = []
        for name in (name for name, dims in self.dims.items() if "expert" in dims):
            around = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
            found += [owner for owner in around if hasattr(self.modules[owner], "dispatch")][:1]
        return list(dict.fromkeys(found))

    @property
    def whole_kv(self) -> bool:
        """There are key/value heads and the ranks cannot share them evenly."""
        return any("kv_heads" in dims for dims in self.dims.values()) and self.spec.kv % self.ranks != 0

    @property
    def whole_vocabulary(self) -> bool:
        """The model multiplies by its embedding in a way of its own: nobody can step in there, so every rank does all of it."""
        return not hasattr(self.part, "project") and not self.heads

    def cut(self, name: str) -> int | None:
        """The dimension of a parameter that is cut."""
        dims = self.dims[name]
        if "expert" in dims:
            return None
        kept = {"kv_heads"} if self.whole_kv else set()
        if self.whole_vocabulary:
            kept.add("vocab")
        return next((index for index, dim in enumerate(dims) if dim in CUT and dim not in kept), None)

    def partial(self, name: str, sequence: bool) -> bool:
        """Each rank sees a part of its gradient, though all hold the same of it."""
        if sequence or _within(name, self.routed):
            return True
        return _within(name, self.regions) and name not in self._row_biases

    def sliced(self, name: str, sequence: bool) -> bool:
        """Outside the named region, each rank has a slice of the sequence."""
        return sequence or _within(name, self.routed)

    def problems(self) -> Iterator[str]:
        """What would not be exact. The built-in decoder has none of these but the first."""
        if any("heads" in dims for dims in self.dims.values()) and self.spec.heads % self.ranks:
            yield (
                f"layout.tensor = {self.ranks} does not divide model.heads = {self.spec.heads}, and heads stay whole: "
                f"choose a divisor of {self.spec.heads}."
            )
        for name, dims in self.dims.items():
            if self.cut(name) is not None and "vocab" not in dims and not _within(name, self.regions):
                yield (
                    f"AXES names a dimension of {name} {dims[self.cut(name) or 0]!r}, which layout.tensor = {self.ranks} cuts, "
                    "but no linear layer beside it reads that dimension: give it another name to keep it whole."
                )
            if dims == ("model",) and name not in self._row_biases and _within(name, self.regions):
                yield (
                    f"{name} stands beside linear layers that layout.tensor = {self.ranks} cuts: put those into a module of "
                    "their own, which takes the normed input and returns what is added to it."
                )
        for region in self.regions:
            if region == "":
                yield "linear layers that layout.tensor cuts stand in the model itself: put them into a module of their own."
            keys = any("kv_heads" in dims and _within(name, [region]) for name, dims in self.dims.items())
            if keys and self.whole_kv and not hasattr(self.modules[region], "attend"):
                yield (
                    f"layout.tensor = {self.ranks} does not divide model.kv_heads = {self.spec.kv}, and {region} has no "
                    "attribute `attend` through which its query heads could be given their keys: choose a divisor."
                )

    def _linears(self) -> Iterator[str]:
        for name, module in self.modules.items():
            if isinstance(module, nn.Linear):
                yield name

    @cached_property
    def _row_biases(self) -> set[str]:
        return {f"{name}.bias" for name in self.rows}


def _unfit(table: _Table, spots: Mapping[str, ParamShard], sequence: bool) -> Iterator[str]:
    """Whole heads must be there to be cut, and a model whose logits nobody can step in before cannot be sliced."""
    for name, dims in table.dims.items():
        for kind, count in (("heads", table.spec.heads), ("kv_heads", table.spec.kv)):
            if kind in dims and spots[name].slice.whole[dims.index(kind)] % count:
                yield (
                    f"AXES names a dimension of {name} {kind!r}, but model.{kind} = {count} does not divide "
                    f"its {spots[name].slice.whole[dims.index(kind)]} elements: whole heads could not be cut."
                )
    if sequence and table.whole_vocabulary and getattr(table.part, "is_last_stage", True):
        yield (
            "layout.sequence = true needs a model that gives its logits through a linear layer whose first dimension AXES "
            "names 'vocab', or through an attribute `project`: take layout.sequence = false."
        )


def _placed(spot: ParamShard, name: str, table: _Table, group: Group, sequence: bool) -> ParamShard:
    dim = table.cut(name)
    if dim is not None:
        return spot.cut(dim, group.index, group.size, "tensor")
    return replace(spot, partial=("tensor",)) if table.partial(name, sequence) else spot


def _shrink(module: nn.Module, leaf: str, spot: ParamShard) -> None:
    replace_parameter(module, leaf, spot.slice.shape)
    if isinstance(module, nn.Linear) and leaf == "weight":
        module.out_features, module.in_features = spot.slice.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = spot.slice.shape[0]
        if module.padding_idx is not None:
            inside = spot.slice.offset[0] <= module.padding_idx < spot.slice.offset[0] + spot.slice.shape[0]
            module.padding_idx = module.padding_idx - spot.slice.offset[0] if inside else None


def _install(table: _Table, spots: Mapping[str, ParamShard], group: Group, sequence: bool, done: set[nn.Module]) -> None:
    new = {name: module for name, module in table.modules.items() if module not in done}
    for name in (name for name in table.routed if name in new):
        if not sequence:
            new[name].register_forward_pre_hook(SplitSeq(group))
            new[name].register_forward_hook(GatherSeq(group))
    for name in (name for name in table.regions if name in new):
        new[name].register_forward_pre_hook(CopyToTP(group, table.sliced(name, sequence)))
        if table.whole_kv and hasattr(new[name], "attend"):
            _select(new[name], table.spec, group)
    for name in (name for name in table.rows if name in new):
        new[name].register_forward_hook(ReduceFromTP(group, table.sliced(name, sequence)))
        if new[name].bias is not None:
            new[name].forward = Unbiased(new[name])
    for name in (name for name in table.heads if name in new):
        if not hasattr(table.part, "project"):
            new[name].register_forward_pre_hook(CopyToTP(group, sequence))
    for name, module in new.items():
        if isinstance(module, nn.Embedding) and not _within(name, table.regions):
            _install_lookup(module, spots[f"{name}.weight"], group, sequence)
        if hasattr(module, "together") and _within(name, table.routed):
            module.together = Together(group)


def _install_lookup(module: nn.Embedding, spot: ParamShard, group: Group, sequence: bool) -> None:
    if "tensor" in spot.split:
        module.forward = Lookup(module.forward, spot, group, sequence)  # type: ignore[assignment]
    elif sequence:
        module.register_forward_pre_hook(Slice(group))


def _select(attention: nn.Module, spec: ModelSpec, group: Group) -> None:
    count = spec.heads // group.size
    heads = range(group.index * count, (group.index + 1) * count)
    attention.attend = KvSelect(attention.attend, heads, spec.heads // spec.kv)  # type: ignore[arg-type, assignment]


def _within(name: str, owners: list[str]) -> bool:
    """A module or parameter is one of these modules or lies inside one."""
    return any(owner == "" or name == owner or name.startswith(f"{owner}.") for owner in owners)
