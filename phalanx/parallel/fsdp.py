"""ZeRO-3 and hybrid sharding: torch's FSDP2 shards parameters, gradients and optimizer states. `parallel/apply` makes it.

Each block is gathered when it computes and freed again. The engine of `parallel/data_parallel` takes the parameters that must stay
whole: norms and routers of a model that computes in low precision, as they stay in fp32; experts that no other rank shares; modules that
two stages of this rank share.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from phalanx import accelerator
from phalanx.observe.comm_timer import timed_collective
from phalanx.parallel.buckets import model_params
from phalanx.parallel.data_parallel import (
    DataParallel,
    Sharding,
    allocate,
    check_shardable,
    describe,
    lower_precision,
    stays_fp32,
    storage_bytes,
)
from phalanx.parallel.fp8_gather import Fp8Gather
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import Engine, OwnedParam, ParamShard, Recipe

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


class FullySharded(Engine):
    """The engine. Gradients are sums: FSDP2's division by the number of ranks is switched off everywhere."""

    def __init__(self, parts: list[nn.Module], shards: dict[str, ParamShard], mesh: Mesh, recipe: Recipe, how: Sharding):
        """Wrap the stages of a model that has no memory yet, and allocate this rank's part."""
        check_shardable(shards)
        self._how, self._device = how, mesh.device
        whole = _left_whole(parts, shards, mesh, recipe, how)
        lowered = {name: shard for name, shard in shards.items() if name in whole or shard.frozen}
        lower_precision(parts, lowered, recipe.axes, how)
        _wrap(parts, shards, whole, mesh, how)
        allocate(parts, recipe, mesh.device)
        self._roots: list[Any] = [fully_shard.state(part) for part in parts]  # type: ignore[attr-defined]
        if mesh.device.type != "meta":  # there, nothing is computed and nothing has memory
            for root in self._roots:
                root._lazy_init()  # else the first forward would, and give uneven parts other memory
        self._groups = [group for root in self._roots for group in _groups(root)]
        self._hybrid = any(group._is_hsdp for group in self._groups)
        rest = replace(how, zero=1, own_groups=True)
        self._rest = DataParallel(model_params(parts, shards, whole), mesh, recipe.fill, rest)
        owned = {owned.name: owned for owned in self._rest.owned}
        self._shards: list[tuple[OwnedParam, DTensor]] = []
        parameters = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        for name, parameter in parameters.items():
            if name not in owned:
                owned[name] = _own(name, parameter, shards[name])
                recipe.fill(name, owned[name].value.data, owned[name].shard)
                self._shards.append((owned[name], cast(DTensor, parameter)))
        self.owned = [owned[name] for name in parameters]
        self._fp8_gather = _fp8_gather(self._groups, mesh, how)
        self._count = self._begun = 0
        self._pipelined, self._finished = False, True

    def begin(self, micro_batches: int, pipelined: bool = False) -> None:
        self._count, self._begun, self._pipelined, self._finished = micro_batches, 0, pipelined, False
        for owned, parameter in self._shards:
            parameter.grad = owned.gradient = owned.value.grad = None
        if pipelined:  # gradients add up on each rank and are reduced at the end
            self._set_reduction(False)
        if self._hybrid:
            self._set_replicas(micro_batches == 1)
        self._rest.begin(micro_batches, pipelined)

    def after_backward(self, part: int | None = None) -> None:
        self._begun += 1
        if self._hybrid and self._begun == self._count - 1:
            self._set_replicas(True)  # replicas communicate once, over the sum of all micro-batches
        self._rest.after_backward(part)

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._pipelined:
            self._set_reduction(True)
            self._set_replicas(True)
            with torch.no_grad():  # FSDP2 does not see the end of a pipeline's backwards: do what it does at the end of one
                for root in self._roots:
                    for group in _groups(root):
                        group.post_backward()
                    root._root_post_backward_final_callback()
        elif self._hybrid and self._begun < self._count:  # all ranks abandon a step together: even a forward communicates
            for group in self._groups:
                group._partial_reduce_output = None  # it must not leak into the next step
        self._rest.finish()
        for owned, parameter in self._shards:
            gradient = cast(DTensor | None, parameter.grad)
            if gradient is not None:
                owned.gradient = gradient._local_tensor
            elif parameter.requires_grad:  # no micro-batch reached it
                owned.gradient = torch.zeros_like(owned.value)

    def updated(self, *, stepped: bool = False) -> None:
        """Free parameters that an evaluation left gathered: blocks gather the new values when they compute."""
        for group in self._groups:
            if not group.is_sharded:
                group.reshard()
        if self._fp8_gather is not None:
            self._fp8_gather.agree(stepped=stepped)
        self._rest.updated(stepped=stepped)

    def bytes(self) -> dict[str, int]:
        params = [param for group in self._groups for param in group.fsdp_params]
        gathered = [tensor for param in params for tensor in param.all_gather_outputs]
        kept = [param._unsharded_param.grad for param in params if hasattr(param, "_unsharded_param")]
        adding = [param.unsharded_accumulated_grad for param in params]
        rest = self._rest.bytes()
        return {
            "parameters": rest["parameters"] + storage_bytes([*(owned.value for owned, _ in self._shards), *gathered]),
            "gradients": rest["gradients"] + storage_bytes([*(owned.gradient for owned, _ in self._shards), *kept, *adding]),
        }

    def applied(self) -> str:
        if not self._shards:
            return "no parameter of this rank is spread"
        largest, parameter = max(self._shards, key=lambda pair: pair[1].numel())
        own, total = sum(owned.value.numel() for owned, _ in self._shards), sum(p.numel() for _, p in self._shards)
        words = f"parameters, gradients and optimizer state: {own:,} of {total:,} elements"
        words += f"; {describe(largest, parameter.shape)}, as {parameter.placements} on a mesh of {tuple(parameter.device_mesh.shape)}"
        words += f"; {self._fp8_gather.applied()}" if self._fp8_gather is not None else ""
        return words + (f"; of the rest, {self._rest.applied()}" if self._rest.owned else "")

    def waits(self) -> list[tuple[Any, str]]:
        """On CPUs, `_AllGather` and `_ReduceScatter` are measured themselves; sums over replicas are not."""
        if accelerator.of(self._device).asynchronous:
            return [
                (group, name) for group in self._groups for name in ("wait_for_unshard", "post_backward", "finalize_backward")
            ]
        return [(group, "post_backward") for group in self._groups if group._is_hsdp]

    def _set_reduction(self, on: bool) -> None:
        for root in self._roots:
            root._state_ctx.is_last_backward = on
        for group in self._groups:
            group.reduce_grads = on
            group.reshard_after_backward = on or not self._how.keep_gathered

    def _set_replicas(self, on: bool) -> None:
        for group in self._groups:
            group.all_reduce_grads = on


def _left_whole(
    parts: Sequence[nn.Module], shards: Mapping[str, ParamShard], mesh: Mesh, recipe: Recipe, how: Sharding
) -> set[str]:
    """Names of the parameters that FSDP2 does not shard."""
    owners = Counter(name for part in parts for name, _ in part.named_parameters())
    whole = {name for name, stages in owners.items() if stages > 1}
    if mesh.size("expert_shard") == 1:
        whole |= {name for name in owners if shards[name].expert}
    if how.low_precision:
        whole |= {name for name in owners if stays_fp32(name, shards[name], recipe.axes)}
    return whole


def _wrap(parts: Sequence[nn.Module], shards: Mapping[str, ParamShard], whole: set[str], mesh: Mesh, how: Sharding) -> None:
    """Wrap experts first, which have a mesh of their own, then blocks, then the rest of the model."""
    policy = MixedPrecisionPolicy(
        param_dtype=how.param_dtype if how.low_precision else None,
        reduce_dtype=how.reduce_dtype if how.low_precision or how.reduce_dtype != torch.float32 else None,
        cast_forward_inputs=False,  # autocast knows better: norms and routers compute in fp32
    )
    ignored = {parameter for part in parts for name, parameter in part.named_parameters() if name in whole}

    def shard(module: nn.Module, on: DeviceMesh, reshard: bool | None = not how.keep_gathered, **placement: Any) -> None:
        fully_shard(module, mesh=on, reshard_after_forward=reshard, mp_policy=policy, ignored_params=ignored, **placement)
        sharded = cast(FSDPModule, module)
        # The two together give a plain sum on every backend and for every number of ranks.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if not accelerator.of(mesh.device).asynchronous:  # on a GPU they run beside the computation: their time is no waiting
            sharded.set_custom_all_gather(_AllGather())
            sharded.set_custom_reduce_scatter(_ReduceScatter())

    dense = _device_mesh(*how.groups(mesh), mesh)
    for part in parts:
        owners = [name.rpartition(".")[0] for name, _ in part.named_parameters() if shards[name].expert and name not in whole]
        for owner in dict.fromkeys(owners):
            groups = how.groups(mesh, expert=True)
            placement = partial(_experts_placement, ranks=groups[0].size)
            shard(part.get_submodule(owner), _device_mesh(*groups, mesh), shard_placement_fn=placement)
        for block in _blocks(part):
            shard(block, dense)
        shard(part, dense, reshard=False if how.keep_gathered else None)
        # Logits may be a view, as those of a head with a bias are. No operation that autograd records changes them in place.
        warnings.filterwarnings(
            "ignore", rf"FSDP2-wrapped module \({type(part).__name__}\) returned a view tensor", UserWarning
        )


class _AllGather(DefaultAllGather):
    """FSDP2's own, its waiting measured."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return timed_collective(super().__call__, *args, **kwargs)


class _ReduceScatter(DefaultReduceScatter):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return timed_collective(super().__call__, *args, **kwargs)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of its lists and dictionaries of modules; anything else may be read without being called."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from (inner for inner in child.children() if not isinstance(inner, _CONTAINERS) and _has_parameters(inner))
            yield from _blocks(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _experts_placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """Whole experts if there are enough of them, else a slice of each."""
    few = parameter.shape[0] < ranks and parameter.ndim > 1 and parameter.shape[1] % ranks == 0
    return Shard(1 if few else 0)


@_disable_current_modes()  # a rehearsal runs in modes in which tensors hold no values, but rank numbers must be real
def _device_mesh(shards: Group, replicas: Group, mesh: Mesh) -> DeviceMesh:
    assert shards.handle is not None, "a single rank has nobody to share with"
    kind = "cpu" if mesh.device.type == "meta" else mesh.device.type
    # DTensor's caches outlive a generation and are keyed by the ranks and names of a mesh. So names contain the generation: results on a
    # mesh whose groups are gone must not be reused. And a mesh refers to no group, whose sockets would stay open; torch finds it by name.
    names = (f"replicate {mesh.place.generation}", f"shard {mesh.place.generation}")
    if replicas.handle is None:
        made = DeviceMesh.from_group(shards.handle, kind, mesh_dim_names=names[1:])
    else:
        # Ranks are numbered by coordinates, so going along one axis adds the same everywhere.
        plane = [[across + along - mesh.rank for along in shards.ranks] for across in replicas.ranks]
        made = DeviceMesh.from_group([replicas.handle, shards.handle], kind, torch.tensor(plane), mesh_dim_names=names)
    made._pg_registry.clear()
    return made


def _groups(root: Any) -> list[Any]:
    """FSDP2's parameter groups of all modules below a root; a module has a list of them in torch 2.13, one or none in 2.11."""
    states = root._state_ctx.all_states
    if hasattr(root, "_fsdp_param_groups"):
        return [group for state in states for group in state._fsdp_param_groups]
    return [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]


def _fp8_gather(groups: Sequence[Any], mesh: Mesh, how: Sharding) -> Fp8Gather | None:
    """Gathering in fp8, if the run asks for it and computes."""
    if not how.fp8_gather or mesh.device.type == "meta":
        return None
    gather = Fp8Gather((param for group in groups for param in group.fsdp_params), how.groups(mesh)[0])
    gather.agree()
    return gather


def _own(name: str, parameter: nn.Parameter, shard: ParamShard) -> OwnedParam:
    """This rank's shard of a parameter, as a plain tensor on the same memory."""
    assert isinstance(parameter, DTensor), f"{name} is not sharded"
    local = cast(DTensor, parameter.detach()).to_local()
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard), f"{name} lies as {placement}"
    count, index = parameter.device_mesh.size(-1), parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
    shard = shard.cut(placement.dim, index, count, "expert_shard" if shard.expert else "shard")
    assert tuple(local.shape) == shard.slice.shape, f"{name}: {tuple(local.shape)} here, {shard.slice.shape} expected"
    return OwnedParam(name, nn.Parameter(local, requires_grad=False), shard)
