"""A model placed on the ranks: what this rank holds of each parameter, the gradients that its backward fills and the ranks share.
`parallel/apply` makes it from whole parameters, which every technique cuts further; training, optimizers, checkpoints and verification
read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from phalanx.parallel.group import Group
from phalanx.parallel.mesh import AXES, Mesh
from phalanx.schedules.actions import Schedule
from phalanx.spec.cut_plan import Axes, CutPlan
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.transforms.lora import Adapters
from phalanx.transforms.quantize import QuantizedTensor


@dataclass(frozen=True, slots=True)
class ParamShard:
    """This rank's shard of a parameter or of its optimizer state: which slice it is, and how the ranks share the parameter."""

    slice: TensorSlice
    split: tuple[str, ...] = ()
    """Mesh axes whose ranks hold other slices."""
    partial: tuple[str, ...] = ()
    """Mesh axes, other than those of data parallelism, over which gradients must be summed."""
    expert: bool = False
    """Whether it belongs to routed experts, which have mesh axes of their own."""
    counted: bool = True
    """False for the second copy of a tied embedding: sums over all parameters skip it."""
    frozen: bool = False
    """Whether it belongs to the frozen model below LoRA adapters: it has no gradient, no optimizer state and no master weights, and
    checkpoints do not contain it."""

    @classmethod
    def full(cls, tensor: Tensor, *, frozen: bool = False) -> Self:
        return cls(TensorSlice.full(tensor.shape), frozen=frozen)

    def cut(self, dim: int, index: int, count: int, axis: str, segments: Sequence[int] | None = None) -> Self:
        """The index-th of `count` chunks along `dim`, divided over a mesh axis; of a fused dimension, the index-th of each segment. Trailing
        chunks may be shorter or empty."""
        fused = segments is not None and len(segments) > 1
        part = self.slice.cut_segments(dim, segments, index, count) if fused and segments else self.slice.cut(dim, index, count)
        return replace(self, slice=part, split=(*self.split, axis))


@dataclass(slots=True)
class OwnedParam:
    """A tensor that this rank's optimizer updates: its shard of one parameter, in full precision. A frozen one, in any precision, is
    not updated."""

    name: str
    value: nn.Parameter
    """A plain tensor on the device, never a DTensor. It may share memory with the model's parameter."""
    shard: ParamShard
    gradient: Tensor | None = None
    """Has the same shape; complete after `ShardedModel.finish`. May have a lower precision."""
    weight: Tensor | None = None
    """The model's parameter, if it is a copy of the whole value in lower precision, so that an optimizer can write both at once."""
    weight_written: bool = False
    """An optimizer sets it when it has; `Engine.updated` clears it."""


def extract(part: TensorSlice, whole: Tensor) -> Tensor:
    """The local tensor of a slice, read from the whole tensor: a view if the slice is one box."""
    boxes = [whole[box.index] for box in part.boxes]
    return boxes[0] if len(boxes) == 1 else torch.cat(boxes, part.dim)


def replace_parameter(module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Change the shape or dtype of a parameter that has no memory yet."""
    old = module.get_parameter(name)
    assert old.is_meta, f"{name} has memory already: change it first"
    new = nn.Parameter(torch.empty(shape, dtype=dtype or old.dtype, device="meta"), requires_grad=old.requires_grad)
    module.register_parameter(name, new)


class Engine(Protocol):
    """Sums gradients over the ranks that see different samples, and holds what each rank owns."""

    owned: list[OwnedParam]

    def applied(self) -> str:
        """What was done, read from the tensors."""

    def bytes(self) -> dict[str, int]:
        """Memory that this rank holds: "parameters" and "gradients"."""

    def begin(self, micro_batches: int, pipelined: bool = False) -> None:
        """Start a step of this many backwards, of whole models or, pipelined, of stages in any order."""

    def after_backward(self, part: int | None = None) -> None:
        """Call after each micro-batch's backward; in a pipeline after each of a part's."""

    def finish(self) -> None:
        """Wait until every `OwnedParam.gradient` is complete. A rank that abandons a step calls it too."""

    def updated(self, *, stepped: bool = False) -> None:
        """Bring the model's parameters up to date after the owned values changed. `stepped`: by nothing but a step of the optimizer, which
        may have written `OwnedParam.weight` already."""

    def waits(self) -> list[tuple[Any, str]]:
        """Methods, as (object, name), in which the engine waits for other ranks outside of `observe/comm_timer`."""
        return []


Fill = Callable[[str, Tensor, ParamShard], None]
"""Writes the initial values of a parameter's shard into a tensor."""
Rewrite = Callable[[nn.Module, int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Callable[..., Any]]
"""Makes the forward that runs in place of a module's own, from the module, the rank's index, and what enters and leaves a region."""
Loss = Callable[[Any, Tensor], Tensor]
"""Sum of the losses of all targets, from what the model returned."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `parallel/apply` has to know about a model; the model's own room provides it."""

    axes: Axes
    """Names of dimensions; tensor parallelism reads them where there are no `cuts`."""
    fill: Fill
    reset_buffers: Callable[[nn.Module], None]
    loss: Loss
    """Sum of the losses from whole logits."""
    schedule: Schedule | None = None
    """Of a pipeline."""
    tied: str | None = None
    """The parameter that first and last stage both hold, where the embedding is the head too."""
    cuts: CutPlan | None = None
    """Tensor parallelism of a module that was not written for it."""
    rewritten: Mapping[str, Rewrite] = field(default_factory=dict)
    """Of the modules that `cuts.rewritten` names."""


@dataclass(slots=True)
class ShardedModel:
    """This rank's share of the model."""

    parts: list[nn.Module]
    """Its pipeline stages in order; one whole model without a pipeline."""
    mesh: Mesh
    engine: Engine
    loss: Loss
    applied: dict[str, str] = field(default_factory=dict)
    """What was done, by technique, in words read from the tensors and modules."""
    residual: torch.dtype = torch.float32
    """Dtype of the residual stream."""
    tied: dict[str, Group] = field(default_factory=dict)
    """Parameters of which two stages hold a copy, and the ranks that do."""
    adapters: Adapters | None = None
    """Of LoRA."""
    quantized: dict[str, QuantizedTensor] = field(default_factory=dict)
    """Frozen matrices below the adapters that are stored in 8 or 4 bits, by parameter name."""
    is_local_sgd: bool = False
    """Whether replicas take steps of their own and synchronize every few steps (DiLoCo)."""
    graphed: bool = False
    """Whether forward and backward of a micro-batch are replayed as CUDA graphs."""
    step_group: Group = field(init=False)
    """The ranks that take a step together."""
    _partial: dict[tuple[str, ...], Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        together = tuple(axis for axis in AXES if axis != "data" or not self.is_local_sgd)
        self.step_group = self.mesh.group(*together, use="step")
        for axes in dict.fromkeys(owned.shard.partial for owned in self.owned if owned.shard.partial):
            self._partial[axes] = self.mesh.group(*axes, use="tensor")  # now, when all ranks make theirs

    @property
    def owned(self) -> list[OwnedParam]:
        return self.engine.owned

    @property
    def trained(self) -> list[OwnedParam]:
        """Without the frozen model below LoRA adapters."""
        return [owned for owned in self.owned if not owned.shard.frozen]

    @property
    def lockstep(self) -> bool:
        """Whether ranks need each other within a forward or backward: then none may skip a step."""
        layout = self.mesh.layout
        return layout.ranks > (layout.data or 1) or layout.expert * layout.expert_tensor > 1

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports the loss: one of the ranks of the last stage that compute the same."""
        return self.mesh.coordinate("tensor") == 0 and any(getattr(part, "is_last_stage", True) for part in self.parts)

    def finish(self) -> None:
        """Complete every gradient: over the samples, over the ranks that saw parts of them, over the copies of a tied embedding."""
        self.engine.finish()
        for axes, group in self._partial.items():
            _sum_together([o.gradient for o in self.owned if o.shard.partial == axes and o.gradient is not None], group)
        for owned in self.owned:
            if owned.name in self.tied and owned.gradient is not None:
                self.tied[owned.name].all_reduce(owned.gradient)

    def norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, in fp32 on the device, the same on all ranks."""
        terms: dict[float, list[Tensor]] = {}
        for owned in self.owned:
            if owned.gradient is not None and owned.shard.counted and owned.gradient.numel():
                terms.setdefault(1 / self.copies(owned.shard), []).append(owned.gradient)
        if list(terms) == [1 / self.step_group.size]:
            # Every rank has all gradients: no communication, and the same bits for any number of ranks.
            return torch.linalg.vector_norm(_norms(next(iter(terms.values()))))
        square = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for share, gradients in terms.items():
            square += _norms(gradients).double().square().sum() * share
        return self.step_group.all_reduce(square).sqrt().float()

    def copies(self, shard: ParamShard) -> int:
        """How many ranks of this stage, of those that take a step together, hold the same slice."""
        return self.step_group.size // self.mesh.layout.pipeline // math.prod(self.mesh.size(axis) for axis in shard.split)


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of each, in fp32. torch has one kernel for many tensors of the same dtype, and one each where dtypes are mixed."""
    alike = [
        [gradient for gradient in gradients if gradient.dtype == dtype] for dtype in dict.fromkeys(g.dtype for g in gradients)
    ]
    return torch.stack([norm for group in alike for norm in torch._foreach_norm(group, 2, torch.float32)])


def _sum_together(gradients: list[Tensor], group: Group) -> None:
    """Sum over the group, in place, with one message per dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = group.all_reduce(torch.cat([gradient.flatten() for gradient in alike]))
        for gradient, total in zip(alike, flat.split([gradient.numel() for gradient in alike]), strict=True):
            gradient.copy_(total.view_as(gradient))
