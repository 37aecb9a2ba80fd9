"""Buckets of parameters whose gradients and new values are communicated together. Used by `parallel/data_parallel`.

A `FlatBucket` (ZeRO-0) is one persistent buffer; the parameters' gradients are views of it. A `ShardBucket` (ZeRO-1 and 2) packs
gradients when it is sent, in rank order: first what the first rank owns of every parameter, then what the second rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.parallel.group import Group
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.tensor_slice import chunk

FLAT_BYTES = {True: (1 << 20, 25 << 20), False: (64 << 20, 64 << 20)}
"""ZeRO-0: bytes of the first bucket and of the others, by `Accelerator.asynchronous`. A small first bucket starts communication early
in the backward. CPU ranks share the machine's cores: each message costs a process switch, and little compute is left to hide it."""
SHARD_BYTES = {True: 32 << 20, False: 64 << 20}
"""ZeRO-1 and 2: bytes of a bucket as it is sent."""


@dataclass(frozen=True, slots=True)
class ModelParam:
    """A parameter of this rank's pipeline stages, as the model holds it."""

    name: str
    parameter: nn.Parameter
    shard: ParamShard
    part: int = 0
    """Index of the stage that holds it; of the first, if two do."""
    shared: bool = False
    """Whether two stages hold it, so that both backwards add to its gradient."""

    @property
    def kind(self) -> tuple[torch.dtype, bool, bool, int, bool]:
        """Only parameters of one kind share a bucket."""
        return self.parameter.dtype, self.parameter.requires_grad, self.shard.expert, self.part, self.shared


def model_params(
    parts: Sequence[nn.Module], shards: dict[str, ParamShard], names: Collection[str] | None = None
) -> list[ModelParam]:
    """All parameters of these stages, or the named ones."""
    params: dict[str, ModelParam] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            known = params.get(name)
            params[name] = replace(known, shared=True) if known else ModelParam(name, parameter, shards[name], index)
    return [params[name] for name in params if names is None or name in names]


def flat_bundles(params: Sequence[ModelParam]) -> list[list[ModelParam]]:
    """ZeRO-0: consecutive parameters; a new bucket begins where it is full or the dtype or group changes."""
    bundles: list[list[ModelParam]] = []
    room = 0
    for param in params:
        size = param.parameter.numel() * param.parameter.element_size()
        last = bundles[-1][0] if bundles else param
        if size > room or (last.parameter.dtype, last.shard.expert) != (param.parameter.dtype, param.shard.expert):
            bundles.append([])
            first, later = FLAT_BYTES[accelerator.of(param.parameter.device).asynchronous]
            room = max(size, first if len(bundles) == 1 else later)
        bundles[-1].append(param)
        room -= size
    return bundles


def shard_bundles(params: Sequence[ModelParam], itemsize: int) -> list[list[ModelParam]]:
    """ZeRO-1 and 2: one open bucket per kind, in the order in which the backward completes them. `itemsize`: of an element as sent."""
    complete: list[list[ModelParam]] = []
    open_: dict[tuple[object, ...], list[ModelParam]] = {}
    room: dict[tuple[object, ...], int] = {}
    for param in params:
        size = param.parameter.numel() * itemsize
        if size > room.get(param.kind, -1):
            if param.kind in open_:
                complete.append(open_[param.kind])
            limit = SHARD_BYTES[accelerator.of(param.parameter.device).asynchronous]
            open_[param.kind], room[param.kind] = [], max(size, limit)
        open_[param.kind].append(param)
        room[param.kind] -= size
    complete += open_.values()
    order = {param.name: index for index, param in enumerate(params)}
    return sorted(complete, key=lambda bundle: order[bundle[-1].name])


def own_shard(shard: ParamShard, index: int, count: int) -> tuple[ParamShard, int]:
    """The index-th of `count` shards of a parameter, each contiguous in the parameter's memory, and the size of the largest in elements.

    Rows are divided as torch.chunk and FSDP2 divide them. Fewer experts than ranks are cut along their second dimension too.
    """
    axis = "expert_shard" if shard.expert else "shard"
    shape = shard.slice.shape
    rows = shape[0]
    if shard.expert and 0 < rows < count and count % rows == 0 and shape[1] % (count // rows) == 0:
        ranks_per_expert = count // rows
        part = shard.slice.cut(0, index // ranks_per_expert, rows).cut(1, index % ranks_per_expert, ranks_per_expert)
        return replace(shard, slice=part, split=(*shard.split, axis)), math.prod(shape) // count
    return shard.cut(0, index, count, axis), chunk(rows, 0, count)[1] * math.prod(shape[1:])


class FlatBucket:
    """A buffer that holds the whole gradients of some parameters (ZeRO-0)."""

    def __init__(self, params: Sequence[ModelParam], group: Group, replicas: Group):
        first = params[0].parameter
        sizes = [param.parameter.numel() for param in params]
        self.group, self.replicas, self.part, self.shared = group, replicas, params[0].part, params[0].shared
        self.buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.parameters = [param.parameter for param in params]
        self._views = [view.view_as(p) for view, p in zip(self.buffer.split(sizes), self.parameters, strict=True)]
        self.owned = [
            OwnedParam(param.name, param.parameter, param.shard, view) for param, view in zip(params, self._views, strict=True)
        ]
        self.expert = params[0].shard.expert
        self.trained = self.once = self.touched = True
        self.label = ""
        """Names it in a timeline."""
        self.missing = 0
        self._partial_sums: list[Tensor] = []

    def reset(self) -> None:
        """Start a new step."""
        self._partial_sums.clear()
        self._clear()

    def gradient_ready(self, index: int, last: bool) -> None:
        """Copy a parameter's first gradient into the buffer; the backward adds later ones there in place."""
        parameter, view = self.parameters[index], self._views[index]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def end_micro_batch(self, merges: int, set_aside: bool) -> None:
        """Add the last `merges` partial sums; `set_aside`: keep the sum so far and let the next micro-batch start from zero."""
        self._complete()
        for _ in range(merges):
            self.buffer += self._partial_sums.pop()
        if set_aside:
            self._partial_sums.append(self.buffer.clone())
            self._clear()

    def packed(self, dtype: torch.dtype) -> Tensor:
        """The complete gradients as they are sent."""
        self._complete()
        while self._partial_sums:
            self.buffer += self._partial_sums.pop()
        return self.buffer if self.buffer.dtype == dtype else self.buffer.to(dtype)

    def deliver(self, total: Tensor) -> None:
        """Store the sum over all ranks in the bucket."""
        if total is not self.buffer:
            self.buffer.copy_(total)

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _complete(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:  # the backward did not reach it
                parameter.grad = self._views[index].zero_()
            else:
                self.gradient_ready(index, last=True)  # the two halves of a split backward do not call hooks


class _Slot:
    """A parameter and the place of its shards in a bucket."""

    def __init__(self, param: ModelParam, group: Group, offset: int):
        """`offset`: of the shard in every rank's part of the bucket."""
        self.parameter, self.offset = param.parameter, offset
        shard, self.room = own_shard(param.shard, group.index, group.size)
        """The room of every rank's shard, in elements, is that of the largest."""
        flat = param.parameter.detach().view(-1)
        self.first = min(group.index * self.room, len(flat))
        """Where this rank's shard begins in the flattened parameter."""
        if (
            flat.dtype == torch.float32 or shard.frozen
        ):  # the master weights are the parameter's own memory, or nobody needs any
            master = _region(flat, self.first, shard)
        else:
            master = torch.empty(shard.slice.shape, dtype=torch.float32, device=flat.device)
        self.owned = OwnedParam(param.name, nn.Parameter(master, requires_grad=False), shard)
        if group.size == 1 and master.dtype != flat.dtype:
            self.owned.weight = param.parameter.detach()
        self.sum: Tensor | None = None
        """Of the gradients of the step's earlier micro-batches, in fp32."""
        full = len(flat) // max(self.room, 1)
        self.targets = [flat[: full * self.room].view(full, self.room), flat[full * self.room :]]
        """Views of the parameter: one row per full shard, and the last shard if it is shorter."""

    def sources(self, table: Tensor) -> list[Tensor]:
        """The values for `targets`, from a bucket with one row per rank."""
        rows, rest = len(self.targets[0]), len(self.targets[1])
        full = [table[:rows, self.offset : self.offset + self.room]]
        return [*full, table[rows, self.offset : self.offset + rest]] if rest else full

    def shard_of(self, part: Tensor) -> Tensor:
        """This rank's shard, from its part of a bucket."""
        return _region(part, self.offset, self.owned.shard)

    def gradient(self, count: int) -> Tensor:
        """The whole parameter's gradient, shaped so that dividing its first dimension by `count` gives the shards."""
        gradient = self.complete()
        if gradient is None:
            gradient = torch.zeros_like(self.parameter)
        return gradient.view(count, -1) if count * self.room == gradient.numel() else gradient

    def complete(self) -> Tensor | None:
        """The sum of all micro-batches; None if no backward has reached the parameter."""
        gradient = self.parameter.grad
        if self.sum is not None:
            self.set_aside()
            return self.sum
        if gradient is not None and not gradient.is_contiguous():  # a split backward may produce any layout
            gradient = self.parameter.grad = gradient.contiguous()
        return gradient

    def set_aside(self) -> None:
        """Add the gradient of a micro-batch to the sum."""
        if (gradient := self.parameter.grad) is not None:
            self.sum = (
                gradient.to(torch.float32, memory_format=torch.contiguous_format)
                if self.sum is None
                else self.sum.add_(gradient)
            )
            self.parameter.grad = None


class ShardBucket:
    """Parameters of which every rank owns a shard (ZeRO-1 and 2)."""

    def __init__(
        self, params: Sequence[ModelParam], group: Group, replicas: Group, *, keep_gradients: bool, fp32_sums: bool = False
    ):
        """`keep_gradients`: whole gradients stay until the end of the step (ZeRO-1) instead of being sent after every backward.
        `fp32_sums`: micro-batches add up in fp32, whatever dtype their gradients have."""
        self.group, self.replicas, self.part, self.shared = group, replicas, params[0].part, params[0].shared
        self.trained, self.expert = params[0].parameter.requires_grad, params[0].shard.expert
        self.label = ""
        """Names it in a timeline."""
        self.once = keep_gradients or group.size == 1
        """Whether it is sent once per step."""
        self.slots: list[_Slot] = []
        self.width = 0
        """Elements of each rank's part."""
        for param in params:
            self.slots.append(_Slot(param, group, self.width))
            self.width += self.slots[-1].room
        self.owned = [slot.owned for slot in self.slots]
        self.parameters = [slot.parameter for slot in self.slots]
        self.alone = self.width == 0 or (group.size == 1 and replicas.size == 1)
        """Whether no other rank holds any of it."""
        self._fp32_sums = fp32_sums and params[0].parameter.dtype != torch.float32
        is_value = params[0].parameter.dtype == torch.float32 or params[0].shard.frozen
        self.in_place = self.width == 0 or (group.size == 1 and is_value)
        """Whether the owned values are the model's parameters."""
        self.missing = 0
        """Gradients that this backward has not produced yet."""
        self._total: Tensor | None = None
        """ZeRO-2: this rank's part of the gradients, summed over the micro-batches so far."""

    @property
    def touched(self) -> bool:
        """Whether a backward has added to its gradients since they were last sent."""
        return any(slot.parameter.grad is not None or slot.sum is not None for slot in self.slots)

    def reset(self) -> None:
        self._total = None
        for slot in self.slots:
            slot.parameter.grad = slot.owned.gradient = slot.owned.value.grad = slot.sum = None

    def gradient_ready(self, index: int, last: bool) -> None:
        """Gradients stay where the backward put them; those of all but the last micro-batch are set aside if sums are kept in fp32."""
        if self._fp32_sums and not last:
            self.slots[index].set_aside()

    def end_backward(self) -> None:
        """The two halves of a split backward do not call hooks: set aside what they have added."""
        if self._fp32_sums:
            for slot in self.slots:
                slot.set_aside()

    def end_micro_batch(self, merges: int, set_aside: bool) -> None:
        """The backward adds micro-batches in place."""

    def packed(self, dtype: torch.dtype) -> Tensor:
        """The gradients in rank order, as they are sent. ZeRO-2 frees them."""
        gradients = [slot.gradient(self.group.size) for slot in self.slots if slot.room]
        table = torch.empty(self.group.size, self.width, dtype=dtype, device=gradients[0].device)
        torch._chunk_cat(gradients, dim=0, num_chunks=self.group.size, out=table)
        if not self.once:
            for parameter in self.parameters:
                parameter.grad = None
        return table.view(-1)

    def accumulate(self, part: Tensor) -> None:
        """ZeRO-2: add this rank's part of one micro-batch's gradients."""
        if self._total is None:
            self._total = part.to(self.parameters[0].dtype)
        else:
            self._total += part

    def accumulated(self, dtype: torch.dtype) -> Tensor:
        """ZeRO-2: this rank's part, as it is sent to the other replicas."""
        if self._total is None:  # the step was abandoned before any gradient arrived
            first = self.parameters[0]
            self._total = torch.zeros(self.width, dtype=first.dtype, device=first.device)
        return self._total if self.replicas.size == 1 else self._total.to(dtype)

    def deliver(self, part: Tensor) -> None:
        """Take the complete gradients of this rank's shards."""
        if self._total is not None:
            if part is not self._total:
                self._total.copy_(part)
            for slot in self.slots:
                slot.owned.gradient = slot.shard_of(self._total)
            return
        for slot in self.slots:
            if (gradient := slot.complete()) is None:
                slot.owned.gradient = slot.shard_of(part).to(slot.parameter.dtype)
            else:
                slot.owned.gradient = _region(gradient.view(-1), slot.first, slot.owned.shard)
                slot.owned.gradient.copy_(slot.shard_of(part))

    def deliver_local(self) -> None:
        """Take the gradients where no other rank holds any of them."""
        for slot in self.slots:
            gradient = slot.complete()
            slot.owned.gradient = torch.zeros_like(slot.parameter) if gradient is None else gradient

    def write_weights(self, all_of_them: bool) -> None:
        """Write the new values into the parameters, of which this rank has all rows; or only those that the optimizer did not write."""
        stale = [
            (o.weight, o.value.detach()) for o in self.owned if o.weight is not None and (all_of_them or not o.weight_written)
        ]
        if stale:
            torch._foreach_copy_([weight for weight, _ in stale], [value for _, value in stale])
        for owned in self.owned:
            owned.weight_written = False

    def own_values(self) -> Tensor:
        """This rank's part of the new values."""
        first = self.parameters[0]
        part = torch.empty(self.width, dtype=first.dtype, device=first.device)
        torch._foreach_copy_([slot.shard_of(part) for slot in self.slots], [slot.owned.value.detach() for slot in self.slots])
        return part

    def write_values(self, gathered: Tensor) -> None:
        """Write the new values of all ranks into the parameters."""
        table = gathered.view(self.group.size, self.width)
        targets, sources = [], []
        for slot in self.slots:
            own = slot.sources(table)
            sources += own
            targets += slot.targets[: len(own)]
        torch._foreach_copy_(targets, sources)


Bucket = FlatBucket | ShardBucket


def _region(flat: Tensor, first: int, shard: ParamShard) -> Tensor:
    """The shard that begins at `first` in a flat tensor."""
    return flat[first : first + shard.slice.numel].view(shard.slice.shape)
