"""A decoder whose projections are fused, as those of Phi-3 are, with a table for tensor parallelism. Imported by tests as `fused_models`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.model import ModelSpec

HEADS, KV, WIDE, FFN = 8, 4, 3, 20
_QKV = (("heads", HEADS * WIDE), ("kv_heads", KV * WIDE), ("kv_heads", KV * WIDE))
AXES = {
    "embed.weight": ("vocab", "model"),
    "*.qkv.weight": (_QKV, "model"),
    "*.qkv.bias": (_QKV,),
    "*.out.weight": ("model", "heads"),
    "*.gate_up.weight": ((("ffn", FFN), ("ffn", FFN)), "model"),
    "*.down.weight": ("model", "ffn"),
    "*norm.weight": ("model",),
    "head.weight": ("vocab", "model"),
}


class Attention(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, (HEADS + 2 * KV) * WIDE), nn.Linear(HEADS * WIDE, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = self.qkv(x_BSD).unflatten(-1, (-1, WIDE)).transpose(1, 2)
        kv = heads.shape[1] // (HEADS // KV + 2)
        q, k, v = heads.split((heads.shape[1] - 2 * kv, kv, kv), 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * FFN, bias=False), nn.Linear(FFN, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BSD).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.attention, self.mlp_norm, self.mlp = nn.RMSNorm(dim), Attention(dim), nn.RMSNorm(dim), Mlp(dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.norm(x_BSD))
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Fused(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.embed = nn.Embedding(spec.rows, spec.dim)
        self.blocks = nn.ModuleList(Block(spec.dim) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.dim)
        self.head = nn.Linear(spec.dim, spec.rows, bias=False)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))
