"""Data parallelism: the gradients of all replicas, summed in flat buckets while the backward still runs.

torch's DistributedDataParallel regroups its buckets after the first step, so a resumed run would add in another order
than an uninterrupted one. Here buckets are fixed. And on CPU the order of every addition is a binary tree over the
micro-batches of the global batch: 1, 2, 4 or 8 ranks give the same bits. `training/step` drives it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel.mesh import Mesh

_FIRST_BUCKET = 1 << 20  # bytes; small, so that the first reduction starts early in the backward
_BUCKET = 25 << 20


class Gradients:
    """Every parameter's `.grad` is a view into one of a few flat buffers; a buffer is reduced as soon as it is full."""

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh, *, wire: torch.dtype = torch.float32):
        self._mesh = mesh
        self._wire = wire
        # The backward reaches the last layers first, so they share the first bucket.
        groups = _group([p for p in parameters if p.requires_grad][::-1])
        self.buckets = [_flatten(group) for group in groups]
        self._sizes = [len(group) for group in groups]
        self._waiting = list(self._sizes)
        self._next = 0
        self._reducing = False
        self._halves = _Halves(mesh.device.type == "cpu")
        self._reduce = _reducer(mesh)
        if mesh.ranks > 1:
            for index, group in enumerate(groups):
                for parameter in group:
                    parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def zero(self) -> None:
        """Forget the last step."""
        torch._foreach_zero_(self.buckets)
        self._halves.clear()
        self._waiting = list(self._sizes)
        self._next = 0

    def before_backward(self, *, last: bool) -> None:
        """Call before each micro-batch's backward; `last` lets the reductions begin as buckets fill up."""
        self._reducing = last

    def after_backward(self, *, last: bool) -> None:
        """Call after each micro-batch's backward. After the last one, the sum over all ranks stands in the buckets."""
        if not last:
            self._halves.carry(self.buckets)
        else:
            self.finish()

    def finish(self) -> None:
        """Reduce what is still to be reduced and wait for all of it; also how a rank that gives a step up keeps in line."""
        self._reducing = False
        while self._next < len(self.buckets):
            self._launch()
        self._reduce.wait()

    def norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, in fp32 on the device."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.buckets)))

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_(self.buckets, factor)

    def _arrived(self, index: int) -> None:
        if not self._reducing:
            return
        self._waiting[index] -= 1
        # Ranks must reduce in the same order, whatever order their gradients arrive in.
        while self._next < len(self.buckets) and self._waiting[self._next] == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        self._halves.merge(bucket, self._next)
        if self._mesh.ranks > 1:
            self._reduce.start(bucket, self._wire)
        self._next += 1


class _Halves:
    """Adds a rank's own micro-batches as a binary tree: ((0+1)+(2+3))+…, the order that more ranks would give.

    Costs a copy of the gradients per level of the tree, so it is done on CPU only; elsewhere backward adds in place.
    """

    def __init__(self, on: bool):
        self._on = on
        self._count = 0
        self._saved: list[tuple[int, list[Tensor]]] = []  # (micro-batches in it, buckets), each smaller than the one before

    def clear(self) -> None:
        self._count = 0
        self._saved.clear()

    def carry(self, buckets: list[Tensor]) -> None:
        """A micro-batch is done and another follows: put finished pairs aside, so that the next pair starts from zero."""
        self._count += 1
        if not self._on or self._count % 2:
            return
        size = 2
        while self._saved and self._saved[-1][0] == size:
            torch._foreach_add_(buckets, self._saved.pop()[1])
            size *= 2
        self._saved.append((size, [bucket.clone() for bucket in buckets]))
        torch._foreach_zero_(buckets)

    def merge(self, bucket: Tensor, index: int) -> None:
        """Add to a bucket of the last pair all that was put aside, smallest first."""
        for _, saved in reversed(self._saved):
            bucket.add_(saved[index])


class _Reducer:
    """Sums each bucket over the ranks with one collective, in the background."""

    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work, Tensor, Tensor]] = []

    def start(self, bucket: Tensor, wire: torch.dtype) -> None:
        sent = bucket if bucket.dtype == wire else bucket.to(wire)
        self._pending.append((dist.all_reduce(sent, async_op=True), sent, bucket))

    def wait(self) -> None:
        for work, sent, bucket in self._pending:
            work.wait()
            if sent is not bucket:
                bucket.copy_(sent)
        self._pending.clear()


class _TreeReducer:
    """Sums over 2^n CPU ranks by exchanging with the neighbour at distance 1, 2, 4, …: (0+1)+(2+3), the same bits on all.

    A collective's ring adds in an order that depends on the number of ranks and on the place in the buffer. The
    exchanges of one bucket follow each other, so a thread makes them while the backward goes on.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._todo: queue.SimpleQueue[tuple[Tensor, torch.dtype] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._started = 0
        threading.Thread(target=self._run, name="phalanx-reduce", daemon=True).start()

    def start(self, bucket: Tensor, wire: torch.dtype) -> None:
        self._started += 1
        self._todo.put((bucket, wire))

    def wait(self) -> None:
        errors = [self._done.get() for _ in range(self._started)]
        self._started = 0
        for error in errors:
            if error is not None:
                raise error

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            try:
                self._exchange(*item)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def _exchange(self, bucket: Tensor, wire: torch.dtype) -> None:
        own = bucket if bucket.dtype == wire else bucket.to(wire)
        other = torch.empty_like(own)
        distance = 1
        while distance < self._mesh.ranks:
            peer = self._mesh.rank ^ distance
            works = (dist.isend(own, peer), dist.irecv(other, peer))
            for work in works:
                assert work is not None
                work.wait()
            own.add_(other)
            distance *= 2
        if own is not bucket:
            bucket.copy_(own)


def _reducer(mesh: Mesh) -> _Reducer | _TreeReducer:
    power_of_two = mesh.ranks & (mesh.ranks - 1) == 0
    if mesh.device.type == "cpu" and mesh.ranks > 2 and power_of_two:
        return _TreeReducer(mesh)
    return _Reducer()  # two terms have one order


def _group(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if size > room or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            room = max(size, _FIRST_BUCKET if len(groups) == 1 else _BUCKET)
        groups[-1].append(parameter)
        room -= size
    return groups


def _flatten(group: list[nn.Parameter]) -> Tensor:
    flat = torch.zeros(sum(p.numel() for p in group), dtype=group[0].dtype, device=group[0].device)
    for parameter, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
