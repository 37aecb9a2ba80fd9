"""Counts what one step costs on this rank: bytes sent, by technique and collective; the memory that lives only while the step runs; and
floating-point operations, those of recomputation separately. Everything is read from the operations themselves, whoever starts them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from phalanx import accelerator
from phalanx.kernels import document_attention, router_product, sink_attention
from phalanx.observe.comm_timer import replaced

Sent = dict[str, dict[str, int]]
"""Bytes by the use of a group and by collective."""


class _Counter(TorchDispatchMode):
    """A dispatch mode that watches. By default the first operation under a mode imports torch._dynamo, seconds in every rank, in order to
    keep the mode itself from being compiled; a counter is never entered in compiled code."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class TrafficCounter(_Counter):
    """While it is entered, counts what this rank sends.

    Collectives are counted as rings send them, which is also the minimum of any algorithm: of n ranks an all-reduce sends
    2(n - 1)/n of its bytes, a reduce-scatter and an all-gather (n - 1)/n of the whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace.startswith(("c10d", "_c10d_functional")) and (message := traffic(func.overloadpacket.__name__, args)):
            collective, use, _, size = message
            by_collective = self.sent.setdefault(use, {})
            by_collective[collective] = by_collective.get(collective, 0) + size
        return result


def traffic(operation: str, args: tuple[Any, ...]) -> tuple[str, str, dist.ProcessGroup, int] | None:
    """(collective, use of the group, group, bytes that this rank sends) of a communication operation; None if it sends nothing."""
    if operation not in _OPERATIONS:
        return None
    collective, bytes_sent = _OPERATIONS[operation]
    group = _group(args)
    ranks = group.size() if group is not None else 1
    if group is None or ranks == 1:
        return None
    return collective, _use(group, args), group, round(bytes_sent(args, ranks, group.rank()))


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(tensors) if isinstance(tensor, Tensor))


def _all_to_all(sent: Any, sizes: Sequence[int] | None, ranks: int, rank: int) -> float:
    """All but what stays on this rank."""
    own = sizes[rank] / max(sum(sizes), 1) if sizes else 1 / ranks
    return (1 - own) * _bytes(sent)


_COLLECTIVES: tuple[tuple[str, str, Callable[[Any, int, int], float]], ...] = (
    (
        "all-reduce",
        "allreduce_ allreduce_coalesced_ all_reduce all_reduce_",
        lambda args, n, rank: 2 * (n - 1) / n * _bytes(args[0]),
    ),
    # c10d's operations have (output, input, …), the functional ones begin with the input.
    (
        "all-gather",
        "allgather_ _allgather_base_ allgather_into_tensor_coalesced_",
        lambda args, n, rank: (n - 1) * _bytes(args[1]),
    ),
    ("all-gather", "all_gather_into_tensor all_gather_into_tensor_out", lambda args, n, rank: (n - 1) * _bytes(args[0])),
    (
        "reduce-scatter",
        "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
        lambda args, n, rank: (n - 1) / n * _bytes(args[1]),
    ),
    ("reduce-scatter", "reduce_scatter_tensor", lambda args, n, rank: (n - 1) / n * _bytes(args[0])),
    # c10d::alltoall_base_(output, input, group, output sizes, input sizes, …)
    ("all-to-all", "alltoall_base_", lambda args, n, rank: _all_to_all(args[1], args[4], n, rank)),
    ("all-to-all", "all_to_all_single", lambda args, n, rank: _all_to_all(args[0], args[2], n, rank)),
    ("send", "send", lambda args, n, rank: _bytes(args[0])),
    ("broadcast", "broadcast_", lambda args, n, rank: (n - 1) / n * _bytes(args[0])),
)
"""Collectives, torch's operations of each, and the bytes that a rank of n sends."""
_OPERATIONS = {name: (collective, sent) for collective, names, sent in _COLLECTIVES for name in names.split()}


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The group among an operation's arguments: boxed, or by name, which functional operations have last."""
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
    # All ranks share gradients where every rank is a replica; what they agree on in every step is in fp64, or bytes.
    dtypes = {tensor.dtype for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
    return "data" if dtypes <= {torch.float32, torch.bfloat16, torch.float16} else "agreement"


class MemoryCounter(_Counter):
    """While it is entered, measures the peak memory that lives next to the tensors `known` before: activations and temporary tensors.

    On a GPU it asks the allocator, which also sees what kernels need; on the CPU it follows the result of every operation.
    """

    def __init__(self, known: Iterable[Tensor], device: torch.device):
        super().__init__()
        self._accelerator = accelerator.of(device)
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: set[int] = set()
        self._now = self._before = 0
        self.peak = 0
        """Bytes."""

    def __enter__(self) -> Any:
        if self._accelerator.asynchronous:
            self._accelerator.synchronize()
            self._accelerator.reset_peak_memory()
            self._before = self._accelerator.memory_allocated()
            return self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._accelerator.asynchronous:
            self._accelerator.synchronize()
            self.peak = self._accelerator.max_memory_allocated() - self._before
            return
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(getattr(tensor, "_local_tensor", tensor))
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


class FlopCounter(_Counter):
    """While it is entered, counts the floating-point operations of matrix products and attention, in backwards too."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.repeated = 0
        """Of forwards that are repeated for their backward."""
        self.again = 0
        """Number of repeated forwards in progress; `transforms/recompute` sets it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flops_of(func, args, kwargs or {}, out):
            self.flops += count
            self.repeated += count if self.again else 0
        return out


@contextmanager
def count_flops(parts: Sequence[nn.Module]) -> Iterator[FlopCounter]:
    """Count the computation of these modules, and separately what their blocks recompute."""
    with FlopCounter() as counter, ExitStack() as stack:
        for block in (module for part in parts for module in part.modules() if hasattr(module, "work")):
            stack.enter_context(replaced(block, "work", counter))  # see `transforms/recompute`
        yield counter


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of one of torch's operations; 0 for all but matrix products and attention."""
    formula = _FORMULAS.get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


def _attention(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *rest: Any, **settings: Any) -> int:
    batch, heads, length, width = q_BHSE.shape
    return 2 * batch * heads * length * k_BKTE.shape[2] * (width + v_BKTE.shape[3])


def _attention_backward(gradient: Tensor, *rest: Any, **settings: Any) -> int:
    return 5 * _attention(*rest) // 2  # the scores again, and two products for each of the two


def _document_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, *rest: Any, **settings: Any) -> int:
    batch, length, heads, width = q_BSHE.shape
    return 2 * batch * heads * length * length * (width + v_BSKE.shape[3])


def _grouped_product(a: Tensor, b: Tensor, *rest: Any, **settings: Any) -> int:
    """Each row is multiplied by one matrix; or, for gradients of weights, by its own row of the other factor."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # What torch's table lacks, or refuses in older versions: fewer key heads than query heads. As there, attention counts as if
    # every query saw every key.
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"): _attention for kernel in _KERNELS},
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward"): _attention_backward for kernel in _KERNELS},
    torch.ops.aten._grouped_mm: _grouped_product,
    torch.ops.aten._scaled_grouped_mm: _grouped_product,
    torch.ops.aten.addmm: lambda _, a, b, *rest, **settings: 2 * a.shape[0] * a.shape[1] * b.shape[1],  # also with a dtype
    document_attention.FORWARD: _document_attention,
    document_attention.BACKWARD: lambda gradient, *rest, **settings: 5 * _document_attention(*rest) // 2,
    sink_attention.FORWARD: _attention,
    sink_attention.BACKWARD: _attention_backward,
    router_product.FORWARD: lambda x, weight, **settings: 2 * x.numel() * len(weight),
    router_product.BACKWARD: lambda gradient, x, weight, **settings: 4 * x.numel() * len(weight),
}
