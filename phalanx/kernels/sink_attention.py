"""Attention with sinks: a learned score of each head that no key has. It takes part in the softmax and adds nothing to the result. Used by
`models/attention`; `kernels/document_attention` and `parallel/context/online_softmax` use its formulas.

A sink is one more part of the keys: with (out, lse) over the keys alone, the sum of exponentials grows by that of the sink, and the result shrinks
by as much. The backward of a fused kernel, given both of these, is right as it is, and the gradient of a sink is that of a key whose value is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.partial_attention import Mask, backward, forward, wide
from phalanx.kernels.triton_support import operation

# Shapes: q [B, H, S, E], k [B, K, T, E], v [B, K, T, V], sinks [H], visible [B or 1, 1, S, T], out [B, H, S, V], lse [B, H, S].


def with_sinks(lse_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp with the sinks, and the factor of the result."""
    both = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
    return both, (lse_BHS - both).exp()


def sink_gradient(gradient_BHSV: Tensor, out_BHSV: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Of a result and a log-sum-exp that have the sinks in them."""
    dot_BHS = (gradient_BHSV.to(lse_BHS.dtype) * out_BHSV).sum(-1)
    weights_BHS = (sinks_H.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
    return -(weights_BHS * dot_BHS).sum((0, 2)).to(sinks_H.dtype)


@operation("sink_attention", mutates=())
def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: Tensor | None, causal: bool, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse), both with the sinks. `visible`: which keys each query sees; None: all, or with `causal` those up to its own."""
    with torch.autocast(q.device.type, enabled=False):
        out, lse = forward(q, k, v, Mask(visible, causal, scale, cap))
        lse, factor = with_sinks(lse, sinks)
        return (out * factor[..., None]).to(q.dtype).contiguous(), lse.contiguous()


@sink_attention.register_fake
def _(q, k, v, sinks, visible, causal, scale, cap=None):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


@operation("sink_attention_backward", mutates=())
def sink_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    visible: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values and sinks."""
    with torch.autocast(q.device.type, enabled=False):
        found = backward(gradient, (q, k, v), (out, lse), Mask(visible, causal, scale, cap))
        dq, dk, dv = (x.to(like.dtype).contiguous() for x, like in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, sink_gradient(gradient, out, lse, sinks)


@sink_attention_backward.register_fake
def _(gradient, q, k, v, sinks, visible, out, lse, causal, scale, cap=None):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, sinks))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = sink_attention_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.cap)
    return *gradients, None, None, None, None


sink_attention.register_autograd(_backward, setup_context=_save)

FORWARD, BACKWARD = torch.ops.phalanx.sink_attention, torch.ops.phalanx.sink_attention_backward
"""As torch's dispatcher knows them."""
