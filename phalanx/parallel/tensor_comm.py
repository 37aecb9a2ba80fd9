"""What tensor parallelism puts into a model: hooks and stand-ins at the places where ranks that share each matrix meet.
`parallel/tensor` decides where; no model knows of them.

Between two meetings a rank computes from the whole of its input with its own rows or columns. What lies outside is the same
on all ranks, or a slice of the sequence on each (`sliced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.owned_param import ParamShard
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
