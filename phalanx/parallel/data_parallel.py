"""Data parallelism with ZeRO-0, 1 and 2: sums the gradients of all replicas in buckets while the backward runs. `parallel/apply` builds it,
and `parallel/fsdp` for parameters that FSDP2 does not shard.

Buckets are fixed. torch's DistributedDataParallel regroups its buckets after the first step, so a resumed run would add in another
order than an uninterrupted one. On CPU, ZeRO-0 adds the micro-batches of the global batch in the order of a binary tree:
1, 2, 4 or 8 ranks produce the same bits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.observe.comm_timer import began, wait
from phalanx.parallel.buckets import Bucket, FlatBucket, ModelParam, ShardBucket, flat_bundles, model_params, shard_bundles
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import Engine, OwnedParam, ParamShard, Recipe, replace_parameter
from phalanx.spec.cut_plan import Axes, dim_names
from phalanx.spec.errors import RunError

_IN_FLIGHT = 2
"""Temporary buffers in communication at the same time. More would not hide more latency, and each takes memory."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a replica's state is divided over the ranks of `layout.shard`."""

    zero: int = 0
    """0: not at all (DDP); 1: optimizer states and master weights; 2: gradients too; 3: parameters too (`parallel/fsdp`)."""
    axes: tuple[str, ...]
    """Mesh axes whose ranks see different samples, or parts of samples, and sum their gradients in every step; "shard" among them."""
    compute: str = "fp32"
    """As in the plan. fp8 keeps its weights in bf16."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype of gradients in communication."""
    keep_gathered: bool = False
    """ZeRO-3: gathered parameters stay until the end of the step, as schedules with split backwards need."""
    fp8_gather: bool = False
    """ZeRO-3: weights that are multiplied in fp8 are gathered in it."""
    masters: bool = False
    """ZeRO-0: the model's matrices are in the format of `compute`, next to master weights in fp32. Otherwise they are the master weights."""
    residual: torch.dtype = torch.float32
    """Dtype of the residual stream."""
    bucket_bytes: int | None = None
    """Bytes of a bucket as it is sent; None: the default of `parallel/buckets`."""
    own_groups: bool = False
    """Whether it works next to another engine, on process groups of its own, because their messages may interleave."""

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the model's matrices."""
        return _DTYPES[self.compute] if self.zero or self.masters else torch.float32

    @property
    def low_precision(self) -> bool:
        return self.param_dtype != torch.float32

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Dtype of frozen matrices, of which nobody needs master weights."""
        return _DTYPES[self.compute]

    def groups(self, mesh: Mesh, *, expert: bool = False) -> tuple[Group, Group]:
        """(ranks that own the other shards, ranks that own the same shard) of dense parameters, or of routed experts."""
        kind, suffix = "experts' " if expert else "", " (whole)" if self.own_groups else ""
        axes = ("expert_replicate", "expert_shard") if expert else self.axes
        divided = tuple(axis for axis in axes if self.zero and axis in ("shard", "expert_shard"))
        replicas = tuple(axis for axis in axes if axis not in divided)
        return mesh.group(*divided, use=f"{kind}shard{suffix}"), mesh.group(*replicas, use=f"{kind}data{suffix}")


def build(
    parts: list[nn.Module], shards: dict[str, ParamShard], mesh: Mesh, recipe: Recipe, sharding: Sharding
) -> DataParallel:
    """Allocate and initialize the stages of a model that has no memory yet, and return its engine."""
    if sharding.zero:
        check_shardable(shards)
    lower_precision(parts, shards, recipe.axes, sharding)
    allocate(parts, recipe, mesh.device)
    return DataParallel(model_params(parts, shards), mesh, recipe.fill, sharding)


class DataParallel(Engine):
    """The engine: sums each parameter's gradient on the rank that owns it, and distributes the values that the owner computes."""

    def __init__(
        self, params: Sequence[ModelParam], mesh: Mesh, fill: Callable[[str, Tensor, ParamShard], None], sharding: Sharding
    ):
        """Writes the initial values. All ranks call it at the same time."""
        self._params, self._sharding = list(params), sharding
        groups = {expert: sharding.groups(mesh, expert=expert) for expert in sorted({p.shard.expert for p in params})}
        flat = sharding.zero == 0 and not sharding.low_precision
        self._tree = tree = flat and not accelerator.of(mesh.device).asynchronous
        self.buckets: list[Bucket]
        # The backward reaches the last layers first, so they are in the first bucket.
        if flat:
            trained = [param for param in params if param.parameter.requires_grad]
            bundles = flat_bundles(trained[::-1], sharding.bucket_bytes)
            self.buckets = [FlatBucket(bundle, *groups[bundle[0].shard.expert]) for bundle in bundles]
        else:
            bundles = shard_bundles(params[::-1], sharding.reduce_dtype.itemsize, sharding.bucket_bytes)
            keep, in_fp32 = sharding.zero <= 1, sharding.zero == 0
            self.buckets = [
                ShardBucket(bundle, *groups[bundle[0].shard.expert], keep_gradients=keep, fp32_sums=in_fp32)
                for bundle in bundles
            ]
        for number, bucket in enumerate(self.buckets):
            bucket.label = f"bucket {number}"
        # By `ParamShard.expert`: groups to sum over, one after the other.
        self._sums: dict[bool, list[tuple[Group, _InFlight]]] = {}
        for expert, (_, replicas) in groups.items():
            in_pairs = tree and replicas.size > 2 and replicas.size.bit_count() == 1  # two terms have one order
            stages = _pair_groups(replicas, mesh) if in_pairs else [replicas]
            self._sums[expert] = [(group, _InFlight(_IN_FLIGHT if sharding.zero else None)) for group in stages]
        in_buckets = {owned.name: owned for bucket in self.buckets for owned in bucket.owned}
        self.owned = [in_buckets.get(p.name) or OwnedParam(p.name, p.parameter, p.shard) for p in params]
        self._trained = [bucket for bucket in self.buckets if bucket.trained]
        sharded = [bucket for bucket in self.buckets if isinstance(bucket, ShardBucket)]
        self._gathered = [bucket for bucket in sharded if not bucket.in_place]
        self._every_backward = [bucket for bucket in sharded if bucket.trained and not bucket.once and not bucket.alone]
        self._scatters = _InFlight()
        self._line: Sequence[Bucket] = []  # buckets that are sent during this backward, in order
        self._next = self._count = self._begun = 0
        self._order: list[tuple[int, bool]] = []  # what buckets do between two micro-batches: see `end_micro_batch`
        self._pipelined, self._finished = False, True
        for number, bucket in enumerate(self._trained):
            for index, parameter in enumerate(bucket.parameters):
                _on_gradient(parameter, self._gradient_ready, number, index)
        for owned in self.owned:
            fill(owned.name, owned.value.data, owned.shard)
        self.updated()

    def begin(self, micro_batches: int, pipelined: bool = False) -> None:
        self._drain()  # nothing is in flight, unless the last step failed
        self._count, self._begun, self._pipelined, self._finished = micro_batches, 0, pipelined, False
        self._order = _tree_order(micro_batches) if self._tree else [(0, False)] * (micro_batches - 1)
        for bucket in self.buckets:
            bucket.reset()
        self._line_up()

    def after_backward(self, part: int | None = None) -> None:
        if self._pipelined:  # backwards come in any order and do not announce all gradients
            for bucket in self._trained:
                if isinstance(bucket, ShardBucket) and (part is None or bucket.part == part or bucket.shared):
                    bucket.end_backward()
            for bucket in self._every_backward:
                if part is None or bucket.part == part:
                    self._launch(bucket)
        else:
            self._complete_line()

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._pipelined:
            for bucket in self._trained:
                if bucket.once or bucket.shared or bucket.touched:
                    self._launch(bucket)
        else:
            while self._begun < self._count:
                self._complete_line()
        self._drain()
        for bucket in self._every_backward:
            self._sum(bucket, bucket.accumulated(self._sharding.reduce_dtype))
        self._drain()

    @torch.no_grad()
    def updated(self, *, stepped: bool = False) -> None:
        gathers = _InFlight()
        for bucket in self._gathered:
            if stepped and not bucket.trained:
                continue
            if bucket.group.size == 1:
                bucket.write_weights(all_of_them=not stepped)
                continue
            part = bucket.own_values()
            whole = part.new_empty(bucket.group.size * bucket.width)
            work = bucket.group.start_all_gather(whole, part)
            gathers.add(work, bucket.group, part, "all_gather", partial(bucket.write_values, whole), bucket.label)
        gathers.drain()

    def bytes(self) -> dict[str, int]:
        parameters = [param.parameter for param in self._params]
        return {
            "parameters": storage_bytes([*parameters, *(owned.value for owned in self.owned)]),
            "gradients": storage_bytes([*(p.grad for p in parameters), *(owned.gradient for owned in self.owned)]),
        }

    def applied(self) -> str:
        dtypes = " and ".join(dict.fromkeys(str(p.parameter.dtype).removeprefix("torch.") for p in self._params))
        if self._sharding.zero == 0:
            ranks = max((bucket.replicas.size for bucket in self.buckets), default=1)
            elements = sum(parameter.numel() for bucket in self._trained for parameter in bucket.parameters)
            masters = f"; parameters in {dtypes}, master weights in float32" if self._sharding.low_precision else ""
            return f"{len(self.buckets)} buckets of {elements:,} gradients in all, summed over {ranks} ranks{masters}"
        param, largest = max(zip(self._params, self.owned, strict=True), key=lambda pair: pair[0].parameter.numel())
        own, total = sum(owned.value.numel() for owned in self.owned), sum(p.parameter.numel() for p in self._params)
        gradients = "their gradients too" if self._every_backward else "gradients whole"
        example = describe(largest, param.parameter.shape)
        return (
            f"optimizer state of {own:,} of {total:,} elements, {gradients}, parameters whole in {dtypes}; {example}, "
            f"among {self.buckets[0].group.size} ranks"
        )

    def _line_up(self) -> None:
        self._line = self._trained if self._begun == self._count - 1 else self._every_backward
        self._next = 0
        for bucket in self._line:
            bucket.missing = len(bucket.parameters)

    def _gradient_ready(self, number: int, index: int) -> None:
        if self._finished:
            return
        bucket = self._trained[number]
        bucket.gradient_ready(index, last=not self._pipelined and self._begun == self._count - 1)
        if self._pipelined:
            return
        bucket.missing -= 1
        # All ranks must send in the same order, whatever order their gradients become ready in.
        while self._next < len(self._line) and self._line[self._next].missing == 0:
            self._launch(self._line[self._next])
            self._next += 1

    def _complete_line(self) -> None:
        """Send the buckets that this backward did not fill: a parameter that it did not reach has no gradient."""
        for bucket in self._line[self._next :]:
            self._launch(bucket)
        self._begun += 1
        if self._begun < self._count:
            for bucket in self.buckets:
                bucket.end_micro_batch(*self._order[self._begun - 1])
        self._line_up()

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        if isinstance(bucket, ShardBucket) and bucket.alone:
            bucket.deliver_local()
            return
        whole = bucket.packed(self._sharding.reduce_dtype)
        if isinstance(bucket, FlatBucket) or bucket.group.size == 1:
            self._sum(bucket, whole)
            return
        part = whole.new_empty(bucket.width)
        # Sums over replicas have a fixed place among the other messages: the ranks' orders never differ.
        then = partial(self._sum, bucket, part) if bucket.once else partial(bucket.accumulate, part)
        work = bucket.group.start_reduce_scatter(part, whole)
        self._scatters.add(work, bucket.group, whole, "reduce_scatter", then, bucket.label)

    def _sum(self, bucket: Bucket, tensor: Tensor, stage: int = 0) -> None:
        """Sum over the bucket's replicas in place, in the background, and deliver the result to the bucket."""
        stages = self._sums[bucket.expert]
        if stage == len(stages):
            bucket.deliver(tensor)
            return
        group, in_flight = stages[stage]
        then = partial(self._sum, bucket, tensor, stage + 1)
        in_flight.add(group.start_all_reduce(tensor), group, tensor, "all_reduce", then, bucket.label)
        if stage == 0:
            for _, earlier in stages[:-1]:  # what has passed a group enters the next while the backward goes on
                earlier.poll()

    def _drain(self) -> None:
        self._scatters.drain()
        for stages in self._sums.values():
            for _, in_flight in stages:
                in_flight.drain()


class _InFlight:
    """Collectives in the background. They complete in the order of their start, each followed by its continuation."""

    def __init__(self, limit: int | None = _IN_FLIGHT):
        """`limit`: how many may be in flight; None where they use persistent buffers."""
        self._limit = limit
        self._pending: deque[tuple[dist.Work | None, Group, Tensor, str, Callable[[], None]]] = deque()

    def add(
        self, work: dist.Work | None, group: Group, source: Tensor, operation: str, then: Callable[[], None], label: str
    ) -> None:
        """`work`: begun just now; None where the group is one rank. `source`: what is sent, which must live until then. `then` is called at
        some later `add`, `poll` or `drain`. `label`: names the tensor in a timeline."""
        began(work, group.handle, operation, label)
        self._pending.append((work, group, source, operation, then))
        while self._limit is not None and len(self._pending) > self._limit:
            self._complete_first()

    def poll(self) -> None:
        """Continue with what is complete, without waiting."""
        while self._pending and ((work := self._pending[0][0]) is None or work.is_completed()):
            self._complete_first()

    def drain(self) -> None:
        while self._pending:
            self._complete_first()

    @torch.no_grad()
    def _complete_first(self) -> None:
        work, group, _, operation, then = self._pending.popleft()
        if work is not None:
            wait(work, group, operation=operation)
        then()


def _pair_groups(group: Group, mesh: Mesh) -> list[Group]:
    """Groups of this rank and the rank at distance 1, 2, 4, …: sums over one after the other add 2^n ranks as (0+1)+(2+3).

    One collective over all ranks adds in a ring, in an order that depends on the number of ranks and on the place in the buffer; two
    ranks have only one order. Tensors pass each group in the same order, so both ranks of a pair always send the same bucket.
    """
    distances = [1 << stage for stage in range(group.size.bit_length() - 1)]
    pairs = [sorted((group.index, group.index ^ distance)) for distance in distances]
    return [mesh.group_of((group.ranks[a], group.ranks[b]), use=group.use) for a, b in pairs]


def _tree_order(count: int) -> list[tuple[int, bool]]:
    """Adds a rank's micro-batches in the order in which more ranks would: one half plus the other half, recursively. Between any two
    of them: how many partial sums are complete, and whether the next micro-batch begins one of its own.

    It costs a copy of the gradients per level of the tree. A half of one micro-batch is added in place.
    """
    if count == 1:
        return []
    left, right = count - count // 2, count // 2
    complete = max(0, left.bit_length() - 2)  # right halves of more than one micro-batch that end where the left half does
    return [*_tree_order(left), (complete, right > 1), *_tree_order(right)]


def _on_gradient(parameter: Tensor, ready: Callable[[int, int], None], *numbers: int) -> None:
    """Call the method `ready` with these numbers whenever a backward has accumulated the parameter's gradient.

    The hook does not keep the method's object alive. The garbage collector does not see into a tensor's hooks, so an object that
    holds the parameter and is held by its hook would never be freed, nor would its weights and connections.
    """
    method = weakref.WeakMethod(ready)

    def hook(_: Tensor) -> None:
        if (alive := method()) is not None:
            alive(*numbers)

    parameter.register_post_accumulate_grad_hook(hook)


# Shared with `parallel/fsdp`.


def check_shardable(shards: Mapping[str, ParamShard]) -> None:
    """Refuse parameters that have no rows to divide."""
    problems = [
        f"layout.shard cannot share the parameter {name}, a single number without dimensions: give it the shape [1], or leave "
        "layout.shard at 1."
        for name, shard in shards.items()
        if not shard.slice.shape
    ]
    if problems:
        raise RunError(problems)


def stays_fp32(name: str, shard: ParamShard, axes: Axes) -> bool:
    """Whether it is a norm, a bias or a router: small parameters whose rounding would show."""
    return len(shard.slice.shape) < 2 or "route" in dim_names(name, axes)


def lower_precision(parts: Sequence[nn.Module], shards: Mapping[str, ParamShard], axes: Axes, sharding: Sharding) -> None:
    """Change the dtype of those of these parameters that need not stay in fp32; they have no memory yet."""
    residual = sharding.residual
    lowers_frozen = sharding.frozen_dtype != torch.float32 and any(shard.frozen for shard in shards.values())
    if sharding.low_precision or lowers_frozen or residual != torch.float32:
        for module in dict.fromkeys(module for part in parts for module in part.modules()):
            if isinstance(module, nn.Embedding):  # where the residual stream begins
                module.register_forward_hook(lambda module, args, output: output.to(residual))
    if not sharding.low_precision and not lowers_frozen:
        return
    for part in parts:
        for name, old in list(part.named_parameters()):
            if name not in shards or stays_fp32(name, shards[name], axes):
                continue
            dtype = sharding.frozen_dtype if shards[name].frozen else sharding.param_dtype
            if old.dtype != dtype:
                owner, _, leaf = name.rpartition(".")
                replace_parameter(part.get_submodule(owner), leaf, tuple(old.shape), dtype)


@torch.no_grad()
def allocate(parts: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> None:
    """Allocate parameters and buffers and initialize the buffers; the owners initialize the parameters."""
    for part in parts:
        if any(type(tensor.data) is not Tensor for tensor in (*part.parameters(), *part.buffers())):  # DTensors of FSDP2
            part.to_empty(device=device)
        else:
            # The same for plain tensors, but `to_empty` imports sympy, which takes half a second.
            part._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device))
    for part in parts:  # not before: stages may share a module
        recipe.reset_buffers(part)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Memory of all these tensors; shared storage counts once."""
    storages = {storage._cdata: storage.nbytes() for t in tensors if t is not None for storage in [t.untyped_storage()]}
    return sum(storages.values())


def describe(owned: OwnedParam, whole: Sequence[int]) -> str:
    """An example of what was done: "blocks.0.mlp.up.weight: 32 of 64 rows"."""
    local = owned.value.shape
    dim = next((dim for dim, length in enumerate(local) if length != whole[dim]), 0)
    kind = "rows of each" if dim else "experts" if owned.shard.expert else "rows"
    return f"{owned.name}: {local[dim]} of {whole[dim]} {kind}"
