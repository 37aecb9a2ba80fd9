"""Causal self-attention within documents: grouped-query and multi-head latent attention. Used by `models/decoder`. `attend` is a plain
attribute of each attention module: local by default. Context parallelism replaces it; the model does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.document_attention import DocumentSpans, document_attention
from phalanx.models.layers import RMSNorm, Rotation, rotate
from phalanx.spec.model import Mla, ModelSpec

_SPANS_IN = (torch.bfloat16, torch.float16)  # dtypes of the kernels that need no mask
_RANK_EPS = 1e-6  # of the two inner norms of latent attention; the published models use it regardless of the other norms


class Scope:
    """Which keys a query may attend to: those at or before its position, in its own document. Created once per forward and shared by
    all blocks."""

    def __init__(self, documents_BS: Tensor | None, spans: DocumentSpans | None = None):
        self.documents = documents_BS
        """Document of each position; None: every sequence is one document."""
        self.spans = spans
        """The same, for kernels that need no mask; None: there is only the mask."""
        self._mask: Tensor | None = None  # created at its first use; torch.compile does not trace a cached_property

    @property
    def mask(self) -> Tensor | None:
        """[B, 1, S, S], true where a query (row) may attend to a key (column); None: plain causal attention."""
        if self.documents is not None and self._mask is None:
            length = self.documents.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=self.documents.device).tril()
            self._mask = ((self.documents[:, :, None] == self.documents[:, None, :]) & causal)[:, None]
        return self._mask


Attend = Callable[..., Tensor]
"""Computes attention; called like `attend_locally`. Values may be narrower than queries and keys; scale None: 1 / sqrt(width)."""


def attend_locally(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: Scope, scale: float | None = None, /) -> Tensor:
    """Attention with all keys on this device. A single query with a KV cache attends to all of them."""
    missing = q_BHSE.shape[-1] - v_BKTE.shape[-1]
    if missing > 0 and q_BHSE.device.type == "cpu":
        # On CPU the flash kernel needs equal widths of keys and values; padded, it is also 2–4 times as fast.
        return attend_locally(q_BHSE, k_BKTE, F.pad(v_BKTE, (0, missing)), scope, scale)[..., :-missing]
    grouped = q_BHSE.shape[1] != k_BKTE.shape[1]
    if q_BHSE.shape[2] != k_BKTE.shape[2]:
        return F.scaled_dot_product_attention(q_BHSE, k_BKTE, v_BKTE, scale=scale, enable_gqa=grouped)
    dtype = _compute_dtype(q_BHSE)
    if scope.spans is not None and dtype in _SPANS_IN:
        q_BHSE, k_BKTE, v_BKTE = (x.to(dtype) for x in (q_BHSE, k_BKTE, v_BKTE))
        return _attend_in_spans(q_BHSE, k_BKTE, v_BKTE, scope.spans, scale)
    mask = scope.mask
    return F.scaled_dot_product_attention(
        q_BHSE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def prepare(scope: Scope, attention: nn.Module, x_BSD: Tensor) -> None:
    """Create the mask if blocks will read it. Done before the blocks, so that the first one does not differ from the others: torch.compile would
    compile it separately, and once more for its recomputation."""
    attend: Any = attention.attend
    if getattr(attend, "inner", attend) is attend_locally and (scope.spans is None or _compute_dtype(x_BSD) not in _SPANS_IN):
        _ = scope.mask


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _attend_in_spans(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, spans: DocumentSpans, scale: float | None) -> Tensor:
    width, narrow = q_BHSE.shape[-1], v_BKTE.shape[-1]
    padded = max(width, narrow) + -max(width, narrow) % 8  # the kernels need one width, a multiple of 8
    q, k, v = (
        (F.pad(x, (0, padded - x.shape[-1])) if x.shape[-1] < padded else x).transpose(1, 2).contiguous()
        for x in (q_BHSE, k_BKTE, v_BKTE)
    )
    out_BSHE, _ = document_attention(q, k, v, spans.bounds, spans.runs, width**-0.5 if scale is None else scale)
    return out_BSHE.transpose(1, 2)[..., :narrow]


class KVCache:
    """The keys and values of all earlier positions of one block, during generation."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys_BKSE: Tensor, values_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.keys, self.values = keys_BKSE, values_BKSE
        else:
            assert keys_BKSE.shape[2] == 1, "after the prompt, generation adds one position at a time"
            self.keys = torch.cat((self.keys, keys_BKSE), dim=2)
            self.values = torch.cat((self.values, values_BKSE), dim=2)
        return self.keys, self.values


def _heads(x_BSW: Tensor, width: int) -> Tensor:
    """[B, H, S, width]. The number of heads is inferred, not stored: a tensor parallel rank that holds some of them runs the same line."""
    return x_BSW.unflatten(-1, (-1, width)).transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and optional normalization of queries and keys."""

    attend: Attend

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.head = spec.head
        self.query = nn.Linear(spec.dim, spec.heads * spec.head, bias=spec.bias)
        self.key = nn.Linear(spec.dim, spec.kv * spec.head, bias=spec.bias)
        self.value = nn.Linear(spec.dim, spec.kv * spec.head, bias=spec.bias)
        self.output = nn.Linear(spec.heads * spec.head, spec.dim, bias=spec.bias)
        self.query_norm = RMSNorm(spec.head, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(spec.head, eps=spec.norm_eps) if spec.qk_norm else nn.Identity()
        self.attend = attend_locally

    def forward(self, x_BSD: Tensor, scope: Scope, rotation: Rotation | None, kv_cache: KVCache | None = None) -> Tensor:
        q, k, v = (_heads(project(x_BSD), self.head) for project in (self.query, self.key, self.value))
        q, k = self.query_norm(q), self.key_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if kv_cache is not None:
            k, v = kv_cache.extend(k, v)
        attended = self.attend(q, k, v, scope)
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
