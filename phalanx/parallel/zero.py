"""ZeRO-1 and ZeRO-2: every rank has the whole model, but each owns a part of every parameter: its master weights, its optimizer
states and, with ZeRO-2, its gradient. `parallel/apply` makes the engine; `parallel/fsdp` has one for what FSDP2 leaves whole.

Gradients go to their owners in buckets, in the background, and new values come back in the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.observe.comm_timer import wait
from phalanx.parallel.grad_ready import on_arrival
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.owned_param import ParamShard
from phalanx.parallel.sharding import (
    Sharding,
    check,
    describe,
    exact,
    experts_sharing,
    give_memory,
    lower,
    raise_embeddings,
    sharing,
    storage_bytes,
)
from phalanx.parallel.shares import Bucket, Whole, bundled, wholes_of

if TYPE_CHECKING:
    from phalanx.parallel.apply import Recipe

_FLYING = 2
"""Buckets on their way at the same time. More would hide no more, and each takes memory."""


def shard(parts: list[nn.Module], spots: dict[str, ParamShard], mesh: Mesh, recipe: Recipe, how: Sharding) -> Sharded:
    """Give the stages of a model, which have no memory yet, that of whole parameters, and this rank its part of their state."""
    check(spots)
    if how.low:
        lower(parts, (name for name, spot in spots.items() if not exact(name, spot, recipe.axes)), how.dtype)
        raise_embeddings(parts)
    give_memory(parts, recipe, mesh.device)
    return Sharded(wholes_of(parts, spots), mesh, recipe.fill, how)


class Sharded:
    """The engine: sums each parameter's gradient where its owner is, and spreads what the owner makes of it."""

    def __init__(self, wholes: Sequence[Whole], mesh: Mesh, fill: Callable[[str, Tensor, ParamShard], None], how: Sharding):
        """Writes the initial values; all ranks call it at the same time."""
        self._how = how
        groups = {False: sharing(mesh, how)}
        if any(one.shard.expert for one in wholes):
            groups[True] = experts_sharing(mesh, how)
        # The backward reaches the last layers first, so they share the first bucket.
        bundles = bundled(wholes[::-1], how.wire)
        self.buckets = [Bucket(bundle, *groups[bundle[0].shard.expert], how) for bundle in bundles]
        slots = {slot.owned.name: slot for bucket in self.buckets for slot in bucket.slots}
        self._slots = [slots[one.name] for one in wholes]
        self.owned = [slot.owned for slot in self._slots]
        self._reduced = [bucket for bucket in self.buckets if bucket.trained]
        self._each_time = [bucket for bucket in self._reduced if not bucket.once and not bucket.alone]
        self._scattering: deque[_Flight] = deque()
        self._summing: deque[_Flight] = deque()
        self._line: list[Bucket] = []  # buckets that travel during this backward, in order
        self._next = self._count = self._begun = 0
        self._pipelined, self._finished = False, True
        for number, bucket in enumerate(self._reduced):
            for slot in bucket.slots:
                on_arrival(slot.parameter, self._arrived, number)
        for one in self.owned:
            fill(one.name, one.value.data, one.shard)
        self.updated()

    def begin(self, micro_batches: int, pipelined: bool = False) -> None:
        """Forget the last step; this one has so many backwards. In a pipeline they come in any order and do not announce gradients."""
        self._drain()  # nothing flies, unless the last step broke off
        self._count, self._begun, self._pipelined, self._finished = micro_batches, 0, pipelined, False
        for bucket in self.buckets:
            bucket.forget()
        self._line_up()

    def after_backward(self, part: int | None = None) -> None:
        """Call after each micro-batch's backward, in a pipeline with the stage that it was of."""
        if self._pipelined:
            for bucket in self._each_time:
                if part is None or bucket.part == part:
                    self._launch(bucket)
        else:
            self._complete_line()

    def finish(self) -> None:
        """Wait until every gradient is complete; also how a rank that gives a step up keeps in line."""
        if self._finished:
            return
        self._finished = True
        if self._pipelined:
            for bucket in self._reduced:
                if bucket.once or bucket.shared or bucket.touched:
                    self._launch(bucket)
        else:
            while self._begun < self._count:
                self._complete_line()
        self._drain()
        for bucket in self._each_time:
            self._sum(bucket, bucket.sent_on(self._how.wire))
        self._drain()

    @torch.no_grad()
    def updated(self) -> None:
        """The held values have changed: every rank gets those of all owners."""
        flying: deque[_Flight] = deque()
        for bucket in self.buckets:
            if bucket.in_place:
                continue  # this rank's own memory, and nobody else's
            part = bucket.own_values()
            whole = part if bucket.group.size == 1 else part.new_empty(bucket.group.size * bucket.width)
            flying.append(_Flight(bucket, bucket.group, bucket.group.start_gather(whole, part), part, whole))
            if len(flying) > _FLYING:
                flying.popleft().arrive()
        while flying:
            flying.popleft().arrive()

    def bytes(self) -> dict[str, int]:
        """Memory that this rank really holds."""
        slots = self._slots
        return {
            "parameters": storage_bytes([*(s.parameter for s in slots), *(s.owned.value for s in slots)]),
            "gradients": storage_bytes([*(s.parameter.grad for s in slots), *(s.owned.gradient for s in slots)]),
        }

    def applied(self) -> str:
        """What was done, read off the tensors."""
        slots = self._slots
        example = max(slots, key=lambda slot: slot.parameter.numel())
        sizes = [sum(slot.owned.value.numel() for slot in slots), sum(slot.parameter.numel() for slot in slots)]
        kinds = " and ".join(dict.fromkeys(str(slot.parameter.dtype).removeprefix("torch.") for slot in slots))
        gradients = "their gradients too" if self._each_time else "gradients whole"
        own = describe(example.owned.name, example.owned.shard, example.owned.value.shape, example.parameter.shape)
        return (
            f"optimizer state of {sizes[0]:,} of {sizes[1]:,} elements, {gradients}, parameters whole in {kinds}; {own}, "
            f"among {self.buckets[0].group.size} ranks"
        )

    def _line_up(self) -> None:
        self._line = self._reduced if self._begun == self._count - 1 else self._each_time
        self._next = 0
        for bucket in self._line:
            bucket.waiting = len(bucket.slots)

    def _arrived(self, number: int) -> None:
        if self._pipelined or self._finished:
            return
        self._reduced[number].waiting -= 1
        # Ranks must reduce in the same order, whatever order their gradients arrive in.
        while self._next < len(self._line) and self._line[self._next].waiting == 0:
            self._launch(self._line[self._next])
            self._next += 1

    def _complete_line(self) -> None:
        """Send off what this backward did not fill: a parameter that it did not reach has no gradient."""
        for bucket in self._line[self._next :]:
            self._launch(bucket)
        self._begun += 1
        self._line_up()

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        if bucket.alone:
            bucket.take_own()
            return
        whole = bucket.packed(self._how.wire)
        part = whole if bucket.group.size == 1 else whole.new_empty(bucket.width)
        self._scattering.append(_Flight(bucket, bucket.group, bucket.group.start_scatter(part, whole), part, whole))
        while len(self._scattering) > _FLYING:
            self._scattered(self._scattering.popleft())

    def _scattered(self, flight: _Flight) -> None:
        flight.wait("reduce_scatter")
        if flight.bucket.once:
            self._sum(flight.bucket, flight.part)
        else:
            flight.bucket.add(flight.part)

    def _sum(self, bucket: Bucket, part: Tensor) -> None:
        """Over the ranks that own the same. These messages have a fixed place among the others too: ranks never cross."""
        self._summing.append(_Flight(bucket, bucket.replicas, bucket.replicas.start(part), part, part))
        while len(self._summing) > _FLYING:
            self._summed(self._summing.popleft())

    @torch.no_grad()
    def _summed(self, flight: _Flight) -> None:
        flight.wait("all_reduce")
        flight.bucket.deliver(flight.part)

    def _drain(self) -> None:
        while self._scattering:
            self._scattered(self._scattering.popleft())
        while self._summing:
            self._summed(self._summing.popleft())


@dataclass(slots=True)
class _Flight:
    """A bucket on its way."""

    bucket: Bucket
    group: Group
    work: dist.Work | None
    part: Tensor
    whole: Tensor

    def wait(self, operation: str) -> None:
        if self.work is not None:
            wait(self.work, self.group, operation=operation)

    def arrive(self) -> None:
        self.wait("all_gather")
        self.bucket.spread(self.whole)
