"""Multi-head latent attention (DeepSeek-V2 and V3): keys and values are expanded from one narrow vector per token, and the KV cache
holds only that vector. Replaces grouped-query attention in a block of `models/decoder`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.models.attention import Attend, KVCache, Scope, attend_locally
from phalanx.models.layers import HeadNorm, rotate, yarn_temperature
from phalanx.spec.model import Mla, ModelSpec

_RANK_EPS = 1e-6  # of the two inner norms; the published models use it regardless of the other norms


class LatentAttention(nn.Module):
    """Each head's query and key consists of a part without position and a rotated part, whose key all heads share."""

    attend: Attend

    def __init__(self, spec: ModelSpec, mla: Mla):
        super().__init__()
        self.mla = mla
        self.scale = attention_scale(spec, mla)
        width = spec.heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            self.query = nn.Linear(spec.dim, width, bias=False)
        else:
            self.query_down = nn.Linear(spec.dim, mla.q_rank, bias=False)
            self.query_rank_norm = HeadNorm(mla.q_rank, eps=_RANK_EPS)
            self.query_up = nn.Linear(mla.q_rank, width, bias=False)
        self.kv_down = nn.Linear(spec.dim, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_rank_norm = HeadNorm(mla.kv_rank, eps=_RANK_EPS)
        self.kv_up = nn.Linear(mla.kv_rank, spec.heads * (mla.nope_dim + mla.value_dim), bias=False)
        self.output = nn.Linear(spec.heads * mla.value_dim, spec.dim, bias=False)
        self.attend = attend_locally

    def forward(
        self, x_BSD: Tensor, scope: Scope, rotation: tuple[Tensor, Tensor] | None, kv_cache: KVCache | None = None
    ) -> Tensor:
        assert rotation is not None, "latent attention needs rotary positions; `spec/check_model` refuses others"
        batch, length, _ = x_BSD.shape
        q_BHSE = self._heads(self._queries(x_BSD), self.mla.nope_dim + self.mla.rope_dim)
        q_plain, q_rotated = q_BHSE.split((self.mla.nope_dim, self.mla.rope_dim), dim=-1)
        q_BHSE = torch.cat((q_plain, rotate(q_rotated, rotation).to(q_plain.dtype)), dim=-1)
        latent_BSR, shared_BSP = self.kv_down(x_BSD).split((self.mla.kv_rank, self.mla.rope_dim), dim=-1)
        latent_B1SR, shared_B1SP = self.kv_rank_norm(latent_BSR)[:, None], rotate(shared_BSP[:, None], rotation)
        if kv_cache is not None:  # caches the narrow vectors, not the expanded ones
            latent_B1SR, shared_B1SP = kv_cache.extend(latent_B1SR, shared_B1SP)
        k_BHTE, v_BHTE = self._expand(latent_B1SR[:, 0], shared_B1SP)
        attended = self.attend(q_BHSE, k_BHTE, v_BHTE, scope, self.scale)
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if self.mla.q_rank is None:
            return self.query(x_BSD)
        return self.query_up(self.query_rank_norm(self.query_down(x_BSD)))

    def _expand(self, latent_BTR: Tensor, shared_B1TP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head."""
        both = self._heads(self.kv_up(latent_BTR), self.mla.nope_dim + self.mla.value_dim)
        plain, v_BHTE = both.split((self.mla.nope_dim, self.mla.value_dim), dim=-1)
        shared = shared_B1TP.to(plain.dtype).expand(-1, plain.shape[1], -1, -1)
        return torch.cat((plain, shared), dim=-1), v_BHTE

    @staticmethod
    def _heads(x_BSW: Tensor, width: int) -> Tensor:
        # The number of heads is inferred, not stored: a tensor parallel rank that holds some of them runs the same line.
        batch, length, _ = x_BSW.shape
        return x_BSW.view(batch, length, -1, width).transpose(1, 2)


def attention_scale(spec: ModelSpec, mla: Mla) -> float:
    """The factor of attention scores, with YaRN's correction for a longer context, once for queries and once for keys."""
    scale = (mla.nope_dim + mla.rope_dim) ** -0.5
    scaling = spec.rope_scaling
    if scaling is not None and scaling.mscale_all_dim:
        scale *= yarn_temperature(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale
