"""Mixture of experts in place of a block's feed-forward: a router sends each token to a few experts, and drops none. Mixtral,
Qwen3-MoE and DeepSeek-V3 are settings of it. Used by `models/decoder`; training reads `routers` to balance them.

`MoE.dispatch` is a plain attribute, `dispatch_locally` by default. Expert parallelism replaces it; the model does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.routed_rows import gather_sum, zero_unused_
from phalanx.kernels.router_product import router_product
from phalanx.kernels.scaled_swiglu import scaled_swiglu
from phalanx.models.layers import SwiGLU
from phalanx.spec.model import Moe

# Shapes: T tokens (B · S), K experts chosen per token, R = T · K rows sorted by expert, E experts, F width of one, G groups.

MAX_STEP = 0.06
"""A router's biases move by at most this fraction of their own standard deviation: they grow fast and then converge."""
MIN_RATE = 0.05
"""Fraction of the rate by which they may always move: they begin at zero, without any spread."""


class Router(nn.Module):
    """Chooses each token's experts and their weights, always in fp32: rounding could send a token to another expert."""

    bias: Tensor | None
    counts: Tensor

    def __init__(self, dim: int, moe: Moe):
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, dim))
        biased = moe.bias_rate > 0 or moe.router == "sigmoid"
        self.register_buffer("bias", torch.empty(moe.experts, dtype=torch.float32) if biased else None)
        self.register_buffer("counts", torch.empty(moe.experts, dtype=torch.int64), persistent=False)
        self.counting = True
        """False while a forward is recomputed: its tokens have been counted."""
        self.together: Callable[[Tensor], Tensor] = lambda counts_BE: counts_BE
        """Sums counts over the ranks that hold tokens of the same sequences; the identity by default."""
        self.loss_scale = 1.0
        """Gradient of the balancing loss; training sets it to 1 / tokens of a global batch."""
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set the buffers to their values before the first step."""
        self.counts.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, both [T, K]."""
        with torch.autocast(x_BSD.device.type, enabled=False):
            logits_BSE = router_product(x_BSD.flatten(0, 1), self.weight).unflatten(0, x_BSD.shape[:2])
            scores_BSE = logits_BSE.sigmoid() if self.moe.router == "sigmoid" else logits_BSE.softmax(-1)
            scores_TE = scores_BSE.flatten(0, 1)
            chosen_TK = self.choose(scores_TE.detach())
            weights_TK = scores_TE.gather(1, chosen_TK)
            if self.moe.normalize:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
            weights_TK = weights_TK * self.moe.scale
            if torch.is_grad_enabled():
                counts_BE = _count(chosen_TK.view(len(x_BSD), -1), self.moe.experts)
                if self.counting:
                    self.counts += counts_BE.sum(0)
                if self.moe.balance_loss:
                    loss = self.moe.balance_loss * balance(scores_BSE, self.together(counts_BE))
                    weights_TK = AttachLoss.apply(weights_TK, loss, self.loss_scale)
        return chosen_TK, weights_TK

    def choose(self, scores_TE: Tensor) -> Tensor:
        """The best experts by score plus bias, within the best groups. The bias affects only the choice, not the weights."""
        if self.bias is not None:
            scores_TE = scores_TE + self.bias
        if self.moe.groups > 1:
            scores_TGE = scores_TE.view(len(scores_TE), self.moe.groups, -1)
            # The score of a group is the sum of its two best experts.
            groups_TG = scores_TGE.topk(min(2, scores_TGE.shape[-1]), dim=-1).values.sum(-1)
            best_TG = torch.zeros_like(groups_TG, dtype=torch.bool)
            best_TG.scatter_(1, groups_TG.topk(self.moe.active_groups, dim=-1).indices, True)
            scores_TE = scores_TGE.masked_fill(~best_TG[:, :, None], -torch.inf).flatten(1)
        return scores_TE.topk(self.moe.active, dim=-1).indices

    @torch.no_grad()
    def rebalance(self, counts_E: Tensor) -> None:
        """After a step: lower the bias of experts with more tokens than the mean, raise that of the others.

        Each bias moves by its relative shortfall times a step that follows the standard deviation of the biases and never exceeds
        the rate. DeepSeek-V3 moves every bias by the full rate, which is too slow for a collapsed router and makes experts
        oscillate where scores are close together; see docs/log.md.
        """
        if self.bias is not None:
            counts_E = counts_E.to(torch.float64)  # counts of any run are exact in it
            shortfall_E = (counts_E.mean() - counts_E) / counts_E.mean().clamp(min=1)
            rate = self.moe.bias_rate
            step = (MAX_STEP * self.bias.double().std(correction=0)).clamp(MIN_RATE * rate, rate)
            self.bias += (step * shortfall_E.clamp(-1, 1)).to(self.bias.dtype)


def routers(model: nn.Module) -> dict[str, Router]:
    """Every router of a model by name, first block first."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def router_sizes(model: nn.Module) -> dict[str, int]:
    """The number of experts of each router."""
    return {name: router.moe.experts for name, router in routers(model).items()}


def balance(scores_BSE: Tensor, counts_BE: Tensor) -> Tensor:
    """The load-balancing loss of each sequence times its tokens, summed, so that it does not depend on how sequences are batched.

    A sequence's loss is the sum over experts of (share of tokens sent there) × (mean score); 1 if balanced. Counts are those of
    whole sequences; scores may be those of a part of each sequence, which gives its part of the loss.
    """
    shares_BE = counts_BE * scores_BSE.shape[-1] / counts_BE.sum(-1, keepdim=True)
    sums_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).sum(1)
    return (shares_BE * sums_BE).sum()


def _count(chosen_BN: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen, [B, E], without a one-hot tensor."""
    counts_BE = torch.zeros(len(chosen_BN), experts, dtype=torch.int64, device=chosen_BN.device)
    return counts_BE.scatter_add_(1, chosen_BN, torch.ones_like(chosen_BN))


class AttachLoss(torch.autograd.Function):
    """The identity; its backward also gives `loss` a gradient, so that a loss inside the model need not be returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.like, ctx.scale = loss.detach(), scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.scale), None


class Experts(nn.Module):
    """All routed experts of a block, stacked; each is a SwiGLU."""

    takes_scales = takes_rows_twice = True

    def __init__(self, dim: int, moe: Moe):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(moe.experts, moe.ffn, dim))
        self.up = nn.Parameter(torch.empty(moe.experts, moe.ffn, dim))
        self.down = nn.Parameter(torch.empty(moe.experts, dim, moe.ffn))
        self.read_counts: Callable[[Tensor, int], list[int]] = lambda counts_E, rows: counts_E.tolist()
        """Rows of each expert on the host, from the counts and their sum. A rehearsal, whose tensors have no values, replaces it."""
        self.multiply: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_product
        """Each row times its expert's matrix, from rows, matrices [E, out, in] and where each expert's rows end. fp8 replaces it."""

    @property
    def count(self) -> int:
        return len(self.gate)

    def forward(self, x_RD: Tensor, counts_E: Tensor, scales_R: Tensor | None = None, same_RD: Tensor | None = None) -> Tensor:
        """Rows are sorted by expert: the first counts[0] rows belong to the first expert, and so on. Each result is multiplied by its scale:
        before the last product, so that nothing keeps the result for the scale's gradient. `same_RD` is x_RD for the second product, if
        the caller takes the gradients of both products instead of their sum."""
        dtype = compute_dtype(x_RD)
        x_RD, weights = x_RD.to(dtype), [weight.to(dtype) for weight in (self.gate, self.up, self.down)]
        inner = self.gate.shape[1]
        alone = not _groupable(x_RD, inner) if self.multiply is grouped_product else len(x_RD) == 0 or inner == 0
        if alone:
            return loop_experts(x_RD, self.read_counts(counts_E, len(x_RD)), weights[0], weights[1], weights[2], scales_R)
        if x_RD.device.type == "cuda":
            weights = [ZeroUnusedGradients.apply(weight, counts_E) for weight in weights]
        gate_EFD, up_EFD, down_EDF = weights
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        gate_RF = self.multiply(x_RD, gate_EFD, ends_E)
        up_RF = self.multiply(x_RD if same_RD is None else same_RD.to(dtype), up_EFD, ends_E)
        return self.multiply(scaled_swiglu(gate_RF, up_RF, scales_R), down_EDF, ends_E)


def grouped_product(x_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the transpose of its expert's matrix. Expert e has the rows up to `ends_E`[e]."""
    return F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=ends_E)


class ZeroUnusedGradients(torch.autograd.Function):
    """The identity; its backward zeroes the gradient of experts without tokens, which some GPU kernels leave unwritten."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # In place: nothing else has this gradient, which the grouped product has just written.
        return zero_unused_(gradients[0], ctx.saved_tensors[0]), None


def loop_experts(
    x_RD: Tensor, counts: Sequence[int], gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, scales_R: Tensor | None = None
) -> Tensor:
    """One expert after the other: the reference for the grouped matrix product, and its replacement where it is unavailable."""
    parts = x_RD.split(list(counts))
    scales = [None] * len(parts) if scales_R is None else scales_R.split(list(counts))
    outs = [
        F.linear(scaled_swiglu(F.linear(part, gate), F.linear(part, up), scale), down)
        for part, scale, gate, up, down in zip(parts, scales, gate_EFD, up_EFD, down_EDF, strict=True)
    ]
    return torch.cat(outs)


def _groupable(x_RD: Tensor, inner: int) -> bool:
    """Whether the grouped matrix product supports it: nonempty rows of a multiple of 16 bytes; bf16 on GPUs, all but fp64 on CPUs."""
    supported = (torch.bfloat16,) if x_RD.device.type == "cuda" else (torch.bfloat16, torch.float16, torch.float32)
    size = x_RD.element_size()
    aligned = x_RD.shape[1] * size % 16 == 0 and inner * size % 16 == 0
    return x_RD.dtype in supported and aligned and len(x_RD) > 0 and inner > 0


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product under autocast, which does not cover the grouped one."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class ExpertsLike(Protocol):
    """Experts as a dispatch sees them, on this device or elsewhere: called with rows and the number of rows of each expert. Those with an
    attribute `takes_scales` that is true also take a scale for each result; those with `takes_rows_twice` then take the rows once more."""

    @property
    def count(self) -> int: ...
    def __call__(self, x_RD: Tensor, counts_E: Tensor, /, *scales_R: Tensor) -> Tensor: ...


def dispatch_locally(x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, experts: ExpertsLike, /) -> Tensor:
    """Send tokens to their experts, all on this device, and combine the results. Every token reaches each of its experts: there is no capacity limit."""
    active = chosen_TK.shape[1]
    # A GPU sorts by a byte at a time.
    order_R = chosen_TK.flatten().to(torch.uint8 if experts.count <= 256 else torch.int32).argsort(stable=True)
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    counts_E = _count(chosen_TK.view(1, -1), experts.count)[0]
    if not getattr(experts, "takes_scales", False):
        y_RD = experts(_TakeRows.apply(x_TD, order_R, back_R, active), counts_E)
        y_TKD = _TakeRows.apply(y_RD, back_R, order_R, 1).unflatten(0, (-1, active))
        return (y_TKD * weights_TK[:, :, None]).sum(1)
    scales_R = _TakeRows.apply(weights_TK.flatten(), order_R, back_R, 1)
    if getattr(experts, "takes_rows_twice", False):
        x_RD, same_RD = _TakeRowsTwice.apply(x_TD, order_R, back_R, active)
        y_RD = experts(x_RD, counts_E, scales_R, same_RD)
    else:
        y_RD = experts(_TakeRows.apply(x_TD, order_R, back_R, active), counts_E, scales_R)
    y_TD: Tensor = _SumRows.apply(y_RD, back_R, order_R, active)
    return y_TD


class _TakeRows(torch.autograd.Function):
    """Rows in another order, each taken `copies` times. The backward is a gather too, so that no sum depends on timing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(back)
        return _take(x, order, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back, copies = ctx.saved_tensors[0], ctx.copies
        return gradients[0][back] if copies == 1 else gather_sum([gradients[0]], back, copies), None, None, None


class _TakeRowsTwice(torch.autograd.Function):
    """The rows as two results, the same memory, for two products: their gradients are added as they are read, not in a pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        ctx.copies = copies
        ctx.save_for_backward(back)
        rows = _take(x, order, copies)
        return rows, rows.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gather_sum(list(gradients), ctx.saved_tensors[0], ctx.copies), None, None, None


class _SumRows(torch.autograd.Function):
    """The sum of each token's rows: the inverse of `_TakeRows`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, back: Tensor, order: Tensor, copies: int) -> Tensor:
        # Not `save_for_backward`: a recomputed forward would run on to here, and so through the last product, which no gradient needs.
        ctx.copies, ctx.order = copies, order
        return gather_sum([y], back, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _take(gradients[0], ctx.order, ctx.copies), None, None, None


def _take(x: Tensor, order: Tensor, copies: int) -> Tensor:
    return x[order // copies] if copies > 1 else x[order]


class MoE(nn.Module):
    """The shared experts, which process every token, plus the routed experts."""

    dispatch: Callable[[Tensor, Tensor, Tensor, ExpertsLike], Tensor]
    only_added = ("shared.down",)
    """Linear layers whose results are only added to something: no gradient needs their values."""

    def __init__(self, dim: int, moe: Moe):
        super().__init__()
        self.router = Router(dim, moe)
        self.experts = Experts(dim, moe)
        self.shared = SwiGLU(dim, moe.shared * moe.ffn, bias=False) if moe.shared else None
        self.dispatch = dispatch_locally

    def forward(self, x_BSD: Tensor) -> Tensor:
        # The router gets what the experts get: in bf16, its product in fp32 is exact and fast.
        x_BSD = x_BSD.to(compute_dtype(x_BSD))
        chosen_TK, weights_TK = self.router(x_BSD)
        # Shared experts come first: a recomputed forward ends before the routed tokens travel back, as no gradient needs the results.
        shared_BSD = None if self.shared is None else self.shared(x_BSD)
        y_BSD = self.dispatch(x_BSD.flatten(0, 1), chosen_TK, weights_TK, self.experts).view_as(x_BSD)
        return y_BSD if shared_BSD is None else y_BSD + shared_BSD
