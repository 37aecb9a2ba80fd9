"""What ZeRO-1, 2 and 3 have in common: their settings, who owns which part of a parameter, and which parameters a model that
computes in low precision holds in it. Used by `parallel/zero` and `parallel/fsdp`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import ParamShard
from phalanx.spec.errors import RunError
from phalanx.spec.tensor_slice import chunk

if TYPE_CHECKING:
    from phalanx.parallel.apply import Recipe

_LOW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How the state of a replica is spread over the ranks of `layout.shard`."""

    zero: int
    """1: optimizer states and master weights; 2: gradients too; 3: parameters too."""
    axes: tuple[str, ...]
    """Mesh axes whose ranks see other samples, "shard" among them."""
    compute: str = "fp32"
    """As the plan has it. fp8 keeps its weights in bf16."""
    wire: torch.dtype = torch.float32
    """Gradients on their way between ranks."""
    keep: bool = False
    """ZeRO-3: gathered parameters stay until the end of the backward, as schedules with a backward in two halves need it."""
    aside: bool = False
    """It goes beside another engine, over groups of its own: messages of the two may cross."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's matrices."""
        return _LOW[self.compute]

    @property
    def low(self) -> bool:
        return self.dtype != torch.float32

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes whose ranks hold the same part of the state and sum its gradients."""
        return tuple(axis for axis in self.axes if axis != "shard")


def sharing(mesh: Mesh, how: Sharding) -> tuple[Group, Group]:
    """The ranks that each own another part of the state, and those that own the same."""
    beside = " (whole)" if how.aside else ""
    return mesh.group("shard", use=f"shard{beside}"), mesh.group(*how.replicas, use=f"data{beside}")


def experts_sharing(mesh: Mesh, how: Sharding) -> tuple[Group, Group]:
    """The same for routed experts."""
    beside = " (whole)" if how.aside else ""
    return (
        mesh.group("expert_shard", use=f"experts' shard{beside}"),
        mesh.group("expert_replicate", use=f"experts' data{beside}"),
    )


def own_box(spot: ParamShard, index: int, count: int) -> tuple[ParamShard, int]:
    """The index-th of `count` parts of a parameter, each without a gap in memory, and how many elements the largest has.

    Rows are dealt out as torch.chunk and FSDP2 do. Fewer experts than ranks are cut once more, along their second dimension.
    """
    axis = "expert_shard" if spot.expert else "shard"
    rows, size = spot.slice.shape[0], math.prod(spot.slice.shape)
    if spot.expert and 0 < rows < count and count % rows == 0 and spot.slice.shape[1] % (count // rows) == 0:
        each = count // rows
        cut = spot.cut(0, index // each, rows, axis).cut(1, index % each, each, axis)
        return replace(cut, split=(*spot.split, axis)), size // count
    return spot.cut(0, index, count, axis), chunk(rows, 0, count)[1] * math.prod(spot.slice.shape[1:])


def check(spots: Mapping[str, ParamShard]) -> None:
    """Refuse what has no rows to deal out."""
    problems = [
        f"layout.shard cannot share the parameter {name}, a single number without dimensions: give it the shape [1], or leave "
        "layout.shard at 1."
        for name, spot in spots.items()
        if not spot.slice.shape
    ]
    if problems:
        raise RunError(problems)


def exact(name: str, spot: ParamShard, axes: Mapping[str, tuple[str, ...]]) -> bool:
    """A norm, a bias or a router: it is small, and rounding it would show. It stays in fp32."""
    dims = next((dims for pattern, dims in axes.items() if fnmatchcase(name, pattern)), ())
    return len(spot.slice.shape) < 2 or "route" in dims


def lower(parts: Sequence[nn.Module], names: Iterable[str], dtype: torch.dtype) -> None:
    """Let these parameters, which have no memory yet, be of a lower precision."""
    wanted = set(names)
    for part in parts:
        for name, old in list(part.named_parameters()):
            if name in wanted and old.dtype != dtype:
                assert old.is_meta, f"{name} has memory already: lower it first"
                owner, _, leaf = name.rpartition(".")
                new = nn.Parameter(torch.empty_like(old, dtype=dtype), requires_grad=old.requires_grad)
                part.get_submodule(owner).register_parameter(leaf, new)


def raise_embeddings(parts: Sequence[nn.Module]) -> None:
    """The stream of residuals begins with embeddings, and stays in fp32 though their weights may not be."""
    for module in dict.fromkeys(module for part in parts for module in part.modules()):
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_to_fp32)


def _to_fp32(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()


@torch.no_grad()
def give_memory(parts: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> None:
    """To parameters and buffers; the former are to be filled by who owns them."""
    for part in parts:
        part.to_empty(device=device)
    for part in parts:  # only now: stages may share a module
        recipe.reset_buffers(part)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Memory behind all of them, each piece counted once."""
    storages = {s.data_ptr(): s.nbytes() for t in tensors if t is not None for s in [t.untyped_storage()]}
    return sum(storages.values())


def describe(name: str, spot: ParamShard, local: Sequence[int], whole: Sequence[int]) -> str:
    """An example for what was done: "blocks.0.mlp.up.weight: 32 of 64 rows"."""
    dim = next((dim for dim, length in enumerate(local) if length != whole[dim]), 0)
    kind = "rows" if dim == 0 and not spot.expert else ("experts" if dim == 0 else "rows of each")
    return f"{name}: {local[dim]} of {whole[dim]} {kind}"
