"""What one step costs: bytes this rank sends, by technique and collective, and the memory that lives only while it runs.
A run reports it for one of its steps, and `phalanx verify --account` beside what theory says.

Everything is read off the operations themselves, whoever starts them: torch's own sharding and what runs in the backward too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_AGREEMENT, _DATA = "agreement", "data"
"""Uses of the group of all ranks: what they agree on in every step, in fp64 or as bytes, and gradients of replicas where every rank
is one."""

Sent = dict[str, dict[str, int]]
"""Bytes by the use of a group and by collective."""


class Account(TorchDispatchMode):
    """While it is entered, counts what this rank sends.

    Collectives are counted as rings send them, which is also the least that any way of doing them does: of n ranks an all-reduce
    sends 2(n - 1)/n of its bytes, a reduce-scatter and an all-gather (n - 1)/n of the whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(func.overloadpacket.__name__, args, result)
        return result

    def _count(self, operation: str, args: tuple[Any, ...], result: Any) -> None:
        if (found := traffic(operation, args)) is not None:
            collective, use, _, size = found
            uses = self.sent.setdefault(use, {})
            uses[collective] = uses.get(collective, 0) + size


def traffic(operation: str, args: tuple[Any, ...]) -> tuple[str, str, dist.ProcessGroup, int] | None:
    """Of an operation of torch's collectives: which it is, what its group serves, the group, and the bytes that this rank sends in it;
    None where it sends none."""
    found = _OPERATIONS.get(operation)
    if found is None:
        return None
    collective, measure = found
    group = _group(args)
    ranks = group.size() if group is not None else 1
    if group is None or ranks == 1:
        return None
    return collective, _use(group, args), group, round(measure(args, None, ranks, group.rank()))


def _all_reduce(args: Any, result: Any, ranks: int, rank: int) -> float:
    return 2 * (ranks - 1) / ranks * _bytes(args[0])


def _all_gather(args: Any, result: Any, ranks: int, rank: int) -> float:
    """Each rank passes on every part but one: (n - 1) times its own part."""
    return (ranks - 1) * _bytes(args[1])


def _all_gather_functional(args: Any, result: Any, ranks: int, rank: int) -> float:
    return (ranks - 1) * _bytes(args[0])


def _reduce_scatter(args: Any, result: Any, ranks: int, rank: int) -> float:
    return (ranks - 1) / ranks * _bytes(args[1])


def _reduce_scatter_functional(args: Any, result: Any, ranks: int, rank: int) -> float:
    return (ranks - 1) / ranks * _bytes(args[0])


def _all_to_all(args: Any, result: Any, ranks: int, rank: int) -> float:
    """All but what stays: c10d::alltoall_base_(output, input, group, output splits, input splits, …)."""
    given = args[4]
    own = given[rank] / max(sum(given), 1) if given else 1 / ranks
    return (1 - own) * _bytes(args[1])


def _all_to_all_functional(args: Any, result: Any, ranks: int, rank: int) -> float:
    given = args[2]
    return (1 - (given[rank] / max(sum(given), 1) if given else 1 / ranks)) * _bytes(args[0])


def _send(args: Any, result: Any, ranks: int, rank: int) -> float:
    return _bytes(args[0])


def _broadcast(args: Any, result: Any, ranks: int, rank: int) -> float:
    return (ranks - 1) / ranks * _bytes(args[0])


_OPERATIONS: dict[str, tuple[str, Callable[[Any, Any, int, int], float]]] = {
    "allreduce_": ("all-reduce", _all_reduce),
    "allreduce_coalesced_": ("all-reduce", _all_reduce),
    "all_reduce": ("all-reduce", _all_reduce),
    "all_reduce_": ("all-reduce", _all_reduce),
    "allgather_": ("all-gather", _all_gather),
    "_allgather_base_": ("all-gather", _all_gather),
    "allgather_into_tensor_coalesced_": ("all-gather", _all_gather),
    "all_gather_into_tensor": ("all-gather", _all_gather_functional),
    "all_gather_into_tensor_out": ("all-gather", _all_gather_functional),
    "reduce_scatter_": ("reduce-scatter", _reduce_scatter),
    "_reduce_scatter_base_": ("reduce-scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", _reduce_scatter),
    "reduce_scatter_tensor": ("reduce-scatter", _reduce_scatter_functional),
    "alltoall_base_": ("all-to-all", _all_to_all),
    "all_to_all_single": ("all-to-all", _all_to_all_functional),
    "send": ("send", _send),
    "broadcast_": ("broadcast", _broadcast),
}


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The group among an operation's arguments: boxed, or by its name, which the functional ones give last."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):  # the kind of reduction is boxed too
                continue
    names = [value for value in args if isinstance(value, str)]
    resolve: Any = torch._C._distributed_c10d._resolve_process_group  # its type changes between versions
    return resolve(names[-1]) if names else None


def _use(group: dist.ProcessGroup, args: tuple[Any, ...]) -> str:
    if group.group_desc not in ("", "default_pg"):
        return group.group_desc
    formats = {tensor.dtype for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
    return _DATA if formats <= {torch.float32, torch.bfloat16, torch.float16} else _AGREEMENT


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor))


class Live(TorchDispatchMode):
    """While it is entered, the most memory that lived at once beside what was `known` before: activations, and whatever else a
    step makes and forgets. On a GPU its allocator is asked, which also sees what kernels need; elsewhere every result is followed.
    """

    def __init__(self, known: Iterable[Tensor], device: torch.device):
        super().__init__()
        self._on_gpu = device.type == "cuda"
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: set[int] = set()
        self._now = self._before = 0
        self.peak = 0
        """Bytes."""

    def __enter__(self) -> Any:
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self._before
            return
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(getattr(tensor, "_local_tensor", tensor))
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known or place in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(place)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, place, size).atexit = False

    def _gone(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self._now -= size
