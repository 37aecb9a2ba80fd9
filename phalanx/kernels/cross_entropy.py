"""Cross-entropy from logits, with its gradient in place of them: one pass over the memory where PyTorch's operations take ten. Each function
has a plain implementation, for CPUs, and one in Triton; both compute in fp32, whatever the logits' dtype is. Used by `parallel/vocab_parallel`.

A rank may have only some columns of the logits. `columns_N` says, for each token, which column of this rank is its target; ELSEWHERE, if
another rank has that column; IGNORED, if the token does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.triton_support import launches_triton, operation

IGNORED = -100
ELSEWHERE = -1

# Shapes: N tokens, V this rank's columns of the logits.


def log_sum_exp(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of each token's exponentials, and the logit of its target, 0 where this rank does not have it; in fp32."""
    if launches_triton(logits_NV):
        return _log_sum_exp(logits_NV, columns_N)
    x_NV = logits_NV.float()
    here_N = columns_N >= 0
    target_N = x_NV.gather(1, columns_N.clamp(min=0)[:, None])[:, 0].masked_fill(~here_N, 0.0)
    return x_NV.logsumexp(-1), target_N


def softmax_gradient_(logits_NV: Tensor, columns_N: Tensor, whole_N: Tensor) -> None:
    """The gradient of the sum of the losses, in place of the logits. `whole_N`: over the columns of all ranks, as `log_sum_exp` returns it."""
    if launches_triton(logits_NV):
        _softmax_gradient_(logits_NV, columns_N, whole_N)
        return
    x_NV = logits_NV if logits_NV.dtype == torch.float32 else logits_NV.float()
    here_N = columns_N >= 0
    x_NV.sub_(whole_N[:, None]).exp_()
    x_NV.scatter_add_(1, columns_N.clamp(min=0)[:, None], -here_N.to(x_NV.dtype)[:, None])
    x_NV.masked_fill_((columns_N == IGNORED)[:, None], 0.0)
    if x_NV is not logits_NV:
        logits_NV.copy_(x_NV)


def cross_entropy_(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
    """`log_sum_exp` and `softmax_gradient_` in one, for a rank that has all columns: the second read of a row comes from the cache."""
    if launches_triton(logits_NV):
        return _cross_entropy_(logits_NV, columns_N)
    whole_N, target_N = log_sum_exp(logits_NV, columns_N)
    softmax_gradient_(logits_NV, columns_N, whole_N)
    return whole_N, target_N


# Operations of torch. The first call of any imports torch's compiler, which takes seconds: CPUs never come here.


@operation("log_sum_exp", mutates=())
def _log_sum_exp(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(logits_NV, columns_N, None, gradient=False)


@operation("softmax_gradient_", mutates=("logits_NV",))
def _softmax_gradient_(logits_NV: Tensor, columns_N: Tensor, whole_N: Tensor) -> None:
    _launch(logits_NV, columns_N, whole_N, gradient=True)


@operation("cross_entropy_", mutates=("logits_NV",))
def _cross_entropy_(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(logits_NV, columns_N, None, gradient=True)


@_log_sum_exp.register_fake
@_cross_entropy_.register_fake
def _(logits_NV: Tensor, columns_N: Tensor) -> tuple[Tensor, Tensor]:
    like = logits_NV.new_empty(len(logits_NV), dtype=torch.float32)
    return like, torch.empty_like(like)


@_softmax_gradient_.register_fake
def _(logits_NV: Tensor, columns_N: Tensor, whole_N: Tensor) -> None:
    return None


def _launch(logits_NV: Tensor, columns_N: Tensor, whole_N: Tensor | None, *, gradient: bool) -> tuple[Tensor, Tensor]:
    from phalanx.kernels.cross_entropy_triton import row_kernel

    rows, width = logits_NV.shape
    assert logits_NV.stride(1) == 1, "rows of logits are contiguous"
    target_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    given = whole_N is not None
    whole_N = torch.empty_like(target_N) if whole_N is None else whole_N.contiguous()
    row_kernel[(rows,)](
        logits_NV,
        columns_N.contiguous(),
        whole_N,
        target_N,
        width,
        logits_NV.stride(0),
        GIVEN=given,
        GRADIENT=gradient,
        IGNORED=IGNORED,
        BLOCK=8192,
        num_warps=16,
    )
    return whole_N, target_N
