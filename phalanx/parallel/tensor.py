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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard, replace_parameter
from phalanx.spec.cut_plan import Axes, Dim, dim_names, roles, segments
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.transforms.fp8 import product_of
from phalanx.transforms.quantize import QuantizedLinear


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
        y_BSD = leave(y_BSD, self.group, self.sliced)
        return y_BSD if module.bias is None else y_BSD + module.bias.to(y_BSD.dtype)


def vocabulary_lookup(
    whole: Callable[[Tensor], Tensor], shard: ParamShard, group: Group, sliced: bool
) -> Callable[[Tensor], Tensor]:
    """The forward of an embedding of which this rank holds some rows: tokens in other ranks' rows give zeros here."""

    def forward(tokens_BS: Tensor) -> Tensor:
        local_BS = tokens_BS - shard.slice.offset[0]
        elsewhere_BS = (local_BS < 0) | (local_BS >= shard.slice.shape[0])
        x_BSD = whole(local_BS.masked_fill(elsewhere_BS, 0)).masked_fill(elsewhere_BS[..., None], 0.0)
        return leave(x_BSD, group, sliced)

    return forward


def leave(x_BSD: Tensor, group: Group, sliced: bool) -> Tensor:
    """The sum over the ranks; sliced: this rank's positions of it."""
    return group.scatter_from_region(x_BSD, 1) if sliced else group.reduce_from_region(x_BSD)


class KvSelect:
    """Attention of some query heads on keys and values of all heads: hands on those that the queries read.

    Installed as `attend` where there are fewer key/value heads than can be divided. What replaces `attend` later replaces `inner`.
    """

    def __init__(self, inner: Callable[..., Tensor], heads: range, per_kv: int):
        """`heads`: this rank's query heads; `per_kv`: query heads that read the same keys and values."""
        self.inner = inner
        chosen = [head // per_kv for head in heads]
        different = sorted(set(chosen))
        even = chosen == [head for head in different for _ in range(len(chosen) // len(different))]
        # Groups of equal size stay groups; else every query head gets a copy of its own.
        self.chosen = tuple(different if even else chosen)

    def __call__(self, q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *rest: Any, **more: Any) -> Tensor:
        return self.inner(q_BHSE, self.own(k_BKTE), self.own(v_BKTE), *rest, **more)

    def own(self, x_BKTE: Tensor) -> Tensor:
        if self.chosen == tuple(range(self.chosen[0], self.chosen[-1] + 1)):
            return x_BKTE[:, self.chosen[0] : self.chosen[-1] + 1]
        return torch.stack([x_BKTE[:, head] for head in self.chosen], dim=1)  # an index tensor would have to live on the device


class GroupKvSelect:
    """The same, where the numbers of heads are known when it is called: every rank of the group has as many query heads."""

    def __init__(self, inner: Callable[..., Tensor], group: Group):
        self.inner, self.group = inner, group

    def __call__(self, q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *rest: Any, **more: Any) -> Tensor:
        count = q_BHSE.shape[1]
        heads = range(self.group.index * count, (self.group.index + 1) * count)
        select = KvSelect(self.inner, heads, count * self.group.size // k_BKTE.shape[1])
        return select(q_BHSE, k_BKTE, v_BKTE, *rest, **more)


def computed(x: Tensor) -> Tensor:
    """In the format of matrix products: they would convert it anyway, and messages are half as long."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


CUT = ("heads", "kv_heads", "ffn", "vocab")
"""Dimensions that the tensor group shares."""


def split(
    parts: list[nn.Module], shards: dict[str, ParamShard], axes: Axes, mesh: Mesh, *, sequence: bool
) -> dict[str, ParamShard]:
    """Cut the parameters and install what communicates; returns where each parameter's part lies now."""
    group = mesh.group("tensor", use="tensor")
    shards = dict(shards)
    if group.size == 1:
        return shards
    done: set[nn.Module] = set()  # stages may share a module
    for part in parts:
        table = _Table(part, axes, group.size, sequence)
        if problems := list(table.problems(shards)):
            raise RunError(problems)
        for name in table.dims:
            owner, _, leaf = name.rpartition(".")
            module = part.get_submodule(owner)
            if module not in done:
                if (dim := table.cut(name)) is not None:
                    sizes = segments(table.dims[name][dim])
                    shards[name] = shards[name].cut(dim, group.index, group.size, "tensor", sizes)
                    _shrink(module, leaf, shards[name])
                elif table.partial(name):
                    shards[name] = replace(shards[name], partial=("tensor",))
        _install(table, shards, group, done)
        done.update(part.modules())
    if not any("tensor" in shard.split for shard in shards.values()):
        raise RunError(
            f"layout.tensor = {group.size} has nothing to cut in this model: its AXES table names no dimension "
            f"{', '.join(CUT)} of a layer that ranks can share. Name them there (docs/own-model.md), or set layout.tensor = 1."
        )
    return shards


def applied(parts: list[nn.Module], shards: Mapping[str, ParamShard]) -> str:
    """What was done, read from the parameters and the hooks: an example, and how many others."""
    shapes = {name: tuple(p.shape) for part in parts for name, p in part.named_parameters()}
    cut = [name for name, shape in shapes.items() if "tensor" in shards[name].split and shape != shards[name].slice.whole]
    if not cut:
        return "no parameter of this rank is cut"
    name = next((name for name in cut if len(shapes[name]) > 1 and "embed" not in name), cut[0])
    dim = next(dim for dim, length in enumerate(shapes[name]) if length != shards[name].slice.whole[dim])
    kind = ("rows", "columns")[dim] if len(shapes[name]) == 2 else "elements"
    hooks = [hook for part in parts for module in part.modules() for hook in module._forward_hooks.values()]
    sliced = {hook.sliced for hook in hooks if isinstance(hook, ReduceFromTP)} == {True}
    example = f"{name}: {shapes[name][dim]} of {shards[name].slice.whole[dim]} {kind}"
    note = "; sums go to slices of the sequence" if sliced else ""
    return f"{example}; {len(cut)} of {len(shapes)} parameters are cut{note}"


class _Table:
    """What the names of dimensions say about one part of a model."""

    def __init__(self, part: nn.Module, axes: Axes, ranks: int, sequence: bool):
        spec: Any = part.spec
        assert isinstance(spec, ModelSpec), "build gives every model its spec"
        self.part, self.spec, self.ranks, self.sequence = part, spec, ranks, sequence
        self.dims = {name: dim_names(name, axes) for name, _ in part.named_parameters()}
        self.modules = dict(part.named_modules())
        linears = [name for name, module in self.modules.items() if isinstance(module, nn.Linear)]
        self.rows = [name for name in linears if _shared(self.dims[f"{name}.weight"][1])]
        """Linear layers that read a cut dimension."""
        self.heads = [name for name in linears if self.dims[f"{name}.weight"][0] == "vocab"]
        """Linear layers that give logits."""
        self.regions = list(dict.fromkeys(name.rpartition(".")[0] for name in self.rows))
        """Modules that hold a linear layer which reads a cut dimension."""
        self.routed = list(dict.fromkeys(self._dispatchers()))
        """Modules that send tokens to experts: the nearest ones with a `dispatch` around parameters of experts."""
        self.whole_kv = any("kv_heads" in _roles(dims) for dims in self.dims.values()) and self.spec.kv % ranks != 0
        """Whether there are key/value heads and the ranks cannot share them evenly."""
        self.whole_vocabulary = not hasattr(part, "project") and not self.heads
        """The model multiplies by its embedding in a way of its own: nobody can step in there, so every rank does all of it."""
        self._row_biases = {f"{name}.bias" for name in self.rows}

    def _dispatchers(self) -> Iterator[str]:
        for name in (name for name, dims in self.dims.items() if "expert" in dims):
            around = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
            yield from [owner for owner in around if hasattr(self.modules[owner], "dispatch")][:1]

    def cut(self, name: str) -> int | None:
        """The dimension of a parameter that is cut."""
        dims = self.dims[name]
        if "expert" in dims:
            return None
        kept = {"kv_heads"} if self.whole_kv else set()
        if self.whole_vocabulary:
            kept.add("vocab")
        return next((index for index, dim in enumerate(dims) if _shared(dim) and not kept.intersection(roles(dim))), None)

    def partial(self, name: str) -> bool:
        """Whether each rank has a partial gradient of a parameter that all hold."""
        return self.sliced(name) or (_within(name, self.regions) and name not in self._row_biases)

    def sliced(self, name: str) -> bool:
        """Whether each rank has a slice of the sequence outside the named region."""
        return self.sequence or _within(name, self.routed)

    def problems(self, shards: Mapping[str, ParamShard]) -> Iterator[str]:
        """What would not be exact. The built-in decoder has none of these but the first."""
        if any("heads" in _roles(dims) for dims in self.dims.values()) and self.spec.heads % self.ranks:
            yield (
                f"layout.tensor = {self.ranks} does not divide model.heads = {self.spec.heads}, and heads stay whole: "
                f"choose a divisor of {self.spec.heads}."
            )
        for name, dims in self.dims.items():
            if self.cut(name) is not None and "vocab" not in dims and not _within(name, self.regions):
                yield (
                    f"AXES names a dimension of {name} {_word(dims[self.cut(name) or 0])}, which layout.tensor = {self.ranks} cuts, "
                    "but no linear layer of its module reads that dimension: give it another name to keep it whole."
                )
            if dims == ("model",) and name not in self._row_biases and _within(name, self.regions):
                yield (
                    f"{name} is in one module with linear layers that layout.tensor = {self.ranks} cuts: put those into a module of "
                    "their own, which takes the normalized input and returns what is added to the residual stream."
                )
        for region in self.regions:
            if region == "":
                yield "linear layers that layout.tensor cuts stand in the model itself: put them into a module of their own."
            keys = any("kv_heads" in _roles(dims) and _within(name, [region]) for name, dims in self.dims.items())
            if keys and self.whole_kv and not hasattr(self.modules[region], "attend"):
                yield (
                    f"layout.tensor = {self.ranks} does not divide model.kv_heads = {self.spec.kv}, and {region} has no "
                    "attribute `attend` through which its query heads could be given their keys: choose a divisor."
                )
        for name, dims in self.dims.items():
            for dim, size in zip(dims, shards[name].slice.whole, strict=False):
                yield from self._uneven(name, dim, size)
        divided = any(dims[0] == "vocab" for dims in self.dims.values() if dims) and not self.whole_vocabulary
        if self.sequence and not divided and getattr(self.part, "is_last_stage", True):
            yield (
                "layout.sequence = true needs a model that gives its logits through a linear layer whose first dimension AXES "
                "names 'vocab', or through an attribute `project` with such a matrix: take layout.sequence = false."
            )

    def _uneven(self, name: str, dim: Dim, size: int) -> Iterator[str]:
        """Why a dimension cannot be divided as it is named."""
        sizes = segments(dim) or (size,)
        if sum(sizes) != size:
            yield f"AXES names segments of {' + '.join(map(str, sizes))} = {sum(sizes)} elements for a dimension of {name} that has {size}."
        for kind, length in zip(roles(dim), sizes, strict=True):
            count = {"heads": self.spec.heads, "kv_heads": self.spec.kv}.get(kind, 1)
            if length % count:
                yield (
                    f"AXES names a dimension of {name} {kind!r}, but model.{kind} = {count} does not divide "
                    f"its {length} elements: whole heads could not be cut."
                )
            elif len(sizes) > 1 and _shared(dim) and length % self.ranks:
                yield f"layout.tensor = {self.ranks} does not divide the {length} elements of the segment {kind!r} of {name}: choose a divisor."
        if len(sizes) > 1 and _shared(dim):
            if others := [kind for kind in roles(dim) if kind not in CUT]:
                yield f"AXES names segments of one dimension of {name} that ranks share and {others[0]!r}, which they do not: name all alike."
            if self.whole_kv and "kv_heads" in roles(dim):
                yield (
                    f"layout.tensor = {self.ranks} does not divide model.kv_heads = {self.spec.kv}, and {name} holds keys and values in one "
                    "matrix with queries: choose a divisor, or use separate matrices."
                )


def _roles(dims: tuple[Dim, ...]) -> set[str]:
    return {role for dim in dims for role in roles(dim)}


def _shared(dim: Dim) -> bool:
    """Whether the tensor group shares a dimension."""
    return any(role in CUT for role in roles(dim))


def _word(dim: Dim) -> str:
    return repr(dim) if isinstance(dim, str) else " | ".join(map(repr, roles(dim)))


def _shrink(module: nn.Module, leaf: str, shard: ParamShard) -> None:
    replace_parameter(module, leaf, shard.slice.shape)
    if isinstance(module, nn.Linear) and leaf == "weight":
        module.out_features, module.in_features = shard.slice.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = shard.slice.shape[0]
        if module.padding_idx is not None:
            inside = shard.slice.offset[0] <= module.padding_idx < shard.slice.offset[0] + shard.slice.shape[0]
            module.padding_idx = module.padding_idx - shard.slice.offset[0] if inside else None


def _install(table: _Table, shards: Mapping[str, ParamShard], group: Group, done: set[nn.Module]) -> None:
    module: Any  # its attributes are replaced
    for name, module in table.modules.items():
        if module in done:
            continue
        if name in table.routed and not table.sequence:
            # All ranks have all tokens: each continues with a slice of them, so that no token is sent twice.
            module.register_forward_pre_hook(lambda module, args: (group.split(args[0], 1), *args[1:]))
            module.register_forward_hook(lambda module, args, y_BSD: group.join(y_BSD, 1))
        if name in table.regions:
            module.register_forward_pre_hook(CopyToTP(group, table.sliced(name)))
            if table.whole_kv and hasattr(module, "attend"):
                count = table.spec.heads // group.size
                heads = range(group.index * count, (group.index + 1) * count)
                module.attend = KvSelect(module.attend, heads, table.spec.heads // table.spec.kv)
        if name in table.rows:
            module.register_forward_hook(ReduceFromTP(group, table.sliced(name)))
            if module.bias is not None:
                module.forward = partial(linear_product, module)
        if name in table.heads and not hasattr(table.part, "project"):
            module.register_forward_pre_hook(CopyToTP(group, table.sequence))
        if isinstance(module, nn.Embedding) and not _within(name, table.regions):
            if "tensor" in shards[f"{name}.weight"].split:
                module.forward = vocabulary_lookup(module.forward, shards[f"{name}.weight"], group, table.sequence)  # type: ignore[assignment, method-assign]
            elif table.sequence:
                module.register_forward_pre_hook(lambda module, args: (group.own_chunk(args[0], 1), *args[1:]))


def linear_product(module: nn.Linear, x: Tensor) -> Tensor:
    """Forward of a linear layer whose bias `ReduceFromTP` adds. It reads the weight at each call, because sharding replaces it."""
    return module.product(x) if isinstance(module, QuantizedLinear) else product_of(module)(x, module.weight, None)


def _within(name: str, owners: list[str]) -> bool:
    """Whether a module or parameter is one of these modules or lies inside one."""
    return any(owner == "" or name == owner or name.startswith(f"{owner}.") for owner in owners)
