"""Data parallelism: the gradients of all replicas, summed in flat buckets while the backward still runs.

torch's DistributedDataParallel regroups its buckets after the first step, so a resumed run would add in another order
than an uninterrupted one. Here buckets are fixed. And on CPU the order of every addition is a binary tree over the
micro-batches of the global batch, halved from the top: 1, 2, 4 or 8 ranks give the same bits. `training/step` drives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.observe.comm_timer import wait
from phalanx.parallel.grad_ready import on_arrival
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import OwnedParam

_BUCKETS = {
    # Bytes of the first bucket and of the others. On GPUs the first is small, so that reducing starts early in the backward.
    "cuda": (1 << 20, 25 << 20),
    # CPU ranks share the machine's cores: each message costs a switch between processes, and little is idle to hide it behind.
    "cpu": (64 << 20, 64 << 20),
    "meta": (1 << 20, 25 << 20),  # a rank that is only foreseen
}


class Replicated:
    """Every parameter's gradient ends up in one of a few flat buffers; a buffer is reduced as soon as it is full."""

    def __init__(self, held: Sequence[OwnedParam], mesh: Mesh, axes: Sequence[str], *, wire: torch.dtype = torch.float32):
        """`axes`: those whose ranks see other samples. Experts have axes of their own."""
        self.owned = list(held)
        self._wire = wire
        groups = {False: mesh.group(*axes, use="data")}
        if any(one.shard.expert for one in held):
            groups[True] = mesh.group("expert_replicate", "expert_shard", use="experts' data")
        reducers = {expert: _reducer(group, mesh) for expert, group in groups.items()}
        # The backward reaches the last layers first, so they share the first bucket.
        bundles = _bundle([one for one in held if one.value.requires_grad][::-1])
        self.buckets = [_buffer(bundle) for bundle in bundles]
        self._reducers = [reducers[bundle[0].shard.expert] for bundle in bundles]
        self._slots = [
            _Slot(one, part.view_as(one.value), index)
            for index, (bundle, bucket) in enumerate(zip(bundles, self.buckets, strict=True))
            for one, part in zip(bundle, bucket.split([one.value.numel() for one in bundle]), strict=True)
        ]
        self._sizes = [len(bundle) for bundle in bundles]
        self._begun = 0
        self._count = 0
        self._waiting = list(self._sizes)
        self._next = 0
        self._tree = _Tree(mesh.device.type == "cpu")
        for number, slot in enumerate(self._slots):
            on_arrival(slot.parameter, self._arrived, number)

    def applied(self) -> str:
        """What was done, read off the buckets."""
        ranks = max(reducer.size for reducer in self._reducers) if self._reducers else 1
        numbers = sum(bucket.numel() for bucket in self.buckets)
        return f"{len(self.buckets)} buckets of {numbers:,} gradients in all, summed over {ranks} ranks"

    def bytes(self) -> dict[str, int]:
        """What this rank really keeps."""
        values = sum(one.value.numel() * one.value.element_size() for one in self.owned)
        return {"parameters": values, "gradients": sum(bucket.numel() * bucket.element_size() for bucket in self.buckets)}

    def begin(self, micro_batches: int, pipelined: bool = False) -> None:
        """Forget the last step; this one has so many backwards. Those of a pipeline add in place, and all is summed at the end."""
        self._count, self._begun = 0 if pipelined else micro_batches, 0
        self._tree.begin(1 if pipelined else micro_batches)
        self._empty()
        self._waiting = list(self._sizes)
        self._next = 0

    def after_backward(self, part: int | None = None) -> None:
        """Call after each micro-batch's backward. After the last one, the sum over all ranks stands in the buckets."""
        if not self._count:
            return  # a pipeline's stages come in any order
        for slot in self._slots:
            slot.settle()
        self._begun += 1
        if self._begun == self._count:
            self.finish()
        elif self._tree.after(self._begun - 1, self.buckets):
            self._empty()

    def finish(self) -> None:
        """Reduce what is still to be reduced and wait for all of it; also how a rank that gives a step up keeps in line."""
        for slot in self._slots:
            slot.settle()
        while self._next < len(self.buckets):
            self._launch()
        for reducer in dict.fromkeys(self._reducers):
            reducer.wait()

    def updated(self) -> None:
        """The parameters themselves are what the optimizer changes: nothing is to be passed on."""

    def _empty(self) -> None:
        for slot in self._slots:
            slot.parameter.grad = None

    def _arrived(self, number: int) -> None:
        slot = self._slots[number]
        slot.take()
        if self._begun < self._count - 1 or not self._count:
            return  # more is to come before this can travel
        self._waiting[slot.bucket] -= 1
        # Ranks must reduce in the same order, whatever order their gradients arrive in.
        while self._next < len(self.buckets) and self._waiting[self._next] == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        self._tree.merge(bucket, self._next)
        self._reducers[self._next].start(bucket, self._wire)
        self._next += 1


class _Slot:
    """A parameter and its place in a bucket."""

    __slots__ = ("bucket", "parameter", "place")

    def __init__(self, held: OwnedParam, place: Tensor, bucket: int):
        self.parameter, self.place, self.bucket = held.value, place, bucket
        held.gradient = place

    def take(self) -> None:
        """The first gradient is copied to its place, later ones are added to it there by the backward itself."""
        if self.parameter.grad is not self.place:
            assert self.parameter.grad is not None
            self.place.copy_(self.parameter.grad)
            self.parameter.grad = self.place

    def settle(self) -> None:
        """A parameter that the backward did not reach has no gradient: nothing old may stand in its place."""
        if self.parameter.grad is None:
            self.parameter.grad = self.place.zero_()
        else:
            self.take()  # a backward in two halves, as pipelines have, does not announce its gradients


class _Tree:
    """Adds a rank's own micro-batches in the order that more ranks would: half of them, plus the other half, all the way down.

    Costs a copy of the gradients per level of the tree, so it is done on CPU only; elsewhere backward adds in place.
    """

    def __init__(self, on: bool):
        self._on = on
        self._leaves: list[_Leaf] = []
        self._saved: list[list[Tensor]] = []

    def begin(self, micro_batches: int) -> None:
        self._leaves = _halve(micro_batches) if self._on else [_Leaf()] * micro_batches
        self._saved.clear()

    def after(self, index: int, buckets: list[Tensor]) -> bool:
        """A micro-batch is done and another follows; true if the sum so far was put aside and the next one starts afresh."""
        for _ in range(self._leaves[index].merges):
            torch._foreach_add_(buckets, self._saved.pop())
        if self._leaves[index + 1].afresh:
            self._saved.append([bucket.clone() for bucket in buckets])
        return self._leaves[index + 1].afresh

    def merge(self, bucket: Tensor, index: int) -> None:
        """Add to a bucket of the last micro-batch all that was put aside, smallest first."""
        for saved in reversed(self._saved):
            bucket.add_(saved[index])


@dataclass(slots=True)
class _Leaf:
    """A micro-batch in the tree."""

    afresh: bool = False
    """It begins a sum of its own; else it is added to what stands there."""
    merges: int = 0
    """Sums that were put aside and are complete with it."""


def _halve(count: int) -> list[_Leaf]:
    """The tree over `count` micro-batches. A half of one is added in place: nothing has to be put aside for it."""
    if count == 1:
        return [_Leaf()]
    left, right = _halve(count - count // 2), _halve(count // 2)
    if len(right) > 1:
        right[0].afresh = True
        right[-1].merges += 1
    return left + right


class _Reducer:
    """Sums each bucket over the ranks with one collective, in the background."""

    def __init__(self, group: Group) -> None:
        self._group, self.size = group, group.size
        self._pending: list[tuple[dist.Work, Tensor, Tensor]] = []

    def start(self, bucket: Tensor, wire: torch.dtype) -> None:
        sent = bucket if bucket.dtype == wire else bucket.to(wire)
        if (work := self._group.start(sent)) is not None:
            self._pending.append((work, sent, bucket))

    def wait(self) -> None:
        for work, sent, bucket in self._pending:
            wait(work, self._group)
            if sent is not bucket:
                bucket.copy_(sent)
        self._pending.clear()


class _TreeReducer:
    """Sums over 2^n CPU ranks in n stages, each with the neighbour at distance 1, 2, 4, …: (0+1)+(2+3), the same bits on all.

    One collective over all ranks adds in a ring, in an order that depends on the number of ranks and on the place in the
    buffer; over two ranks there is only one order. A pair has a group of its own for each stage, and every stage takes
    the buckets in the same order, so pairs always meet over the same bucket.
    """

    def __init__(self, group: Group, mesh: Mesh) -> None:
        self.size = group.size
        distances = [1 << stage for stage in range(group.size.bit_length() - 1)]
        pairs = [sorted((group.index, group.index ^ distance)) for distance in distances]
        self._groups = [mesh.group_of((group.ranks[a], group.ranks[b]), use=group.use) for a, b in pairs]
        self._climbs: list[_Climb] = []

    def start(self, bucket: Tensor, wire: torch.dtype) -> None:
        self._climbs.append(_Climb(bucket, bucket if bucket.dtype == wire else bucket.to(wire), self._groups))
        self._advance()  # what has finished a stage goes on, while the backward does too

    def wait(self) -> None:
        for stage in range(len(self._groups)):
            for climb in self._climbs:
                climb.finish(stage)
        for climb in self._climbs:
            climb.deliver()
        self._climbs.clear()

    def _advance(self) -> None:
        ahead = len(self._groups)
        for climb in self._climbs:
            while climb.stage < ahead - 1 and climb.work.is_completed():
                climb.finish(climb.stage)
            ahead = climb.stage + 1  # the next bucket may enter a stage only after this one has


class _Climb:
    """A bucket on its way up the tree."""

    def __init__(self, bucket: Tensor, sent: Tensor, groups: list[Group]):
        self._bucket, self._sent, self._groups = bucket, sent, groups
        self.stage = 0
        self.work = self._meet()

    def finish(self, stage: int) -> None:
        """Complete a stage and enter the next; does nothing if the bucket is past it."""
        if self.stage != stage:
            return
        wait(self.work, self._groups[stage])
        self.stage += 1
        if self.stage < len(self._groups):
            self.work = self._meet()

    def deliver(self) -> None:
        if self._sent is not self._bucket:
            self._bucket.copy_(self._sent)

    def _meet(self) -> dist.Work:
        work = self._groups[self.stage].start(self._sent)
        assert work is not None
        return work


def _reducer(group: Group, mesh: Mesh) -> _Reducer | _TreeReducer:
    power_of_two = group.size & (group.size - 1) == 0
    if mesh.device.type == "cpu" and group.size > 2 and power_of_two:
        return _TreeReducer(group, mesh)
    return _Reducer(group)  # two terms have one order


def _bundle(held: list[OwnedParam]) -> list[list[OwnedParam]]:
    bundles: list[list[OwnedParam]] = []
    room = 0
    for one in held:
        size = one.value.numel() * one.value.element_size()
        if size > room or _kind(bundles[-1][0]) != _kind(one):
            bundles.append([])
            first, later = _BUCKETS[one.value.device.type]
            room = max(size, first if len(bundles) == 1 else later)
        bundles[-1].append(one)
        room -= size
    return bundles


def _kind(held: OwnedParam) -> tuple[torch.dtype, bool]:
    return held.value.dtype, held.shard.expert


def _buffer(bundle: list[OwnedParam]) -> Tensor:
    first = bundle[0].value
    return torch.zeros(sum(one.value.numel() for one in bundle), dtype=first.dtype, device=first.device)
