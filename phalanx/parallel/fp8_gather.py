"""ZeRO-3: gathers the weights of linear layers that compute in fp8 as fp8, a byte per value instead of two. `parallel/fsdp` makes it where
`precision.fp8_gather` asks for it.

A shard is rounded with the scale of the whole weight, so that ranks gather the fp8 numbers that each would compute from the gathered bf16 weight.
The scales follow from the largest values of all weights, over which the ranks agree in one message after each step of the optimizer.

FSDP2 lets a shard take part in its gathering: it asks the shard what to send, and makes the parameter from what arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from phalanx.parallel.group import Group
from phalanx.transforms.fp8 import Linear8
from phalanx.transforms.fp8_numbers import E4M3, scale_of, scaled
from phalanx.transforms.fp8_weight import Weight8


class Fp8Gather:
    """The weights of one rank that are gathered in fp8."""

    def __init__(self, params: Iterable[Any], group: Group):
        """`params`: FSDP2's parameters, which have memory. `group`: the ranks that hold the shards of the same weights."""
        self._group = group
        self._weights = [_attach(param) for param in params if _is_weight(param)]

    @torch.no_grad()
    def agree(self, *, stepped: bool = False) -> None:
        """Update the scales after the weights changed. `stepped`: by a step of the optimizer, which does not change frozen ones."""
        weights = [weight for weight in self._weights if weight.trained or not stepped]
        if not weights:
            return
        largest = torch._foreach_norm([weight.shard for weight in weights], torch.inf)
        together = self._group.all_reduce_max(torch.stack([value.float() for value in largest]))
        # The largest value in bf16 is the largest value, in bf16.
        scales = scale_of(together.to(torch.bfloat16), E4M3)
        torch._foreach_copy_([weight.scale for weight in weights], list(scales.unbind()))

    def applied(self) -> str:
        elements = sum(weight.shard.numel() for weight in self._weights) * self._group.size
        return f"{len(self._weights)} weights of {elements:,} elements are gathered in fp8, with one scale for all shards"


@dataclass(frozen=True, eq=False, slots=True)
class _Weight:
    """One weight: its shard and the scale of the whole."""

    shard: Tensor
    """The memory of this rank's rows, with those that make shards equal in size, which are zero."""
    scale: Tensor
    """One number, the same tensor for the whole run: gathered weights refer to it."""
    trained: bool

    def send(self, mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        """What FSDP2 gathers. As bytes: not all backends know fp8."""
        return (scaled(self.shard.to(torch.bfloat16), self.scale, E4M3).view(torch.uint8),), None

    def receive(
        self, gathered: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The parameter, from the shards of all ranks. FSDP2 frees their memory and fills it again, so that the first one stays valid (`out`)."""
        if out is not None:
            return None
        device = torch.device("meta") if is_fake(gathered[0]) else None
        return Weight8(gathered[0].view(E4M3), self.scale, dtype, device), ()


def _is_weight(param: Any) -> bool:
    """Whether it is the weight of layers that compute in fp8 with one scale per tensor, and of nothing else."""
    info = param._module_info
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return all(isinstance(module, Linear8) and module.scaling == "tensor" and name == "weight" for module, name in owners)


def _attach(param: Any) -> _Weight:
    local = param._sharded_local_tensor
    shard = param._sharded_param_data.view(param.padded_sharded_param_size)
    assert shard.untyped_storage()._cdata == local.untyped_storage()._cdata, f"{param} gathers a copy of its shard"
    weight = _Weight(shard, torch.ones((), device=shard.device), param.sharded_param.requires_grad)
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = weight.send, weight.receive
    param._init_extensions()  # which finds them
    return weight
