"""The loss of a big vocabulary: from logits of which each tensor rank has some columns, or of a few tokens at a time, or both. So no
rank ever has all logits. `parallel/apply` calls `swap`.

With chunks the model returns its last states and the head's weight in place of logits, and the forward computes loss and gradients
chunk by chunk. It reads the weight after the model's forward: what shards weights must not have freed the head's by then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from phalanx.kernels.cross_entropy import ELSEWHERE, IGNORED, cross_entropy_, log_sum_exp, softmax_gradient_
from phalanx.kernels.scaled import scaled
from phalanx.parallel.group import Group
from phalanx.parallel.sharded_model import Loss
from phalanx.parallel.tensor import CopyToTP, computed
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_slice import chunk as share_of

_ALIGN = 64
"""Columns of logits in multiples of which 16-bit products are fast."""

# Shapes: N tokens (B · S, or a chunk of them), V this rank's columns of the logits.


@dataclass(frozen=True, eq=False, slots=True)
class Projected:
    """In place of logits: the factors of their product."""

    x_BSD: Tensor
    weight_VD: Tensor
    cap: float | None = None
    """Soft cap of the logits; None: none."""


# Wrappers of modules look for tensors in what a forward returns, to learn from their gradients that the backward has begun.
# The states serve them; the weight must stay hidden, as it outlives the step and would gather their hooks.
pytree.register_pytree_node(
    Projected,
    lambda node: ([node.x_BSD], (node.weight_VD, node.cap)),
    lambda children, rest: Projected(next(iter(children)), *rest),
)


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """This rank's columns of the logits."""

    first: int
    group: Group
    """The ranks that have the others, and this one."""

    @property
    def all_of_them(self) -> Share:
        """In its place where this rank has all columns."""
        return Share(0, replace(self.group, ranks=(self.group.ranks[self.group.index],), index=0, handle=None))

    def losses(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each token, 0 where it is ignored, and the logarithm of the sum of all its exponentials."""
        whole_N, target_N = log_sum_exp(logits_NV, self.columns(targets_N, logits_NV.shape[1]))
        if self.group.size > 1:
            # Two numbers per token and rank, in one message, added in the same order on all.
            both_R2N = self.group.all_gather(torch.stack((whole_N, target_N))).unflatten(0, (-1, 2))
            whole_N, target_N = both_R2N[:, 0].logsumexp(0), both_R2N[:, 1].sum(0)
        return (whole_N - target_N).masked_fill(targets_N == IGNORED, 0.0), whole_N

    def losses_and_gradient_(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """Loss of each token. The gradient of their sum takes the place of the logits."""
        columns_N = self.columns(targets_N, logits_NV.shape[1])
        if self.group.size > 1:
            losses_N, whole_N = self.losses(logits_NV, targets_N)
            softmax_gradient_(logits_NV, columns_N, whole_N)
            return losses_N
        whole_N, target_N = cross_entropy_(logits_NV, columns_N)
        return (whole_N - target_N).masked_fill(targets_N == IGNORED, 0.0)

    def columns(self, targets_N: Tensor, width: int) -> Tensor:
        """The column of each target on this rank; ELSEWHERE or IGNORED."""
        local_N = targets_N - self.first
        columns_N = local_N.masked_fill((local_N < 0) | (local_N >= width), ELSEWHERE)
        return columns_N.masked_fill(targets_N == IGNORED, IGNORED)


@dataclass(frozen=True, eq=False)
class Project:
    """The model's `project`: into the region where each rank has its own columns, and, without chunks, the product."""

    enter: CopyToTP
    chunked: bool
    rows: int
    """Of the whole vocabulary. A rank that holds all of them computes all logits, as the others do, and sums no gradients with them."""
    cap: float | None = None
    """Soft cap of the logits; None: none."""

    def __call__(self, x_BSD: Tensor, weight_VD: Tensor, /) -> Any:
        if self.enter.group.size > 1:
            if len(weight_VD) != self.rows:
                x_BSD = self.enter.enter(x_BSD)
            elif self.enter.sliced:
                x_BSD = self.enter.group.join(x_BSD, 1)
            # It leaves the model as it is: FSDP2, which hangs its backward on what leaves, wants no view of something inside.
            x_BSD = x_BSD.clone() if self.chunked else x_BSD
        # Converted now, as the loss is taken where no format is asked for any more.
        if self.chunked:
            return Projected(computed(x_BSD), computed(weight_VD), self.cap)
        logits_BSV = F.linear(x_BSD, weight_VD)
        return logits_BSV if self.cap is None else self.cap * torch.tanh(logits_BSV / self.cap)


@dataclass(frozen=True, eq=False)
class VocabularyLoss:
    """Sum of the losses of all targets that count, in fp32; the same on all ranks of the group."""

    share: Share
    rows: int
    """Of the whole vocabulary."""
    chunk: int | None
    whole: Loss
    """For a model that returns whole logits anyway."""

    def __call__(self, projected: Any, targets_BS: Tensor) -> Tensor:
        if isinstance(projected, Projected):
            assert self.chunk is not None
            x_ND = projected.x_BSD.flatten(0, 1)
            how = self.chunk, torch.is_grad_enabled(), projected.cap
            share = self.share if len(projected.weight_VD) != self.rows else self.share.all_of_them
            return _Chunked.apply(x_ND, projected.weight_VD, targets_BS.flatten(), share, how)
        if projected.shape[-1] == self.rows:
            return self.whole(projected, targets_BS)
        return _Parallel.apply(projected.flatten(0, 1), targets_BS.flatten(), self.share)


def token_losses(loss: Loss, logits: Tensor, targets_BS: Tensor) -> Tensor:
    """Loss of each target, [B, S], 0 where it is ignored; in fp32, the same on all ranks that share the logits' columns. `loss`: that of the
    model, not in chunks."""
    if isinstance(loss, VocabularyLoss) and logits.shape[-1] != loss.rows:
        losses_N: Tensor = _ParallelTokens.apply(logits.flatten(0, 1), targets_BS.flatten(), loss.share)
    else:
        losses_N = F.cross_entropy(logits.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED, reduction="none")
    return losses_N.view_as(targets_BS)


def swap(parts: list[nn.Module], group: Group, *, chunk: int | None, sequence: bool, loss: Loss) -> Loss:
    """Set `project` where a model ends and return the loss that fits; `chunk`: tokens whose logits may exist at a time."""
    if group.size == 1 and chunk is None:
        return loss
    spec: Any = parts[0].spec
    assert isinstance(spec, ModelSpec), "build gives every model its spec"
    for part in parts:
        if hasattr(part, "project"):
            part.project = Project(CopyToTP(group, sequence), chunk is not None, spec.rows, spec.logit_cap)  # type: ignore[assignment]
        elif chunk is not None:
            raise RunError(
                f"a loss in chunks of {chunk} tokens needs a model that gives its logits through an attribute `project`, "
                "called with the last states and the head's weight: this one has none, so leave the chunks out."
            )
    return VocabularyLoss(Share(share_of(spec.rows, group.index, group.size)[0], group), spec.rows, chunk, loss)


def applied(parts: list[nn.Module], loss: Loss) -> str | None:
    """What was done, read from the model's end and the loss; None: nothing."""
    ends = [part for part in parts if getattr(part, "is_last_stage", True)]
    if not isinstance(loss, VocabularyLoss) or not ends:
        return None
    words = []
    own = share_of(loss.rows, loss.share.group.index, loss.share.group.size)[1]
    if own != loss.rows and any(p.ndim == 2 and p.shape[0] == own for part in ends for p in part.parameters()):
        words.append(f"this rank's logits begin at column {loss.share.first} of {loss.rows}")
    if all(isinstance(project := getattr(part, "project", None), Project) and project.chunked for part in ends):
        words.append(f"logits of {loss.chunk} tokens at a time")
    return "; ".join(words) or None


class _Parallel(torch.autograd.Function):
    """Cross-entropy of logits that are shared by columns."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, share: Share) -> Tensor:
        losses_N, whole_N = share.losses(logits_NV, targets_N)
        ctx.share = share
        ctx.save_for_backward(logits_NV, targets_N, whole_N)
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, whole_N = ctx.saved_tensors
        gradient_NV = logits_NV.clone()
        softmax_gradient_(gradient_NV, ctx.share.columns(targets_N, logits_NV.shape[1]), whole_N)
        return gradient_NV.mul_(gradients[0]), None, None


class _ParallelTokens(torch.autograd.Function):
    """The same, of each token."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, share: Share) -> Tensor:
        losses_N, whole_N = share.losses(logits_NV, targets_N)
        ctx.share = share
        ctx.save_for_backward(logits_NV, targets_N, whole_N)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, whole_N = ctx.saved_tensors
        gradient_NV = logits_NV.clone()
        softmax_gradient_(gradient_NV, ctx.share.columns(targets_N, logits_NV.shape[1]), whole_N)
        return gradient_NV.mul_(gradients[0][:, None]), None, None


class _Chunked(torch.autograd.Function):
    """Cross-entropy of x · weightᵀ, some tokens at a time. Both gradients are computed together with the loss, for a gradient of 1.

    `how`: tokens at a time, whether gradients are wanted, and the soft cap of the logits."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, share: Share, how: tuple[int, bool, float | None]
    ) -> Tensor:
        chunk, training, cap = how
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        wanted_x, wanted_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        dx_ND = torch.empty_like(x_ND) if wanted_x else None
        columns, weight_VD = len(weight_VD), _aligned(weight_VD)
        # Chunks add up in fp32, whatever each is computed in.
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wanted_weight else None
        with torch.autocast(x_ND.device.type, enabled=False):
            for first in range(0, len(x_ND), chunk):
                now = slice(first, first + chunk)
                logits_NV = F.linear(x_ND[now], weight_VD)
                slope_NV = None
                if cap is not None:
                    bounded_NV = logits_NV.div_(cap).tanh_()
                    slope_NV = 1 - bounded_NV.square() if wanted_x or wanted_weight else None
                    logits_NV = bounded_NV.mul_(cap)
                if not (wanted_x or wanted_weight):
                    total += share.losses(logits_NV[:, :columns], targets_N[now])[0].sum()
                    continue
                # Columns of the padding are 0 and stay so: they add nothing to the gradients.
                total += share.losses_and_gradient_(logits_NV[:, :columns], targets_N[now]).sum()
                if slope_NV is not None:
                    logits_NV *= slope_NV
                if dx_ND is not None:
                    torch.mm(logits_NV, weight_VD, out=dx_ND[now])
                if dweight_VD is not None:
                    _add_product(dweight_VD, logits_NV, x_ND[now])
        ctx.save_for_backward(dx_ND, None if dweight_VD is None else dweight_VD[:columns].to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a backward in two halves comes here twice.
        return *(None if saved is None else scaled(saved, gradients[0]) for saved in ctx.saved_tensors), None, None, None


def _aligned(weight_VD: Tensor) -> Tensor:
    """On GPUs, the weight with rows of zeros, so that the logits of a token begin at a multiple of 128 bytes: products with other rows take
    five times as long."""
    missing = -len(weight_VD) % _ALIGN if weight_VD.is_cuda and weight_VD.dtype != torch.float32 else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def _add_product(sum_VD: Tensor, gradient_NV: Tensor, x_ND: Tensor) -> None:
    """Adds gradientᵀ · x, whatever its dtype is, to an fp32 sum."""
    if x_ND.dtype == torch.float32:
        sum_VD.addmm_(gradient_NV.t(), x_ND)
    elif x_ND.is_cuda:
        torch.addmm(sum_VD, gradient_NV.t(), x_ND, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD += gradient_NV.t() @ x_ND
