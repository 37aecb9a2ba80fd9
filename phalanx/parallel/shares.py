"""Parameters in buckets, each rank with its share of every parameter: how their gradients and new values lie while they travel,
rank by rank: what belongs to the first rank of all of them, then what belongs to the second. The parts of `parallel/zero`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.owned_param import OwnedParam, ParamShard
from phalanx.parallel.sharding import Sharding, own_box

_BUCKETS = {"cuda": 32 << 20, "cpu": 64 << 20, "meta": 32 << 20}
"""Bytes of a bucket on the wire. CPU ranks share the machine's cores: each message costs a switch between processes."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter that every rank has all of."""

    name: str
    parameter: nn.Parameter
    shard: ParamShard
    part: int
    """Which of this rank's stages holds it; the first, where two do."""
    shared: bool
    """Two stages do: their backwards both add to its gradient."""


def wholes_of(parts: Sequence[nn.Module], spots: dict[str, ParamShard], names: Iterable[str] | None = None) -> list[Whole]:
    """All parameters of these stages, or the named ones."""
    found: dict[str, Whole] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            if name in found:
                first = found[name]
                found[name] = Whole(name, first.parameter, first.shard, first.part, True)
            else:
                found[name] = Whole(name, parameter, spots[name], index, False)
    wanted = found.keys() if names is None else set(names)
    return [one for name, one in found.items() if name in wanted]


@dataclass(slots=True)
class _Slot:
    """A parameter and the place of its parts in a bucket."""

    parameter: nn.Parameter
    owned: OwnedParam
    room: int
    """Elements of each rank's part, with what is missing in the last ones."""
    offset: int
    """Of the part in every rank's share of the bucket."""
    first: int
    """Where this rank's part begins in the flattened parameter."""
    targets: list[Tensor] = field(default_factory=list)
    """Views of the parameter: rows of whole parts, and the last one that is not."""

    @classmethod
    def of(cls, one: Whole, group: Group, offset: int) -> _Slot:
        spot, room = own_box(one.shard, group.index, group.size)
        flat = one.parameter.detach().view(-1)
        first = min(group.index * room, len(flat))
        # In fp32 the master weights are the parameter's own memory.
        low = flat.dtype != torch.float32
        own = torch.empty(spot.slice.shape, dtype=torch.float32, device=flat.device) if low else _cut(flat, first, spot)
        held = OwnedParam(one.name, nn.Parameter(own, requires_grad=False), spot)
        full = len(flat) // max(room, 1)
        targets = [flat[: full * room].view(full, room), flat[full * room :]]
        return cls(one.parameter, held, room, offset, first, targets)

    def sources(self, table: Tensor) -> list[Tensor]:
        """What belongs into `targets`, of a bucket with a row for each rank."""
        rows, rest = len(self.targets[0]), len(self.targets[1])
        found = [table[:rows, self.offset : self.offset + self.room]]
        return [*found, table[rows, self.offset : self.offset + rest]] if rest else found

    def part(self, share: Tensor) -> Tensor:
        """This rank's part out of its share of a bucket."""
        return _cut(share, self.offset, self.owned.shard)

    def gradient(self, parts: int) -> Tensor:
        """Of the whole parameter, so that cutting it evenly along the first dimension gives the parts."""
        found = self.parameter.grad
        if found is None:
            found = torch.zeros_like(self.parameter)
        elif not found.is_contiguous():  # a backward in two halves gives what it likes
            found = self.parameter.grad = found.contiguous()
        return found.view(parts, -1) if parts * self.room == found.numel() else found


class Bucket:
    """Some parameters of one kind, whose gradients and new values travel together."""

    def __init__(self, bundle: Sequence[Whole], group: Group, replicas: Group, how: Sharding):
        self.group, self.replicas = group, replicas
        self.part, self.shared = bundle[0].part, bundle[0].shared
        self.trained = bundle[0].parameter.requires_grad
        self.once = how.zero == 1 or group.size == 1
        """Its gradient is kept whole and travels once in a step."""
        self.alone = group.size == 1 and replicas.size == 1
        """Nobody else has any of it."""
        self.slots: list[_Slot] = []
        self.width = 0
        for one in bundle:
            self.slots.append(_Slot.of(one, group, self.width))
            self.width += self.slots[-1].room
        if self.width == 0:  # another technique has left nothing of it here
            self.alone = True
        self.in_place = self.width == 0 or (group.size == 1 and bundle[0].parameter.dtype == torch.float32)
        """The held values are the parameters."""
        self.waiting = 0
        self.total: Tensor | None = None
        """ZeRO-2: this rank's share of the gradient, summed over the micro-batches so far."""

    @property
    def touched(self) -> bool:
        return any(slot.parameter.grad is not None for slot in self.slots)

    def forget(self) -> None:
        self.total = None
        for slot in self.slots:
            slot.parameter.grad = slot.owned.gradient = slot.owned.value.grad = None

    def packed(self, wire: torch.dtype) -> Tensor:
        """The gradients, rank by rank; ZeRO-2 then has no need of them any more."""
        gradients = [slot.gradient(self.group.size) for slot in self.slots if slot.room]
        table = torch.empty(self.group.size, self.width, dtype=wire, device=gradients[0].device)
        torch._chunk_cat(gradients, dim=0, num_chunks=self.group.size, out=table)
        if not self.once:
            for slot in self.slots:
                slot.parameter.grad = None
        return table.view(-1)

    def add(self, share: Tensor) -> None:
        if self.total is None:
            self.total = share.to(self.slots[0].parameter.dtype)
        else:
            self.total += share

    def sent_on(self, wire: torch.dtype) -> Tensor:
        """The share of the gradient as it goes to the other replicas."""
        if self.total is None:  # the step was given up before anything arrived
            first = self.slots[0].parameter
            self.total = torch.zeros(self.width, dtype=first.dtype, device=first.device)
        return self.total if self.replicas.size == 1 else self.total.to(wire)

    def deliver(self, share: Tensor) -> None:
        """The complete gradient of what this rank owns."""
        if self.total is not None:
            if share is not self.total:
                self.total.copy_(share)
            for slot in self.slots:
                slot.owned.gradient = slot.part(self.total)
            return
        for slot in self.slots:
            if slot.parameter.grad is None:
                slot.owned.gradient = slot.part(share).to(slot.parameter.dtype)
            else:
                slot.owned.gradient = _cut(slot.parameter.grad.view(-1), slot.first, slot.owned.shard)
                slot.owned.gradient.copy_(slot.part(share))

    def take_own(self) -> None:
        """The same where nothing has to travel."""
        for slot in self.slots:
            found = slot.parameter.grad
            slot.owned.gradient = torch.zeros_like(slot.parameter) if found is None else found.contiguous()

    def own_values(self) -> Tensor:
        """This rank's share of new values."""
        first = self.slots[0].parameter
        share = torch.empty(self.width, dtype=first.dtype, device=first.device)
        torch._foreach_copy_([slot.part(share) for slot in self.slots], [slot.owned.value.detach() for slot in self.slots])
        return share

    def spread(self, whole: Tensor) -> None:
        """Write new values, rank by rank as they came, into the parameters."""
        table = whole.view(self.group.size, self.width)
        targets, sources = [], []
        for slot in self.slots:
            found = slot.sources(table)
            sources += found
            targets += slot.targets[: len(found)]
        torch._foreach_copy_(targets, sources)


def _cut(flat: Tensor, first: int, spot: ParamShard) -> Tensor:
    """The box that begins there in a flat tensor."""
    return flat[first : first + math.prod(spot.slice.shape)].view(spot.slice.shape)


def bundled(wholes: Sequence[Whole], wire: torch.dtype) -> list[list[Whole]]:
    """Parameters by kind, in the order in which the backward completes the bundles."""
    complete: list[list[Whole]] = []
    open_: dict[tuple[object, ...], list[Whole]] = {}
    room: dict[tuple[object, ...], int] = {}
    for one in wholes:
        kind, size = _kind(one), one.parameter.numel() * wire.itemsize
        if size > room.get(kind, -1):
            if kind in open_:
                complete.append(open_[kind])
            open_[kind], room[kind] = [], max(size, _BUCKETS[one.parameter.device.type])
        open_[kind].append(one)
        room[kind] -= size
    complete += open_.values()
    places = {one.name: index for index, one in enumerate(wholes)}
    return sorted(complete, key=lambda bundle: places[bundle[-1].name])


def _kind(one: Whole) -> tuple[torch.dtype, bool, bool, int, bool]:
    return one.parameter.dtype, one.parameter.requires_grad, one.shard.expert, one.part, one.shared
