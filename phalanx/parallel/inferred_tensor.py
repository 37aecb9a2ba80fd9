"""Tensor parallelism of a module that was not written for it: makes a rank's part of it and installs what communicates, exactly as a
`CutPlan` says. `phalanx/tracing` infers the plan and proves it; `parallel/apply` calls `split` on models without memory, before anything
that wraps modules.

The module's own Python runs on smaller parameters. Where it must be told that they are smaller, integers that it reads are divided.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ParamShard, Rewrite, replace_parameter
from phalanx.parallel.tensor import GroupKvSelect, ReduceFromTP, computed, leave, linear_product, vocabulary_lookup
from phalanx.spec.adapted_layers import A, B
from phalanx.spec.cut_plan import UNEVEN, CutPlan
from phalanx.spec.errors import RunError
from phalanx.tracing.sequence_hooks import Moves, install

_SIZES = {nn.Linear: ("out_features", "in_features"), nn.Embedding: ("num_embeddings", "embedding_dim")}
"""Attributes in which torch's modules have the sizes of their weight, by dimension."""
_TRANSPOSED = ("nx", "nf")
"""The same of transformers' Conv1D, a linear layer whose weight is [inputs, outputs]."""


@dataclass(frozen=True, eq=False)
class EnterRegion:
    """Before a module: arguments that are the same on all ranks; the gradients of each are summed over the ranks."""

    group: Group
    arguments: tuple[int | str, ...]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = list(args)
        for argument in self.arguments:
            if isinstance(argument, str):
                if argument in kwargs:
                    kwargs = kwargs | {argument: self._entered(module, kwargs[argument])}
            elif argument < len(own):
                own[argument] = self._entered(module, own[argument])
        return tuple(own), kwargs

    def _entered(self, module: nn.Module, value: Any) -> Any:
        def enter(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            # A linear layer converts its input anyway. Another module may read it in fp32 first.
            return self.group.copy_to_region(computed(x) if isinstance(module, nn.Linear) else x)

        return pytree.tree_map(enter, value)


@dataclass(frozen=True, eq=False)
class LeaveRegion:
    """After a module without a bias of its own: sums the ranks' partial results."""

    group: Group
    sliced: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, tuple):
            return (leave(result[0], self.group, self.sliced), *result[1:])
        return leave(result, self.group, self.sliced)


def split(
    parts: list[nn.Module],
    shards: dict[str, ParamShard],
    cuts: CutPlan,
    mesh: Mesh,
    rewritten: Mapping[str, Rewrite] | None = None,
) -> dict[str, ParamShard]:
    """Cut the parameters and install what communicates; returns where each parameter's part lies now. `rewritten`: forwards of the modules
    whose own does not compute the right thing on a part."""
    group = mesh.group("tensor", use="tensor")
    assert cuts.ranks == group.size, f"a plan for {cuts.ranks} ranks, on {group.size}"
    shards = dict(shards)
    cuts = _with_adapters(cuts, shards)
    done: set[nn.Module] = set()  # stages may share a module
    for part in parts:
        _cut_parameters(part, shards, cuts, group, done)
        _install(part, shards, cuts, group, done)
        for name in cuts.rewritten:
            if (module := _submodule(part, name)) is not None and module not in done:
                module.forward = (rewritten or {})[name](module, group.index, group.copy_to_region, group.reduce_from_region)
        done.update(part.modules())
    return shards


def stays_whole(cuts: CutPlan | None) -> str:
    """What another number of ranks could divide, such as heads; to be added to the words about what is cut. None: cuts that a table names."""
    reasons = {} if cuts is None else {name: why for name, why in cuts.whole.items() if UNEVEN in why}
    name, why = next(iter(reasons.items()), ("", ""))
    return f"; {len(reasons)} matrices stay whole, such as {name}: {why}" if reasons else ""


def _submodule(part: nn.Module, name: str) -> Any:
    try:
        return part.get_submodule(name)
    except AttributeError:  # of another stage
        return None


def _with_adapters(cuts: CutPlan, shards: Mapping[str, ParamShard]) -> CutPlan:
    """The plan with LoRA adapters, whose matrices are cut with the ones that they are added to."""
    params, partials = dict(cuts.params), set(cuts.partial)
    for name in shards:
        owner, _, leaf = name.rpartition(".")
        if leaf not in (A, B):
            continue
        base = f"{owner}.weight"
        cut = cuts.params.get(base)
        own_dim = 0 if leaf == B else 1
        if cut is not None and cut.dim == own_dim:
            params[name] = cut
        elif cut is not None or base in cuts.partial:
            partials.add(name)
    return replace(cuts, params=params, partial=frozenset(partials))


def _cut_parameters(part: nn.Module, shards: dict[str, ParamShard], cuts: CutPlan, group: Group, done: set[nn.Module]) -> None:
    for name, _ in list(part.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        module = part.get_submodule(owner)
        if module in done:
            continue
        if (cut := cuts.params.get(name)) is not None:
            shards[name] = shards[name].cut(cut.dim, group.index, group.size, "tensor", cut.sizes)
            replace_parameter(module, leaf, shards[name].slice.shape)
            _resize(module, leaf, shards[name])
        elif name in cuts.partial:
            shards[name] = replace(shards[name], partial=("tensor",))


def _resize(module: nn.Module, leaf: str, shard: ParamShard) -> None:
    """Bring the sizes that a module of torch or transformers has as attributes up to date."""
    shape = shard.slice.shape
    if leaf != "weight":
        return
    names = next((names for kind, names in _SIZES.items() if isinstance(module, kind)), ())
    if _is_transposed(module):
        names = _TRANSPOSED
    for attribute, size in zip(names, shape, strict=False):
        if hasattr(module, attribute):
            setattr(module, attribute, size)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        first = shard.slice.offset[0]
        inside = first <= module.padding_idx < first + shape[0]
        module.padding_idx = module.padding_idx - first if inside else None


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _install(part: nn.Module, shards: Mapping[str, ParamShard], cuts: CutPlan, group: Group, done: set[nn.Module]) -> None:
    # Not the stand-ins for layers of other pipeline stages: nothing is computed in them.
    modules = {
        name: module for name, module in part.named_modules() if module not in done and not getattr(module, "is_absent", False)
    }
    for name in dict.fromkeys(divided.module for divided in cuts.divided):
        if name in modules:
            divide_attributes(
                modules[name], {d.attribute: d.on(group.index, group.size) for d in cuts.divided if d.module == name}
            )
    entered: dict[str, list[int | str]] = {}
    gathered = set() if cuts.sequence is None else {(each.module, each.argument) for each in cuts.sequence.gathered}
    for enter in cuts.enters:
        if (enter.module, enter.argument) not in gathered:
            entered.setdefault(enter.module, []).append(enter.argument)
    for name, arguments in entered.items():
        if name in modules:
            modules[name].register_forward_pre_hook(EnterRegion(group, tuple(arguments)), with_kwargs=True)
    tables = {name for name, table in modules.items() if isinstance(table, nn.Embedding) and _by_rows(f"{name}.weight", cuts)}
    scattered = () if cuts.sequence is None else cuts.sequence.scattered
    for each in cuts.leaves:
        if each.module in modules and each.module not in tables:
            _leave_after(each.module, modules[each.module], group, each.module in scattered)
    module: Any  # its attributes are replaced
    for name in cuts.selects:
        if (module := modules.get(name)) is not None:
            module.attend = GroupKvSelect(module.attend, group)
    for name in cuts.shares:
        if (module := modules.get(name)) is not None:
            module.bias_share = 1 / group.size
    for name in tables:  # they sum what they look up
        if f"{name}.weight" not in shards:
            continue  # later stages of a pipeline have blanks in their place
        module = modules[name]
        module.forward = vocabulary_lookup(module.forward, shards[f"{name}.weight"], group, False)
    if cuts.sequence is not None:
        install(modules, cuts.sequence, _moves(group))


def _moves(group: Group) -> Moves:
    """Of positions, which are dimension 1."""

    def gather(module: nn.Module, x: Tensor) -> Tensor:
        x = computed(x) if isinstance(module, nn.Linear) else x
        return _own_memory(group.gather_to_region(x, 1))  # contiguous once, or all that read it would do it

    def join(module: nn.Module, x: Tensor) -> Tensor:
        return _own_memory(group.join(x, 1))

    return Moves(gather, join, share=lambda module, x: group.split(x, 1))


def _own_memory(x: Tensor) -> Tensor:
    """Contiguous, and no view of what a message wrote: the module may write into it."""
    x = x.contiguous()
    return x.clone() if x._is_view() else x


def _by_rows(name: str, cuts: CutPlan) -> bool:
    return name in cuts.params and cuts.params[name].dim == 0


def _leave_after(name: str, module: Any, group: Group, sliced: bool) -> None:
    bias = module._parameters.get("bias")
    if isinstance(module, nn.Linear):
        module.register_forward_hook(ReduceFromTP(group, sliced))
        if bias is not None:
            module.forward = partial(linear_product, module)  # type: ignore[method-assign]
    elif bias is None:
        module.register_forward_hook(LeaveRegion(group, sliced))
    elif _is_transposed(module):
        module.register_forward_hook(ReduceFromTP(group, sliced))
        module.forward = partial(_transposed_product, module)
    else:
        raise RunError(
            f"layout.tensor = {group.size}: the results of {name}, a {type(module).__name__}, are summed over the ranks, and how it adds its "
            "bias is not known: set layout.tensor = 1, or use an nn.Linear."
        )
    if sliced:
        module.register_forward_hook(lambda module, args, result: pytree.tree_map_only(Tensor, _own_memory, result))


def _transposed_product(module: Any, x: Tensor) -> Tensor:
    """Forward of a Conv1D whose bias `ReduceFromTP` adds."""
    return x @ module.weight


def divide_attributes(module: Any, divided: Mapping[str, int]) -> None:
    """Set integers that a module reads. An object on the way to one, such as a config, may be shared with other modules: this module gets a
    copy of its own."""
    copied: dict[tuple[str, ...], Any] = {}
    for attribute, value in divided.items():
        *way, last = attribute.split(".")
        holder = module
        for depth, step in enumerate(way, 1):
            key = tuple(way[:depth])
            inner = getattr(holder, step)
            if not isinstance(inner, nn.Module) and key not in copied:
                inner = copied[key] = copy.copy(inner)
                setattr(holder, step, inner)
            holder = inner
        setattr(holder, last, value)
