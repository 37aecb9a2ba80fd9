"""What a piece of work keeps in memory and how much it computes: how recomputation and offload are held to their word. Read by
tests and by accounts of a step; never on its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Result = TypeVar("Result")


def kept(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, and the bytes of all memory made in it that is still held after it.

    After a forward, with its result in hand, that is what waits for the backward. On any device, and by whoever it is held.
    """
    with _Watch() as watch:
        result = work()
    return result, watch.alive()


def flops(work: Callable[[], Any]) -> int:
    """Floating-point operations of all matrix products and attention in `work`, backwards and repeated forwards too."""
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        work()
    return counter.get_total_flops()


def _attention(q_BHSE: Sequence[int], k_BKTE: Sequence[int], v_BKTE: Sequence[int], *rest: Any, **settings: Any) -> int:
    batch, heads, length, width = q_BHSE
    return 2 * batch * heads * length * k_BKTE[2] * (width + v_BKTE[3])


def _attention_backward(gradient: Sequence[int], *rest: Any, **settings: Any) -> int:
    return 5 * _attention(*rest) // 2  # the scores again, and two products for each of the two


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""What torch's counter leaves out. Like it, counted as if every query saw every key."""


class _Watch(TorchDispatchMode):
    """Sees every tensor made, and knows its memory without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._note(out, made=True)
        return out

    def _note(self, tree: Any, made: bool) -> None:
        """What an operation is given before any has made it, such as a parameter, was there before the work and counts nothing."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # While a weak reference lives its number is not given to another, so that each memory is counted once.
                self._sizes.setdefault(StorageWeakRef(storage), storage.nbytes() if made else 0)

    def alive(self) -> int:
        return sum(size for reference, size in self._sizes.items() if not reference.expired())
