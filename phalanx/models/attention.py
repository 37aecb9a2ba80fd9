"""Causal self-attention within documents: grouped-query and multi-head latent attention. Used by `models/decoder`. `attend` is a plain
attribute of each attention module: local by default. Context parallelism replaces it; the model does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.document_attention import DocumentSpans, document_attention
from phalanx.kernels.partial_attention import Scoring
from phalanx.kernels.sink_attention import sink_attention
from phalanx.models.layers import RMSNorm, Rotation, rms, rotate, soft_cap
from phalanx.spec.model import Mla, ModelSpec

_SPANS_IN = (torch.bfloat16, torch.float16)  # dtypes of the kernels that need no mask
_RANK_EPS = 1e-6  # of the two inner norms of latent attention; the published models use it regardless of the other norms


class Scope:
    """Which keys a query may attend to: those at or before its position, in its own document and its window. Created once per forward and
    shared by all blocks, or by all blocks with the same window."""

    def __init__(self, documents_BS: Tensor | None, spans: DocumentSpans | None = None, window: int | None = None):
        self.documents = documents_BS
        """Document of each position; None: every sequence is one document."""
        self.spans = spans
        """The same, for kernels that need no mask; None: there is only the mask."""
        self.window = window
        """The most keys that a query attends to: its own and those just before it; None: no limit."""
        self._mask: Tensor | None = None  # created at its first use; torch.compile does not trace a cached_property

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """[B or 1, 1, S, S], true where a query (row) may attend to a key (column); None: plain causal attention."""
        limited = self.window is not None and self.window < length
        if self._mask is None and (limited or self.documents is not None):
            visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            if self.window is not None and limited:
                visible = visible.triu(1 - self.window)
            if self.documents is not None:
                visible = (self.documents[:, :, None] == self.documents[:, None, :]) & visible
            self._mask = visible.view(-1, 1, length, length)
        return self._mask


Attend = Callable[..., Tensor]
"""Computes attention; called like `attend_locally`. Values may be narrower than queries and keys."""


def attend_locally(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, /, *scoring: Any) -> Tensor:
    """Attention with all keys on this device. A single query with a KV cache attends to all of them, or to those in its window. `scoring`: as in
    `Scoring`."""
    scale, cap, sinks_H = Scoring(*scoring)
    if sinks_H is not None:
        return _attend_with_sinks(q_BHSE, k_BKTE, v_BKTE, scope, Scoring(*scoring))
    if cap is not None:
        return _attend_capped(q_BHSE, k_BKTE, v_BKTE, scope, scale, cap)
    missing = q_BHSE.shape[-1] - v_BKTE.shape[-1]
    if missing > 0 and q_BHSE.device.type == "cpu":
        # On CPU the flash kernel needs equal widths of keys and values; padded, it is also 2–4 times as fast.
        return attend_locally(q_BHSE, k_BKTE, F.pad(v_BKTE, (0, missing)), scope, scale)[..., :-missing]
    grouped = q_BHSE.shape[1] != k_BKTE.shape[1]
    if q_BHSE.shape[2] != k_BKTE.shape[2]:
        if scope.window is not None:
            k_BKTE, v_BKTE = k_BKTE[:, :, -scope.window :], v_BKTE[:, :, -scope.window :]
        return F.scaled_dot_product_attention(q_BHSE, k_BKTE, v_BKTE, scale=scale, enable_gqa=grouped)
    dtype = _compute_dtype(q_BHSE)
    if scope.spans is not None and dtype in _SPANS_IN:
        q_BHSE, k_BKTE, v_BKTE = (x.to(dtype) for x in (q_BHSE, k_BKTE, v_BKTE))
        return _attend_in_spans(q_BHSE, k_BKTE, v_BKTE, scope, Scoring(scale))
    mask = scope.mask(q_BHSE.shape[2], q_BHSE.device)
    return F.scaled_dot_product_attention(
        q_BHSE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def prepare(scope: Scope, attention: nn.Module, x_BSD: Tensor, length: int) -> None:
    """Create the mask of `length` positions if blocks will read it. Done before the blocks, so that the first one does not differ from the others: torch.compile would
    compile it separately, and once more for its recomputation."""
    attend: Any = attention.attend
    masked = scope.spans is None or _compute_dtype(x_BSD) not in _SPANS_IN or getattr(attention, "cap", None) is not None
    if getattr(attend, "inner", attend) is attend_locally and masked:
        scope.mask(length, x_BSD.device)


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _attend_in_spans(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scoring: Scoring) -> Tensor:
    spans = scope.spans
    assert spans is not None
    width, narrow = q_BHSE.shape[-1], v_BKTE.shape[-1]
    padded = max(width, narrow) + -max(width, narrow) % 8  # the kernels need one width, a multiple of 8
    q, k, v = (
        (F.pad(x, (0, padded - x.shape[-1])) if x.shape[-1] < padded else x).transpose(1, 2).contiguous()
        for x in (q_BHSE, k_BKTE, v_BKTE)
    )
    scale = width**-0.5 if scoring.scale is None else scoring.scale
    out_BSHE, _ = document_attention(q, k, v, spans.bounds, spans.runs, scale, scope.window, scoring.sinks_H)
    return out_BSHE.transpose(1, 2)[..., :narrow]


def _attend_with_sinks(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scoring: Scoring) -> Tensor:
    scale, cap, sinks_H = scoring
    dtype, length = _compute_dtype(q_BHSE), q_BHSE.shape[2]
    q_BHSE, k_BKTE, v_BKTE = (x.to(dtype) for x in (q_BHSE, k_BKTE, v_BKTE))
    is_whole = length == k_BKTE.shape[2]
    if is_whole and cap is None and scope.spans is not None and dtype in _SPANS_IN:
        return _attend_in_spans(q_BHSE, k_BKTE, v_BKTE, scope, scoring)
    if not is_whole and scope.window is not None:
        k_BKTE, v_BKTE = k_BKTE[:, :, -scope.window :], v_BKTE[:, :, -scope.window :]
    visible = scope.mask(length, q_BHSE.device) if is_whole else None
    scale = q_BHSE.shape[-1] ** -0.5 if scale is None else scale
    out_BHSE, _ = sink_attention(q_BHSE, k_BKTE, v_BKTE, sinks_H, visible, is_whole and visible is None, scale, cap)
    attended: Tensor = out_BHSE
    return attended


def _attend_capped(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scale: float | None, cap: float) -> Tensor:
    """With soft-capped scores, which no fused kernel computes."""
    length, keys = q_BHSE.shape[2], k_BKTE.shape[2]
    q_BKGSE = q_BHSE.unflatten(1, (k_BKTE.shape[1], -1)) * (q_BHSE.shape[-1] ** -0.5 if scale is None else scale)
    scores_BKGST = soft_cap(q_BKGSE @ k_BKTE[:, :, None].mT, cap)
    if length == keys:
        visible = scope.mask(length, q_BHSE.device)
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=q_BHSE.device).tril()[None, None]
        scores_BKGST = scores_BKGST.masked_fill(~visible[:, :, None], -torch.inf)
    elif scope.window is not None:
        scores_BKGST, v_BKTE = scores_BKGST[..., -scope.window :], v_BKTE[:, :, -scope.window :]
    weights_BKGST = scores_BKGST.softmax(-1, dtype=torch.promote_types(q_BHSE.dtype, torch.float32)).to(v_BKTE.dtype)
    return (weights_BKGST @ v_BKTE[:, :, None]).flatten(1, 2)


class KVCache:
    """The keys and values of all earlier positions of one block, or of those in its window, during generation."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys_BKSE: Tensor, values_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            assert keys_BKSE.shape[2] == 1, "after the prompt, generation adds one position at a time"
            keys_BKSE = torch.cat((self.keys, keys_BKSE), dim=2)
            values_BKSE = torch.cat((self.values, values_BKSE), dim=2)
        kept = slice(None) if self.window is None else slice(-self.window, None)  # the next query does not see earlier ones
        self.keys, self.values = keys_BKSE[:, :, kept], values_BKSE[:, :, kept]
        return keys_BKSE, values_BKSE


def _heads(x_BSW: Tensor, width: int) -> Tensor:
    """[B, H, S, width]. The number of heads is inferred, not stored: a tensor parallel rank that holds some of them runs the same line."""
    return x_BSW.unflatten(-1, (-1, width)).transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and optional normalization of queries and keys."""

    attend: Attend

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.head = spec.head
        bias = spec.bias or spec.qkv_bias
        self.query = nn.Linear(spec.dim, spec.heads * spec.head, bias=bias)
        self.key = nn.Linear(spec.dim, spec.kv * spec.head, bias=bias)
        self.value = nn.Linear(spec.dim, spec.kv * spec.head, bias=bias)
        self.output = nn.Linear(spec.heads * spec.head, spec.dim, bias=spec.bias)
        self.query_norm = rms(spec, spec.head) if spec.qk_norm else nn.Identity()
        self.key_norm = rms(spec, spec.head) if spec.qk_norm else nn.Identity()
        self.cap = spec.attention_cap
        scale = None if spec.query_scalar is None else spec.query_scalar**-0.5
        self.scoring = () if scale is None and self.cap is None else (scale, self.cap)
        self.attend = attend_locally

    def forward(self, x_BSD: Tensor, scope: Scope, rotation: Rotation | None, kv_cache: KVCache | None = None) -> Tensor:
        q, k, v = (_heads(project(x_BSD), self.head) for project in (self.query, self.key, self.value))
        q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if kv_cache is not None:
            k, v = kv_cache.extend(k, v)
        attended = self.attend(q, k, v, scope, *self.scoring)
        return self.output(attended.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 and V3): keys and values are expanded from one narrow vector per token, and the KV
    cache holds only that vector. A head's query and key have a part without position and a rotated part, whose key all heads share."""

    attend: Attend
    recomputed = ("expand",)
    """Methods whose results are wide and cheap: a compiled backward calls them again."""

    def __init__(self, spec: ModelSpec, mla: Mla):
        super().__init__()
        self.mla = mla
        self.scale: float = (mla.nope_dim + mla.rope_dim) ** -0.5
        if spec.rope_scaling is not None and spec.rope_scaling.mscale_all_dim:  # once for queries and once for keys
            self.scale *= spec.rope_scaling.temperature(spec.rope_scaling.mscale_all_dim) ** 2
        width = spec.heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            self.query = nn.Linear(spec.dim, width, bias=False)
        else:
            self.query_down = nn.Linear(spec.dim, mla.q_rank, bias=False)
            self.query_rank_norm = RMSNorm(mla.q_rank, eps=_RANK_EPS)
            self.query_up = nn.Linear(mla.q_rank, width, bias=False)
        self.kv_down = nn.Linear(spec.dim, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_rank_norm = RMSNorm(mla.kv_rank, eps=_RANK_EPS)
        self.kv_up = nn.Linear(mla.kv_rank, spec.heads * (mla.nope_dim + mla.value_dim), bias=False)
        self.output = nn.Linear(spec.heads * mla.value_dim, spec.dim, bias=False)
        self.attend = attend_locally

    def forward(self, x_BSD: Tensor, scope: Scope, rotation: Rotation | None, kv_cache: KVCache | None = None) -> Tensor:
        assert rotation is not None, "latent attention needs rotary positions; `spec/check` refuses others"
        q_BHSE = _heads(self._queries(x_BSD), self.mla.nope_dim + self.mla.rope_dim)
        q_plain, q_rotated = q_BHSE.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        q_BHSE = torch.cat((q_plain, rotate(q_rotated, rotation).to(q_plain.dtype)), dim=-1)
        latent_BSR, shared_BSP = self.kv_down(x_BSD).split((self.mla.kv_rank, self.mla.rope_dim), dim=-1)
        latent_B1SR, shared_B1SP = self.kv_rank_norm(latent_BSR)[:, None], rotate(shared_BSP[:, None], rotation)
        if kv_cache is not None:  # caches the narrow vectors, not the expanded ones
            latent_B1SR, shared_B1SP = kv_cache.extend(latent_B1SR, shared_B1SP)
        k_BHTE, v_BHTE = self.expand(latent_B1SR[:, 0], shared_B1SP)
        attended = self.attend(q_BHSE, k_BHTE, v_BHTE, scope, self.scale)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if self.mla.q_rank is None:
            return self.query(x_BSD)
        return self.query_up(self.query_rank_norm(self.query_down(x_BSD)))

    def expand(self, latent_BTR: Tensor, shared_B1TP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, from one narrow vector per token."""
        both = _heads(self.kv_up(latent_BTR), self.mla.nope_dim + self.mla.value_dim)
        plain, v_BHTE = both.split((self.mla.nope_dim, self.mla.value_dim), dim=-1)
        shared = shared_B1TP.to(plain.dtype).expand(-1, plain.shape[1], -1, -1)
        return torch.cat((plain, shared), dim=-1), v_BHTE
